"""The words and the thought of a message, and marks that make them visible in a rendering."""

from __future__ import annotations

import re
from typing import Any

from megacp.prepare.records.chat_template import REASONING, THOUGHT, THOUGHT_END
from megacp.prepare.records.marks import THOUGHT_WORDS, WORDS, Marks, marked_text, marked_value

EMPTY_THOUGHT = re.compile(rf"\A\s*{THOUGHT}\s*{THOUGHT_END}\s*")
"""An empty thought at the beginning of a message's content."""
LINK_KEYS = ("role", "type", "id", "index", "tool_call_id")
"""Keys for types and references, which a template may omit."""


def message_words(message: dict[str, Any], key: str = "content", between: str = "") -> str:
    """Return the texts in a message's value at `key`, joined by `between`."""
    value = message.get(key)
    # treat a string like a list with one text part
    parts = value if isinstance(value, list) else [{"text": value}]
    texts = []
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    return between.join(texts)


def thought_apart(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the thought of an answer ("" for none) and the answer without it.

    The thought is a separate value, or it precedes the words in the content. There, its opening tag
    may be missing, because a prompt may end with that tag.
    """
    given = {key: value for key, value in message.items() if key not in REASONING}
    # the values that `given` leaves out
    thoughts = [str(message[key] or "") for key in message.keys() - given.keys()]
    content = message_words(message)
    if _holds_thought(content):
        thought, _, words = content.rpartition(THOUGHT_END)
        given["content"] = words.lstrip("\n")
        thoughts.append(thought.replace(THOUGHT, ""))
    return "".join(thoughts).strip(), given


def _holds_thought(content: str) -> bool:
    """Return whether message content begins with a thought, with or without its opening tag."""
    if THOUGHT_END not in content:
        return False
    return content.lstrip().startswith(THOUGHT) or THOUGHT not in content


def is_blank(value: Any) -> bool:
    """Return whether a value is empty or white space."""
    return not value or (isinstance(value, str) and not value.strip())


def solid(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def marked_message(message: dict[str, Any], i: int, marks: Marks) -> dict[str, Any]:
    """Return message i with a mark in its thought and in each value that a template may write."""
    made = {}
    for key, value in message.items():
        # a mark in a type, a reference or an empty value would change the template's behaviour
        if key in LINK_KEYS or is_blank(value):
            made[key] = value
        elif key in REASONING:
            made[key] = marked_value(value, marks.new(i, THOUGHT_WORDS))
        elif key == "content" and isinstance(value, str) and _holds_thought(value):
            made[key] = _marked_content(value, i, marks)
        else:
            place = WORDS if key == "content" else key
            made[key] = marked_value(value, marks.new(i, place))
    return made


def _marked_content(content: str, i: int, marks: Marks) -> str:
    """Return content that begins with a thought, with marks in the thought and before the words."""
    # the last closing tag ends the thought, as in `thought_apart`
    end = content.rindex(THOUGHT_END)
    thought = content[:end]
    after = content[end + len(THOUGHT_END) :]
    words = marked_text(after, marks.new(i, WORDS))
    # an empty thought gets no mark: the mark would make it a real one
    if thought.replace(THOUGHT, "").strip():
        thought = marked_text(thought, marks.new(i, THOUGHT_WORDS))
    return thought + THOUGHT_END + words
