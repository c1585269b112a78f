"""With which tokens the answers of a chat template end: what stops a model that was trained on messages.

Key property: the template itself says it, by what it writes behind the learned words of a few conversations, read as a
build reads records. So datasets and checkpoints of any age are answered for. Rejected: the end token that a tokenizer's
files name, which messages of a template may never hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacp.prepare.records.chat_template import ChatTemplate, template_of
from megacp.prepare.records.parts import Rendered
from megacp.prepare.records.record import RecordError
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import Tokenizer

_WORD = "Certainly"
_DAY = "2026-01-31"
"""For templates that write a date: no answer ends with it."""
_ASK: dict[str, Any] = {"role": "user", "content": "Why?"}
_TELL: dict[str, Any] = {"role": "assistant", "content": _WORD}
_CALLED = {"name": "look", "arguments": {"place": _WORD}}
_CALL: dict[str, Any] = {"role": "assistant", "tool_calls": [{"type": "function", "function": _CALLED}]}
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "Where"}}}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks", "parameters": _PARAMETERS}}]
_PROBE: tuple[dict[str, Any], ...] = (
    {"messages": [_ASK, _TELL]},
    {"messages": [_ASK, _TELL, _ASK, _TELL]},
    {"messages": [_ASK, _TELL], "tools": _TOOLS},
    {"messages": [_ASK, _CALL], "tools": _TOOLS},
)


def answer_ends(texts: Mapping[str, str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the special tokens that templates, by name, have learned behind an answer; none where none is known.

    ValueError: the files beside the tokenizer's name tokens that it does not have.
    """
    template = template_of(texts, tokenizer, _DAY)
    found = [token for record in _PROBE for token in _learned_behind(record, template)]
    ids = [tokenizer.token_id(token) for token in dict.fromkeys(found)]
    return tuple(i for i in ids if i is not None)


def _learned_behind(record: dict[str, Any], template: ChatTemplate) -> list[str]:
    """The special tokens behind the words of each answer; of a call the last one, for others may end its parts."""
    try:
        rendered = parse_record(record, template=template).prefix[0]
    except RecordError:  # no such conversation is in the data either
        return []
    assert isinstance(rendered, Rendered) and rendered.text, "a template writes all of a record"
    found = []
    for start, stop, _ in rendered.learned:
        _, word, behind = rendered.text[start:stop].rpartition(_WORD)
        tokens = template.forgeable.findall(behind) if word else []
        found += tokens[-1:] if _CALL in record["messages"] else tokens
    return found
