"""The words and the thought of a message, and the places in it that a rendering is searched for."""

from __future__ import annotations

import re
from typing import Any

from megacp.prepare.records.chat_template import REASONING, THOUGHT, THOUGHT_END
from megacp.prepare.records.marks import THOUGHT_WORDS, WORDS, Marks, marked_text, marked_value

EMPTY_THOUGHT = re.compile(rf"\A\s*{THOUGHT}\s*{THOUGHT_END}\s*")
"""An empty thought at the beginning of a content, whatever the template makes of it."""
LINK_KEYS = ("role", "type", "id", "index", "tool_call_id")
"""Keys that say what a value is or what belongs together: a template need not write them."""


def message_words(message: dict[str, Any], key: str = "content", between: str = "") -> str:
    """Join the texts of a value of a message."""
    value = message.get(key)
    parts = value if isinstance(value, list) else [{"text": value}]
    return between.join(
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def thought_apart(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The thought of an answer, by itself or before its words (the prompt may open it), and the
    answer without.
    """
    given = {key: value for key, value in message.items() if key not in REASONING}
    thoughts = [str(message[key] or "") for key in message.keys() - given.keys()]
    content = message_words(message)
    if _holds_thought(content):
        thought, _, said = content.rpartition(THOUGHT_END)
        given["content"] = said.lstrip("\n")
        thoughts.append(thought.replace(THOUGHT, ""))
    return "".join(thoughts).strip(), given


def _holds_thought(content: str) -> bool:
    return THOUGHT_END in content and (
        content.lstrip().startswith(THOUGHT) or THOUGHT not in content
    )


def is_blank(value: Any) -> bool:
    """Whether a value says nothing."""
    return not value or (isinstance(value, str) and not value.strip())


def solid(text: str) -> str:
    """A text without its blanks."""
    return "".join(text.split())


def marked_message(message: dict[str, Any], i: int, marks: Marks) -> dict[str, Any]:
    """Message i with a mark in each of its values that may be written, and one in its thought."""
    made = {}
    for key, value in message.items():
        if key in LINK_KEYS or is_blank(value):
            made[key] = value
        elif key in REASONING:
            made[key] = marked_value(value, marks.new(i, THOUGHT_WORDS))
        elif key == "content" and isinstance(value, str) and _holds_thought(value):
            made[key] = _marked_content(value, i, marks)
        else:
            made[key] = marked_value(value, marks.new(i, WORDS if key == "content" else key))
    return made


def _marked_content(content: str, i: int, marks: Marks) -> str:
    """A content that begins with a thought, with a mark in the thought and one in the words after
    it.
    """
    end = content.rindex(THOUGHT_END)
    thought = content[:end]
    words = marked_text(content[end + len(THOUGHT_END) :], marks.new(i, WORDS))
    if thought.replace(THOUGHT, "").strip():
        thought = marked_text(thought, marks.new(i, THOUGHT_WORDS))
    return thought + THOUGHT_END + words
