"""A record of the input as a `Sample`: pieces of text with a loss weight each, after a shared prefix maybe branches.

Messages become `<|ROLE|>` newline CONTENT, with a newline between them, and the end-of-document token after an
assistant's, which is learned with it. A branch sees the record's text as its prefix, and no other branch. After an
image, a learned branch begins with a newline that is not learned: no text token would predict its first word.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megacp.prepare.records.chat_template import ChatTemplate
from megacp.prepare.records.conversation import WrittenTalk
from megacp.prepare.records.forms import Said, Talk, from_messages, header, plain_text, said_by, weight_of
from megacp.prepare.records.record import (
    LEARNED_ROLES,
    RecordError,
    RecordRules,
    Rendered,
    Sample,
    SamplePart,
    described,
)

TEXT_RULES = RecordRules()
RECORD_KEYS = ("weight", "branches")
"""Of a record beside what it says."""


def parse_record(record: Any, rules: RecordRules = TEXT_RULES, template: ChatTemplate | None = None) -> Sample:
    """A decoded record as a Sample; `template` writes its messages. RecordError says what is wrong with it."""
    if not isinstance(record, dict):
        raise RecordError(f"a record must be a JSON object, found {described(record)}")
    said = said_by(record, rules, RECORD_KEYS, template is not None)
    branches = record.get("branches")
    if branches is not None and (not isinstance(branches, list) or not branches):
        raise RecordError(f"`branches` must be a list of at least one continuation, found {described(branches)}")
    found = [_branch(branch, i, rules, template is not None) for i, branch in enumerate(branches or ())]
    talks = any(isinstance(each, Talk) for each in (said, *(branch for branch, _ in found)))
    made = _templated(said, found, template, rules) if template is not None and talks else _plain(said, found, rules)
    weight = 1.0 if rules.ignore_weights else weight_of(record, "weight")
    weighed = tuple(_weighed(branch, weight) for branch in made.branches)
    return replace(made, prefix=_weighed(made.prefix, weight), branches=weighed, talks=talks)


def _weighed(pieces: tuple[SamplePart, ...], weight: float) -> tuple[SamplePart, ...]:
    """Pieces with their loss weights times `weight`."""
    found: list[SamplePart] = []
    for piece in pieces if weight != 1.0 else ():
        if isinstance(piece, Rendered):
            learned = tuple((start, stop, each * weight) for start, stop, each in piece.learned)
            found.append(replace(piece, learned=learned))
        else:
            found.append(replace(piece, weight=piece.weight * weight))
    return tuple(found) or pieces


def _plain(said: Said, branches: list[tuple[Said, float]], rules: RecordRules) -> Sample:
    """A record in the house's own form."""
    if not branches:
        return Sample(_ended(said, rules))
    prefix = from_messages(said, rules) if isinstance(said, Talk) else said
    joined = []
    for branch, weight in branches:
        first, *rest = _ended(branch, rules)
        if isinstance(said, Talk) and isinstance(branch, Talk):  # as in one conversation
            first = replace(first, text=f"\n{first.text}")
        elif prefix[-1].media is not None and first.weight > 0:
            first, rest = SamplePart("\n", 0.0), [first, *rest]
        joined.append(_weighed((first, *rest), weight))
    return Sample(tuple(prefix), tuple(joined))


def _ended(said: Said, rules: RecordRules) -> tuple[SamplePart, ...]:
    """A record's pieces to the end of its document, or the header of the answer that it asks for."""
    pieces = from_messages(said, rules) if isinstance(said, Talk) else said
    if rules.asks and isinstance(said, Talk) and said.messages[-1]["role"] not in LEARNED_ROLES:
        pieces = [*pieces, header(LEARNED_ROLES[0], first=False)]
    if pieces[-1].is_end:  # an assistant's last word ends the document too
        return tuple(pieces)
    return (*pieces, SamplePart(None, pieces[-1].weight))


def _templated(said: Said, branches: list[tuple[Said, float]], template: ChatTemplate, rules: RecordRules) -> Sample:
    """A record whose messages a template writes."""
    if not isinstance(said, Talk):
        raise RecordError("a branch has messages and the record has none: a chat template writes whole conversations")
    shared = None if rules.asks and branches else WrittenTalk(said, template, rules)  # each question is whole
    written, found = [shared] if shared is not None else [], []
    for i, (branch, weight) in enumerate(branches):
        if not isinstance(branch, Talk):
            raise RecordError(f"`branches[{i}]` has no messages: a chat template writes whole conversations")
        if branch.tools is not None or branch.variables:
            raise RecordError(f"`branches[{i}]`: tools and variables of a template are those of the whole record")
        whole = replace(said, messages=said.messages + branch.messages, paths=said.paths + branch.paths)
        written.append(WrittenTalk(whole, template, rules))
        found.append(written[-1].pieces(shared, weight))
    first = shared.in_context if shared is not None else 0
    in_context = first + sum(each.in_context - first for each in written[1:])
    before_answers = min((each.before_answers for each in written if each.before_answers is not None), default=None)
    prefix = shared.pieces() if shared is not None else ()
    return Sample(prefix, tuple(found), in_context=in_context, before_answers=before_answers)


def _branch(value: Any, i: int, rules: RecordRules, has_template: bool) -> tuple[Said, float]:
    """What a branch says, and its weight."""
    where = f"branches[{i}]"
    if isinstance(value, str):
        return plain_text(value, where), 1.0
    if not isinstance(value, dict):
        raise RecordError(f"`{where}` is {described(value)}, it must be a string or an object")
    if value.get("branches") is not None:
        raise RecordError(f"`{where}.branches`: branches of branches are written out as branches")
    weight = 1.0 if rules.ignore_weights else weight_of(value, f"{where}.weight")
    return said_by(value, rules, ("weight",), has_template, where), weight
