"""A record of the input as a `Sample`: pieces of text with a loss weight each, after a shared
prefix maybe branches.

Messages become `<|ROLE|>` newline CONTENT, with a newline between them, and the end-of-document
token after an assistant's, which is learned with it. A branch sees what it continues, the record's
text or another branch, and all before that. After an image, a learned branch begins with a newline
that is not learned: no text token would predict its first word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megacp.prepare.records.chat_template import ChatTemplate, Template, loaded
from megacp.prepare.records.conversation import WrittenTalk
from megacp.prepare.records.forms import (
    TALKS,
    Said,
    Talk,
    from_messages,
    plain_text,
    said_by,
    turn_header,
    weight_of,
)
from megacp.prepare.records.record import (
    LEARNED_ROLES,
    RecordError,
    RecordRules,
    Rendered,
    Sample,
    SamplePart,
    described,
)
from megacp.prepare.records.turns import are_messages

TEXT_RULES = RecordRules()
RECORD_KEYS = ("weight", "branches")
"""Keys of a record, or a branch, beside what it says."""


class _Said(NamedTuple):
    """What a record says, or a branch: its loss weight there, its place, and the number of what it
    continues.
    """

    what: Said
    weight: float
    where: str
    parent: int


def parse_record(
    record: Any, rules: RecordRules = TEXT_RULES, template: Template | None = None
) -> Sample:
    """A decoded record as a Sample; `template` writes its messages. RecordError says what is wrong
    with it.
    """
    record = _object(record, rules)
    given = {key for key, value in record.items() if value is not None and value != []}
    given -= {rules.text_key, *rules.ignore_keys}
    if "rollouts" in given or given >= {"prompt", "completions"}:
        made = _together(
            record, "rollouts" if "rollouts" in given else "completions", rules, template
        )
    else:
        said, forms = _said_in(record, rules, template is not None)
        talks = any(isinstance(each.what, Talk) for each in said)
        made = (
            _templated(said, loaded(template), rules)
            if template is not None and talks
            else _plain(said, rules)
        )
        made = replace(made, talks=talks, forms=forms)
    weight = 1.0 if rules.ignore_weights else weight_of(record, "weight")
    weighed = tuple(_weighed(branch, weight) for branch in made.branches)
    return replace(made, prefix=_weighed(made.prefix, weight), branches=weighed)


def _object(record: Any, rules: RecordRules) -> dict[str, Any]:
    """Return a record as an object with the keys that are read; a list of messages is a
    conversation.
    """
    if are_messages(record):
        record = {TALKS[0]: record}
    if isinstance(record, dict):
        return rules.renamed(record)
    hint = ""
    if isinstance(record, str) and record.lstrip().startswith(("{", "[")):
        hint = " that holds JSON; jq -c fromjson FILE > NEW.jsonl makes records of such lines"
    raise RecordError(f"a record must be a JSON object, found {described(record)}{hint}")


def _together(
    record: dict[str, Any], key: str, rules: RecordRules, template: Template | None
) -> Sample:
    """The rollouts at `key` of a record: wholes, of which a `DocumentMaker` makes the tree of what
    they share.
    """
    rest, rollouts = (
        {name: value for name, value in record.items() if name not in (key, "weight")},
        record[key],
    )
    if not rules.prefix_tree:
        raise RecordError(
            f"`{key}` holds rollouts, and --prefix-tree (of a build) merges what they share into a "
            "tree"
        )
    if not isinstance(rollouts, list):
        raise RecordError(f"`{key}` must be a list of rollouts, found {described(rollouts)}")
    if other := [name for name in ("branches", "completion") if rest.get(name) is not None]:
        raise RecordError(f"`{key}` and `{other[0]}` are both what follows; leave one out")
    if key == "completions":
        rollouts = [{**rest, "completion": each} for each in rollouts]
    else:
        rules.refuse_lost(rest, (), "", in_record=True)
    found = []
    for i, rollout in enumerate(rollouts):
        try:
            found.append(parse_record(rollout, rules, template))
            if found[-1].branches:
                raise RecordError(
                    "a rollout is one text or conversation, without branches or rollouts of its own"
                )
        except RecordError as error:
            raise RecordError(f"`{key}[{i}]`: {error}") from error
    parts, answers = [each.prefix for each in found], Counter[str]()
    for each in found:
        answers.update(each.answers)
    talks = any(each.talks for each in found)
    forms = frozenset[str]().union(*(each.forms for each in found))
    before = max(each.before_answers for each in found)
    return Sample(
        parts[0], tuple(parts[1:]), (-1,) * (len(parts) - 1), talks, forms, answers, before
    )


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


def _plain(said: Sequence[_Said], rules: RecordRules) -> Sample:
    """A record in the house's own form."""
    parents, parts = [each.parent for each in said], list[tuple[SamplePart, ...]]()
    for number, each in enumerate(said):
        first, *rest = _pieces(each.what, rules, ends=number not in parents)
        if number and isinstance(said[each.parent].what, Talk) and isinstance(each.what, Talk):
            first = replace(first, text=f"\n{first.text}")  # as in one conversation
        elif number and parts[each.parent][-1].media is not None and first.weight > 0:
            first, rest = SamplePart("\n", 0.0), [first, *rest]
        parts.append(_weighed((first, *rest), each.weight))
    return Sample(parts[0], tuple(parts[1:]), tuple(parents[1:]))


def _pieces(said: Said, rules: RecordRules, ends: bool) -> tuple[SamplePart, ...]:
    """A part's pieces; one that `ends`: to the end of its document, or the header of the answer
    that it asks for.
    """
    pieces = from_messages(said, rules) if isinstance(said, Talk) else said
    if not ends:
        return tuple(pieces)
    if rules.asks and isinstance(said, Talk) and said.messages[-1]["role"] not in LEARNED_ROLES:
        pieces = [*pieces, turn_header(LEARNED_ROLES[0], first=False)]
    if pieces[-1].is_end:  # an assistant's last word ends the document too
        return tuple(pieces)
    return (*pieces, SamplePart(None, pieces[-1].weight))


def _templated(said: Sequence[_Said], template: ChatTemplate, rules: RecordRules) -> Sample:
    """A record whose messages a template writes: each branch with all that it continues is a
    conversation.
    """
    talks, written, parts = list[Talk](), list[WrittenTalk | None](), list[tuple[SamplePart, ...]]()
    answers, before_answers = Counter[str](), ""
    continued = {each.parent for each in said[1:]}
    for number, (talk, weight, where, parent) in enumerate(said):
        if not isinstance(talk, Talk):
            what = (
                f"`{where}` has no messages"
                if where
                else "a branch has messages and the record has none"
            )
            raise RecordError(f"{what}: a chat template writes whole conversations")
        if where and (talk.tools is not None or talk.variables):
            raise RecordError(
                f"`{where}`: tools and variables of a template are those of the whole record"
            )
        before = talks[parent] if where else Talk([], (), talk.tools, _variables(talk, template))
        talks.append(
            replace(
                before, messages=before.messages + talk.messages, paths=before.paths + talk.paths
            )
        )
        if rules.asks and not where and len(said) > 1:  # each question is whole
            written.append(None)
            parts.append(())
            continue
        shared = written[parent] if where else None
        whole = WrittenTalk(talks[-1], template, rules, goes_on=number in continued)
        written.append(whole)
        parts.append(whole.pieces(shared, weight))
        answers += whole.answers if shared is None else whole.answers - shared.answers
        before_answers = max(before_answers, whole.before_answers)
    parents = tuple(each.parent for each in said[1:])
    return Sample(
        parts[0], tuple(parts[1:]), parents, answers=answers, before_answers=before_answers
    )


def _variables(talk: Talk, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables of a conversation without those that are empty and that its template
    does not read.
    """
    found = {}
    for name, value in talk.variables.items():
        is_read = name in template.text
        if not is_read and value not in (None, "", [], {}, False):
            raise RecordError(
                f"`chat_template_kwargs.{name}`: the chat template reads no such variable; "
                "--ignore-keys chat_template_kwargs leaves all of them out"
            )
        if is_read:
            found[name] = value
    return found


def _said_in(
    record: dict[str, Any], rules: RecordRules, has_template: bool
) -> tuple[list[_Said], frozenset[str]]:
    """What a record says and all its branches, after each those that continue it, and the forms of
    their answers.
    """
    found, waiting = list[_Said](), [(record, "", -1, 1.0)]
    forms = set[str]()
    while waiting:
        value, where, parent, weight = waiting.pop()
        if rules.asks and parent > 0:
            raise RecordError(
                f"`{where}`: a branch of a branch cannot be asked; make a record of all it "
                "continues"
            )
        if isinstance(value, str):
            what, value = plain_text(value, where), {}
        elif not isinstance(value, dict):
            raise RecordError(f"`{where}` is {described(value)}, it must be a string or an object")
        else:
            value = rules.renamed(value) if where else value
            what, form = said_by(value, rules, RECORD_KEYS, has_template, where)
            forms |= {form} if form else set()
        if where and not rules.ignore_weights:
            weight *= weight_of(value, f"{where}.weight")
            weight_of({"weight": weight}, f"{where}.weight times those of all it continues")
        found.append(_Said(what, weight, where, parent))
        at, branches = f"{where}.branches" if where else "branches", value.get("branches")
        if branches is not None and (not isinstance(branches, list) or not branches):
            raise RecordError(
                f"`{at}` must be a list of at least one continuation, found {described(branches)}"
            )
        waiting += [
            (each, f"{at}[{i}]", len(found) - 1, weight) for i, each in enumerate(branches or ())
        ][::-1]
    return found, frozenset(forms)
