"""Parse a record into a `Sample`: texts with a loss weight each, a shared prefix and its branches.

Without a chat template, a message becomes `<|ROLE|>`, a newline and its content, with a newline
between messages. The end-of-document token follows an assistant message and is learned with it. A
branch sees the part that it continues (the record's text or another branch) and everything before
that. After an image, a learned branch begins with a newline without loss, because no text token
would predict its first word.
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
from megacp.prepare.records.indexed import TokenIds
from megacp.prepare.records.record import (
    LEARNED_ROLES,
    RecordError,
    RecordRules,
    Rendered,
    Sample,
    SamplePart,
    Tokenized,
    described,
)
from megacp.prepare.records.turns import are_messages

# the defaults: plain text under `text`, no media, no unknown keys
TEXT_RULES = RecordRules()
RECORD_KEYS = ("weight", "branches")
"""Keys of a record or branch in addition to its contents."""


class _Said(NamedTuple):
    """The contents of a record or branch, with its loss weight, path, and the number of the part
    that it continues.
    """

    what: Said
    weight: float
    where: str
    parent: int


def parse_record(
    record: Any, rules: RecordRules = TEXT_RULES, template: Template | None = None
) -> Sample:
    """Parse a decoded record; `template` renders its messages.

    Raise RecordError if the record is invalid.
    """
    if isinstance(record, TokenIds):
        if rules.asks:
            raise RecordError("a tokenized dataset has no prompts; give records with messages")
        return Sample((Tokenized("", 1.0, ids=record.ids),))
    record = _object(record, rules)
    given = {key for key, value in record.items() if value is not None and value != []}
    given -= {rules.text_key, *rules.ignore_keys}
    # several whole samples in one record, or one sample
    if "rollouts" in given or given >= {"prompt", "completions"}:
        key = "rollouts" if "rollouts" in given else "completions"
        made = _together(record, key, rules, template)
    else:
        said, forms = _said_in(record, rules, template is not None)
        talks = any(isinstance(each.what, Talk) for each in said)
        if template is not None and talks:
            made = _templated(said, loaded(template), rules)
        else:
            made = _plain(said, rules)
        made = replace(made, talks=talks, forms=forms)
    # the record's weight is a factor of all weights inside it
    weight = 1.0 if rules.ignore_weights else weight_of(record, "weight")
    weighed = tuple(_weighed(branch, weight) for branch in made.branches)
    return replace(made, prefix=_weighed(made.prefix, weight), branches=weighed)


def _object(record: Any, rules: RecordRules) -> dict[str, Any]:
    """Return a record as an object with renamed keys; a list of messages becomes a conversation."""
    if are_messages(record):
        record = {TALKS[0]: record}
    if isinstance(record, dict):
        return rules.renamed(record)
    hint = ""
    if isinstance(record, str) and record.lstrip().startswith(("{", "[")):
        hint = " that contains JSON; convert its lines: jq -c fromjson FILE > NEW.jsonl"
    raise RecordError(
        'a record must be a JSON object, such as {"text": "..."} or {"messages": [...]}, found '
        f"{described(record)}{hint}"
    )


def _together(
    record: dict[str, Any], key: str, rules: RecordRules, template: Template | None
) -> Sample:
    """Return the rollouts at `key` of a record as a sample of whole documents.

    A `DocumentMaker` merges their common prefixes into a tree.
    """
    rest = {name: value for name, value in record.items() if name not in (key, "weight")}
    rollouts = record[key]
    if not rules.prefix_tree:
        raise RecordError(
            f"`{key}` contains rollouts; build with --prefix-tree to merge their common prefixes "
            "into a tree"
        )
    if not isinstance(rollouts, list):
        raise RecordError(f"`{key}` must be a list of rollouts, found {described(rollouts)}")
    other = [name for name in ("branches", "completion") if rest.get(name) is not None]
    if other:
        raise RecordError(f"`{key}` and `{other[0]}` are both continuations; leave one out")
    # completions share the remaining keys of the record; rollouts are complete records
    if key == "completions":
        rollouts = [{**rest, "completion": each} for each in rollouts]
    else:
        rules.refuse_lost(rest, (), "", in_record=True)
    found = []
    # parse each rollout as a record, and name it in errors
    for i, rollout in enumerate(rollouts):
        try:
            found.append(parse_record(rollout, rules, template))
            if found[-1].branches:
                raise RecordError(
                    "a rollout must be one text or conversation, without branches or rollouts"
                )
        except RecordError as error:
            raise RecordError(f"`{key}[{i}]`: {error}") from error
    parts = [each.prefix for each in found]
    answers = Counter[str]()
    for each in found:
        answers.update(each.answers)
    return Sample(
        prefix=parts[0],
        branches=tuple(parts[1:]),
        parents=(-1,) * (len(parts) - 1),  # -1: a whole document
        talks=any(each.talks for each in found),
        forms=frozenset[str]().union(*(each.forms for each in found)),
        answers=answers,
        before_answers=max(each.before_answers for each in found),
    )


def _weighed(pieces: tuple[SamplePart, ...], weight: float) -> tuple[SamplePart, ...]:
    """Return parts with their loss weights multiplied by `weight`."""
    if weight == 1.0:
        return pieces
    found: list[SamplePart] = []
    for piece in pieces:
        # a rendering has a weight for each range of characters
        if isinstance(piece, Rendered):
            learned = tuple((start, stop, each * weight) for start, stop, each in piece.learned)
            found.append(replace(piece, learned=learned))
        else:
            found.append(replace(piece, weight=piece.weight * weight))
    return tuple(found)


def _plain(said: Sequence[_Said], rules: RecordRules) -> Sample:
    """Return a record as a sample without a chat template."""
    parents = [each.parent for each in said]
    parts: list[tuple[SamplePart, ...]] = []
    for number, each in enumerate(said):
        # only a part that no branch continues ends the document
        first, *rest = _pieces(each.what, rules, ends=number not in parents)
        if number and isinstance(said[each.parent].what, Talk) and isinstance(each.what, Talk):
            # separate the messages of the branch from the messages before it
            first = replace(first, text=f"\n{first.text}")
        elif number and parts[each.parent][-1].media is not None and first.weight > 0:
            # no text token precedes the branch, so give its first word one that predicts it
            rest = [first, *rest]
            first = SamplePart("\n", 0.0)
        parts.append(_weighed((first, *rest), each.weight))
    return Sample(parts[0], tuple(parts[1:]), tuple(parents[1:]))


def _pieces(said: Said, rules: RecordRules, ends: bool) -> tuple[SamplePart, ...]:
    """Return the pieces of a part.

    If the part `ends` a document, add its end; for a prompt, add the header of the answer instead.
    """
    pieces = from_messages(said, rules) if isinstance(said, Talk) else said
    if not ends:
        return tuple(pieces)
    if rules.asks and isinstance(said, Talk) and said.messages[-1]["role"] not in LEARNED_ROLES:
        pieces = [*pieces, turn_header(LEARNED_ROLES[0], first=False)]
    if pieces[-1].is_end:  # an assistant message already has an end
        return tuple(pieces)
    # the end of a document has the weight of its last text
    return (*pieces, SamplePart(None, pieces[-1].weight))


def _templated(said: Sequence[_Said], template: ChatTemplate, rules: RecordRules) -> Sample:
    """Return a record rendered by a chat template.

    Each branch is rendered together with everything that it continues, as one conversation.
    """
    # by number of the part: its whole conversation, the rendering, and its own pieces
    talks: list[Talk] = []
    written: list[WrittenTalk | None] = []
    parts: list[tuple[SamplePart, ...]] = []
    answers = Counter[str]()
    before_answers = ""
    continued = {each.parent for each in said[1:]}
    for number, (talk, weight, where, parent) in enumerate(said):
        if not isinstance(talk, Talk):
            problem = "a branch has messages, but the record has none"
            if where:
                problem = f"`{where}` has no messages"
            raise RecordError(f"{problem}: a chat template renders only whole conversations")
        if where and (talk.tools is not None or talk.variables):
            raise RecordError(
                f"`{where}`: a branch cannot have tools or template variables; give them in the "
                "record"
            )
        before = talks[parent] if where else Talk([], (), talk.tools, _variables(talk, template))
        messages = before.messages + talk.messages
        paths = before.paths + talk.paths
        talks.append(replace(before, messages=messages, paths=paths))
        # for prompts, each branch is a separate question and includes the shared messages
        if rules.asks and not where and len(said) > 1:
            written.append(None)
            parts.append(())
            continue
        shared = written[parent] if where else None
        # render the conversation from its beginning; `pieces` keeps only the branch's own part
        whole = WrittenTalk(talks[-1], template, rules, goes_on=number in continued)
        written.append(whole)
        parts.append(whole.pieces(shared, weight))
        # answers in the shared messages have been counted with the part above
        answers += whole.answers if shared is None else whole.answers - shared.answers
        before_answers = max(before_answers, whole.before_answers)
    parents = tuple(each.parent for each in said[1:])
    return Sample(
        parts[0], tuple(parts[1:]), parents, answers=answers, before_answers=before_answers
    )


def _variables(talk: Talk, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables of a conversation that its template uses.

    Raise RecordError for other variables, unless their value is empty or false.
    """
    found = {}
    for name, value in talk.variables.items():
        is_read = name in template.text
        if not is_read and value not in (None, "", [], {}, False):
            raise RecordError(
                f"`chat_template_kwargs.{name}`: the chat template does not use this variable; use "
                "--ignore-keys chat_template_kwargs to leave all variables out"
            )
        if is_read:
            found[name] = value
    return found


def _said_in(
    record: dict[str, Any], rules: RecordRules, has_template: bool
) -> tuple[list[_Said], frozenset[str]]:
    """Return the contents of a record and all its branches, and the forms of their answers.

    The order is depth first: each part is followed by the branches that continue it.
    """
    found: list[_Said] = []
    forms: set[str] = set()
    waiting = [(record, "", -1, 1.0)]  # a stack of (value, path, part above, weight)
    while waiting:
        value, where, parent, weight = waiting.pop()
        if rules.asks and parent > 0:
            raise RecordError(
                f"`{where}`: a prompt cannot be a branch of a branch; make a separate record with "
                "everything it continues"
            )
        if isinstance(value, str):
            what = plain_text(value, where)
            value = {}
        elif not isinstance(value, dict):
            raise RecordError(
                f"`{where}` is {described(value)}, but it must be a string or an object"
            )
        else:
            if where:  # the record's keys have already been renamed
                value = rules.renamed(value)
            what, form = said_by(value, rules, RECORD_KEYS, has_template, where)
            if form:
                forms.add(form)
        # the weight of a branch is a factor of the weight of the part above
        if where and not rules.ignore_weights:
            weight *= weight_of(value, f"{where}.weight")
            weight_of({"weight": weight}, f"{where}.weight (times the weights of the parts above)")
        found.append(_Said(what, weight, where, parent))
        at = f"{where}.branches" if where else "branches"
        branches = value.get("branches")
        if branches is not None and (not isinstance(branches, list) or not branches):
            raise RecordError(
                f"`{at}` must be a list of at least one continuation, found {described(branches)}"
            )
        # reversed, because the stack returns the last entry first
        own = [
            (each, f"{at}[{i}]", len(found) - 1, weight) for i, each in enumerate(branches or ())
        ]
        waiting += reversed(own)
    return found, frozenset(forms)
