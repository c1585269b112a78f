"""What a record says, as texts or as messages: its forms, its messages, the images that its texts
leave a place for.

A record has exactly one form. Keys of two forms in one record are refused with both names, as only
one of the two would be learned, unless one repeats the other word by word. Whether a message is
learned depends only on its role and its `weight`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megacp.prepare.records.advice import advice_for, refuse_untrained
from megacp.prepare.records.record import (
    ALPACA,
    AS_MESSAGES,
    CONTEXT_ROLES,
    END,
    LEARNED_ROLES,
    LINKS,
    MEDIA_SOURCES,
    MEDIA_TYPES,
    RecordError,
    RecordRules,
    SamplePart,
    decode_json,
    described,
    media_at,
    text_at,
    without_nulls,
)
from megacp.prepare.records.turns import (
    ROLE_KEYS,
    are_messages,
    json_at,
    list_at,
    messages_at,
    system_text,
)

MESSAGE_KEYS = ("role", "content", "weight", "id")
MOST_WEIGHT = 1e12
"""Largest weight of a record, a branch and a message: the three times each other are finite in
float32.
"""
_PLACE = re.compile(r"<(image|video)>")
"""What stands in a text for the next of a record's images or videos."""
_UNFILLED = re.compile(r"^<image>|<image>$", re.MULTILINE)
"""A place at the edge of a line, where no image is named; amid a line it may be a word about
images.
"""
_SOURCES = (*MEDIA_SOURCES, *MEDIA_TYPES, *LINKS)
"""Keys of a part that name its image or video."""
IMAGE_AS_TEXT = "<image>"
"""Word of --ignore-keys by which such a place is learned as text."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"


@dataclass(frozen=True)
class Talk:
    """The messages of a record, whatever its form, with what else a chat template is given."""

    messages: list[dict[str, Any]]
    paths: tuple[str, ...]
    """Where each stands in the record."""
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


Said = list[SamplePart] | Talk


# ---- messages and contents


def talk_of(value: Any, key: str, rules: RecordRules) -> Talk:
    """Return the messages at `key` of a record; RecordError when they are none."""
    messages = messages_at(value, key, rules)
    return Talk(messages, tuple(f"{key}[{i}]" for i in range(len(messages))))


def role_and_weight(message: dict[str, Any], where: str, rules: RecordRules) -> tuple[str, float]:
    """Who says a message, and the loss weight of its content: its `weight` where the role is
    learned, else 0.
    """
    role, weight = text_at(message["role"], f"{where}.role"), weight_of(message, f"{where}.weight")
    if (
        role not in (*LEARNED_ROLES, *CONTEXT_ROLES, *rules.context_roles)
        and "*" not in rules.context_roles
    ):
        raise RecordError(
            f"`{where}.role`: {role!r} is none of the roles "
            f"{', '.join((*CONTEXT_ROLES, *LEARNED_ROLES))}. "
            f"--roles assistant={role} if its answers are to be learned, --roles user={role} if it "
            "asks, "
            f"--context-roles {role} if it is somebody else, of whom nothing is learned"
        )
    if role in LEARNED_ROLES:
        return role, 1.0 if rules.ignore_weights else weight
    if message.get("weight") is not None and weight > 0:
        raise RecordError(
            f"`{where}.weight` is {weight:g}, but nothing that a {role} says is learned; leave it "
            "out"
        )
    return role, 0.0


def from_messages(talk: Talk, rules: RecordRules) -> list[SamplePart]:
    """Messages in the house's own form."""
    pieces: list[SamplePart] = []
    for i, (message, where) in enumerate(zip(talk.messages, talk.paths, strict=True)):
        if "content" not in message:
            calls = ": tool calls are written by a chat template, give --chat-template" * (
                "tool_calls" in message
            )
            raise RecordError(f"`{where}` has no `content`{calls}")
        (role, learned), content = role_and_weight(message, where, rules), message["content"]
        rules.refuse_lost(
            message, (*MESSAGE_KEYS, *(["name"] if role == "tool" else [])), f"`{where}`"
        )
        pieces.append(turn_header(role, first=not i))
        if isinstance(content, list):
            said = from_content(content, f"{where}.content", rules)
            pieces += [
                SamplePart(piece.text, learned * piece.weight, piece.media) for piece in said
            ]
        elif text_at(content, f"{where}.content"):
            pieces.append(SamplePart(content, learned))
        if role in LEARNED_ROLES:
            pieces.append(replace(END, weight=learned))
    return pieces


def turn_header(role: str, first: bool) -> SamplePart:
    """What stands before a message in the house's own form."""
    return SamplePart(("" if first else "\n") + f"<|{role}|>\n", 0.0)


def from_content(value: Any, key: str, rules: RecordRules) -> list[SamplePart]:
    """A list of parts, the texts between images joined."""
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one part, found {described(value)}")
    pieces: list[SamplePart] = []
    for i, part in enumerate(value):
        where = f"{key}[{i}]"
        kind = kind_of(part, where)
        if kind != "text":
            pieces.append(SamplePart(None, 0.0, media_at(part, kind, where, rules)))
        elif text := text_of(part, where, rules):
            before = pieces.pop().text or "" if pieces and pieces[-1].media is None else ""
            pieces.append(SamplePart(before + text, 1.0))
    if not pieces:
        raise RecordError(f"`{key}` holds no text")
    return pieces


def kind_of(part: Any, where: str) -> str:
    """The type of a part of a content; RecordError for one that is not known."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":  # OpenAI's
        return "image"
    if kind not in ("text", *MEDIA_TYPES):
        allowed = f"text (or {', '.join(MEDIA_TYPES)})"
        raise RecordError(
            f"`{where}` must be an object with `type` {allowed}, found {described(part)}"
        )
    return str(kind)


def text_of(part: dict[str, Any], where: str, rules: RecordRules) -> str:
    """The text of a part of a content."""
    rules.refuse_lost(part, ("type", "text"), f"`{where}`")
    return text_at(part.get("text"), f"{where}.text")


def weight_of(record: dict[str, Any], key: str) -> float:
    """The `weight` of a record or branch, called `key` in errors; 1 where there is none."""
    weight = record.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RecordError(f"`{key}` is {described(weight)}, it must be a number")
    if not 0.0 <= weight <= MOST_WEIGHT:  # also refuses NaN
        raise RecordError(f"`{key}` is {weight}, it must be a number from 0 to {MOST_WEIGHT:g}")
    return float(weight)


# ---- forms


Reader = Callable[[dict[str, Any], Callable[[str], str], RecordRules], Said]
"""What a record says, from the record and from a key to the words for where it stands."""


def plain_text(value: Any, key: str) -> list[SamplePart]:
    """A text, all of it learned."""
    if not text_at(value, key):
        raise RecordError(f"`{key}` is empty")
    return [SamplePart(value, 1.0)]


def _answered(prompt: str, answer: list[SamplePart]) -> list[SamplePart]:
    return [SamplePart(prompt, 0.0), *answer] if prompt else answer


def _prompt_and_completion(
    record: dict[str, Any], at: Callable[[str], str], rules: RecordRules
) -> Said:
    prompt = record["prompt"]
    completion = record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        for key, value in (("prompt", prompt), ("completion", completion)):
            _refuse_hidden_messages(value, at(key))
        return _answered(prompt, plain_text(completion, at("completion")))
    prompt, completion = list_at(prompt, at("prompt")), list_at(completion, at("completion"))
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RecordError(
            f"`{at('prompt')}` is {described(prompt)} and `{at('completion')}` "
            f"{described(completion)}: both must be "
            "strings, or both lists of messages"
        )
    asked = talk_of(prompt, at("prompt"), rules)
    answer = talk_of(completion, at("completion"), rules)
    # what an assistant says in a prompt is no answer to it
    before = [
        {**m, "weight": m.get("weight") or 0} if m["role"] in LEARNED_ROLES else m
        for m in asked.messages
    ]
    return Talk([*before, *answer.messages], asked.paths + answer.paths)


def _refuse_hidden_messages(text: str, where: str) -> None:
    """RecordError for a text that is a list of messages in JSON, as it would be asked or learned
    with its JSON.
    """
    if not text.lstrip().startswith("["):
        return
    try:
        value = decode_json(text.encode())
    except (RecordError, UnicodeEncodeError):  # a text that begins so
        return
    if are_messages(value):
        raise RecordError(
            f"`{where}` is a string that holds messages as JSON; make a list of it: "
            f"jq -c '.{where} |= fromjson' FILE > NEW.jsonl"
        )


def _alpaca(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    """Return a record of Alpaca as a conversation, as LLaMA-Factory's: the input is the question's
    last line.
    """
    history, key = list_at(record.get("history") or [], at("history")), at("history")
    pairs = history if isinstance(history, list) else [history]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RecordError(f"`{key}` must be a list of pairs, each a question and its answer")
    said = []
    for i, (question, answer) in enumerate(pairs):
        said += [("user", question, f"{key}[{i}][0]"), ("assistant", answer, f"{key}[{i}][1]")]
    instruction, given = _alpaca_question(record, at)
    asked = f"{instruction}\n{given}" if given else instruction
    said += [("user", asked, at("instruction")), ("assistant", record["output"], at("output"))]
    messages = [{"role": role, "content": text_at(text, where)} for role, text, where in said]
    return Talk(messages, tuple(where for *_, where in said))


def _alpaca_text(record: dict[str, Any], at: Callable[[str], str]) -> list[SamplePart]:
    """Return a record of Alpaca after the prompt that Alpaca was trained with."""
    prompt = alpaca_prompt(*_alpaca_question(record, at))
    return _answered(prompt, plain_text(record["output"], at("output")))


def alpaca_prompt(instruction: str, given: str = "") -> str:
    """Return the prompt that Alpaca was trained with, for an instruction and its input, if it has
    one.
    """
    paired = _PAIRED if given else ""
    shown = f"### Input:\n{given}\n\n" if given else ""
    return _ALPACA.format(paired=paired, instruction=instruction, input=shown)


def _alpaca_question(record: dict[str, Any], at: Callable[[str], str]) -> tuple[str, str]:
    """Return the instruction and the input of a record, which may be empty."""
    instruction, given = (text_at(record.get(key, ""), at(key)) for key in ("instruction", "input"))
    if not instruction:
        raise RecordError(f"`{at('instruction')}` is empty")
    return instruction, given


def _content(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    value = record["content"]
    if any(key in record for key in ROLE_KEYS):
        raise RecordError(advice_for(record))
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(RecordError):
            value = json_at(value, at("content"))
    if isinstance(value, str):
        raise RecordError(
            f"`{at('content')}` is a string, and a list of parts is read there; --text-key content "
            "learns it as a "
            "plain text"
        )
    return from_content(value, at("content"), rules)


def _messages_of(key: str) -> Reader:
    """Return the reader of a list of messages at `key`."""
    return lambda record, at, rules: talk_of(record[key], at(key), rules)


def objects_at(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, or that in a text of JSON; a blank text has none."""
    if isinstance(value, str) and not value.strip():
        return []
    value = json_at(value, where)
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise RecordError(f"`{where}` must be a list of objects, found {described(value)}")
    return value


def with_object(call: dict[str, Any], key: str) -> dict[str, Any]:
    """A tool, or a call of one, with the object at `key` that a string of JSON there holds, as
    OpenAI writes it.
    """
    inner, value = call.get("function"), call.get(key)
    if isinstance(inner, dict):
        return {**call, "function": with_object(inner, key)}
    with contextlib.suppress(RecordError):
        value = decode_json(value.encode()) if isinstance(value, str) else value
    return {**call, key: value} if isinstance(value, dict) else call


TALKS = ("messages", "conversations", "conversation")
"""Keys of a whole conversation."""
_SHAREGPT = ("conversations", "conversation")
_ALPACA_KEYS = ("instruction", "output")
FORMS: dict[tuple[str, ...], tuple[Reader, tuple[str, ...]]] = {
    **{(key,): (_messages_of(key), ()) for key in TALKS},
    ("caption",): (lambda record, at, rules: plain_text(record["caption"], at("caption")), ()),
    ("content",): (_content, ()),
    ("prompt", "completion"): (_prompt_and_completion, ()),
    _ALPACA_KEYS: (_alpaca, ("input", "history")),
}
"""All but plain text: the keys that must be there, how they are read, keys that may be there too.
"""
_REPEATED_QUESTIONS = ("prompt", "question", "query", "instruction", "input")
_REPEATED_ANSWERS = ("completion", "response", "answer", "output")
_REPEATED = (*_REPEATED_QUESTIONS, *_REPEATED_ANSWERS)
"""Keys next to a conversation that may repeat what its first user asks, and its last answer."""
READ_KEYS = tuple(
    dict.fromkeys(
        [
            *(
                "text",
                *(key for keys in FORMS for key in keys),
                "input",
                "history",
                "system",
                "tools",
            ),
            *("image", "images", "video", "videos", "chat_template_kwargs", "weight", "branches"),
            *("completions", "rollouts"),
        ]
    )
)
"""All keys of a record that are read: those for which --columns may name others."""


def said_by(
    record: dict[str, Any],
    rules: RecordRules,
    own_keys: tuple[str, ...],
    has_template: bool,
    where: str = "",
) -> tuple[Said, str]:
    """What a record says, or a branch at `where`, and the form of its answers; `own_keys` belong to
    it in any form.

    RecordError: no form or several, what a form cannot be, keys that would be lost.
    """
    # --text-key may name a key of another form, which then is plain text; an ignored key is not there
    text_key = rules.text_key
    ignored = {*rules.ignore_keys} - {text_key, *own_keys, *(key for key, _ in rules.columns)}
    forms = [(text_key,), *(keys for keys in FORMS if text_key not in keys)]
    given = {
        key: value for key, value in record.items() if value is not None and key not in ignored
    }
    given |= {key: without_nulls(value) for key, value in given.items() if key not in own_keys}
    names = dict(rules.columns)

    def at(key: str) -> str:
        """The place of a key, by the name that the record has for it."""
        return f"{where and f'{where}.'}{names.get(key, key)}"

    refuse_untrained(given, rules)
    present = [keys for keys in forms if given.keys() >= {*keys}]
    if len(present) > 1:
        given, present = _without_copies(given, present, at, rules)
    if len(present) != 1:
        raise RecordError(_no_form(record, given, present, forms, rules, where))
    keys = present[0]
    read = {*keys, *own_keys}
    if keys == (text_key,):
        said: Said = plain_text(given[text_key], at(text_key))
    else:
        reader, beside = FORMS[keys]
        read |= {*beside}
        own_prompt = keys == _ALPACA_KEYS and not (has_template or rules.form == AS_MESSAGES)
        earlier = list_at(given.get("history"), at("history"))
        if own_prompt and not (earlier or given.get("system")):
            said = _alpaca_text(given, at)
        else:
            said = reader(given, at, rules)
    form = _form_of(said, keys, has_template)
    if rules.form == ALPACA and form not in ("", "completion", ALPACA):
        raise RecordError(
            f"`{at(keys[0])}` holds a conversation, and --chat-template {ALPACA} writes only "
            "records of `instruction` "
            "and `output` without `history` and `system`"
        )
    if isinstance(said, Talk):
        said = _with_system(said, given, at)
        read |= {"system", *_copies(given, said)}
        said, media_keys = _with_media(said, given, rules)
        read |= {*media_keys}
        _refuse_empty_places(said, media_keys, rules)
        if has_template:
            said = _with_tools(said, given)
            read |= {"tools", "chat_template_kwargs"}
        elif "chat_template_kwargs" in given and not any(
            _objects(given["chat_template_kwargs"]).values()
        ):
            read.add("chat_template_kwargs")
        _refuse_other_questions(given, read, at, rules)
    elif rules.media and all(piece.media is None for piece in said):
        said, media_keys = _texts_with_media(said, given, rules, at(keys[0]))
        read |= {*media_keys}
    rules.refuse_lost(given, read, f"`{where}`" if where else "", in_record=True)
    return said, form


def _form_of(said: Said, keys: tuple[str, ...], has_template: bool) -> str:
    """Return the form in which answers are learned, one of ANSWER_FORMS; empty for a text without a
    question.
    """
    if isinstance(said, Talk):
        return "chat_template" if has_template else AS_MESSAGES
    if keys == _ALPACA_KEYS:
        return ALPACA
    return "completion" if keys == ("prompt", "completion") else ""


def _no_form(
    record: dict[str, Any],
    given: dict[str, Any],
    present: list[tuple[str, ...]],
    forms: list[tuple[str, ...]],
    rules: RecordRules,
    where: str,
) -> str:
    """Return why a record has no form or several, and what to do."""
    shown = {keys: " with ".join(f"`{key}`" for key in keys) for keys in forms}
    found = ", ".join(f"`{key}`" for key in list(record)[:8]) or "no key"
    ignored = {*rules.ignore_keys}
    wanted = " or ".join(words for keys, words in shown.items() if ignored.isdisjoint(keys))
    if present:
        several = " and ".join(shown[keys] for keys in present)
        # of a conversation and a text of it the text goes: it would teach what users say
        others = [
            keys for keys in present if keys[0] not in TALKS and keys != ("prompt", "completion")
        ]
        dropped = [",".join(keys) for keys in (others if len(others) < len(present) else present)]
        ways = " or ".join(f"--ignore-keys {names}" for names in dropped)
        reason = "more than one content key"
        wanted += f" (it has {several}; {ways} leaves one out)"
        return f"{reason}: {where or 'a record'} needs exactly one of {wanted}, found {found}"
    nulls = [
        f"`{key}` is null"
        for keys in forms
        for key in keys
        if key in record and record[key] is None
    ]
    reason = next(iter(nulls), "missing key")
    columns = ", ".join(
        f"{key}={name}" for key, name in rules.columns if name not in record and key not in record
    )
    unnamed = f" (--columns {columns}: there is no such key)" if columns else ""
    advice = advice_for(given)
    return (
        f"{reason}: {where or 'a record'} needs exactly one of {wanted}, found {found}{unnamed}"
        f"{advice and f'. {advice}'}"
    )


# ---- keys next to a conversation


def _without_copies(
    given: dict[str, Any],
    present: list[tuple[str, ...]],
    at: Callable[[str], str],
    rules: RecordRules,
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return a record of several forms without those that repeat its only conversation, and the
    forms that are left.
    """
    talks = [keys for keys in present if keys[0] in TALKS]
    copies = ({"prompt", "completion"}, {*_ALPACA_KEYS})
    if len(talks) != 1 or any({*keys} not in copies for keys in present if keys != talks[0]):
        return given, present
    said = FORMS[talks[0]][0](given, at, rules)
    assert isinstance(said, Talk), "its key is one of TALKS"
    copied = _copies(given, said)
    left = {key: value for key, value in given.items() if key not in copied}
    return left, [keys for keys in present if left.keys() >= {*keys}]


def _copies(given: dict[str, Any], talk: Talk) -> set[str]:
    """Return the keys next to a conversation that say what one of its messages says, and nothing
    else.
    """
    if given.keys().isdisjoint(_REPEATED):
        return set()
    questions = [_plain(message) for message in talk.messages if message["role"] == "user"]
    answers = [_plain(message) for message in talk.messages if message["role"] in LEARNED_ROLES]
    pairs = [(key, questions[0]) for key in _REPEATED_QUESTIONS if questions]
    pairs += [(key, answers[-1]) for key in _REPEATED_ANSWERS if answers]
    found = {
        key for key, text in pairs if isinstance(given.get(key), str) and _same(given[key], text)
    }
    asked = given.get("prompt")
    if isinstance(asked, list) and 0 < len(asked) <= len(talk.messages):  # TRL's, of messages
        before = [_plain(message) for message in talk.messages[: len(asked)]]
        texts = [_plain(message) if isinstance(message, dict) else None for message in asked]
        if all(
            text is not None and _same(text, own) for text, own in zip(texts, before, strict=True)
        ):
            found.add("prompt")
    return found


def _plain(message: dict[str, Any]) -> str | None:
    """Return the content of a message where it is a text."""
    content = message.get("content", message.get("value"))
    return content if isinstance(content, str) else None


def _same(text: str, other: str | None) -> bool:
    """Whether two texts have the same words."""
    return other is not None and text.split() == other.split()


def _with_system(talk: Talk, record: dict[str, Any], at: Callable[[str], str]) -> Talk:
    """Return messages after the system prompt of their record, if it has one that they do not begin
    with.
    """
    if not record.get("system"):
        return talk
    text = system_text(record["system"], at("system"))
    if talk.messages[0]["role"] == "system":
        if _same(text, _plain(talk.messages[0])):
            return talk
        raise RecordError(
            f"`{at('system')}` and `{talk.paths[0]}` are both what the system says; leave one out"
        )
    system = {"role": "system", "content": text}
    return Talk([system, *talk.messages], (at("system"), *talk.paths))


def _refuse_other_questions(
    given: dict[str, Any], read: set[str], at: Callable[[str], str], rules: RecordRules
) -> None:
    """RecordError for a question or an answer next to a conversation that says something else."""
    if given.keys().isdisjoint(_REPEATED):
        return
    for key in _REPEATED:
        if (
            key in read
            or rules.leaves_out(key)
            or not isinstance(given.get(key), str)
            or not given[key]
        ):
            continue
        if key in _REPEATED_QUESTIONS:
            what = "what the first user asks"
            other = f"--columns system={key} takes it as the system prompt, if it is one; "
        else:
            what, other = "the last answer", ""
        raise RecordError(
            f"`{at(key)}` is not {what} in the messages next to it, and would be lost; "
            f"{other}--ignore-keys {key} "
            "leaves it out"
        )


def _refuse_empty_places(talk: Talk, media_keys: tuple[str, ...], rules: RecordRules) -> None:
    """RecordError for a place of an image, where images may be, in a record that names none."""
    if not rules.media or media_keys or {IMAGE_AS_TEXT, "*"} & {*rules.ignore_keys}:
        return
    for message, path in zip(talk.messages, talk.paths, strict=True):
        content = message.get("content")
        if (
            isinstance(content, str)
            and message["role"] not in LEARNED_ROLES
            and _UNFILLED.search(content)
        ):
            raise RecordError(
                f"`{path}` has a place <image> and the record names no image; name it as `image` "
                "or `images`, or "
                f"give --ignore-keys '{IMAGE_AS_TEXT}' to learn it as text"
            )


def _objects(value: Any) -> dict[str, Any]:
    """Return the variables of a chat template, which may be a text of JSON."""
    if isinstance(value, str) and value.strip():
        value = json_at(value, "chat_template_kwargs")
    value = value or {}
    if not isinstance(value, dict):
        raise RecordError(f"`chat_template_kwargs` is {described(value)}, it must be an object")
    return value


def _with_tools(talk: Talk, record: dict[str, Any]) -> Talk:
    """Messages with the tools and the variables that their record gives to a chat template."""
    variables = _objects(record.get("chat_template_kwargs"))
    tools = [
        with_object(tool, "parameters") for tool in objects_at(record.get("tools") or [], "tools")
    ] or None
    if tools and any(
        key in record for key in (*_SHAREGPT, *_ALPACA_KEYS)
    ):  # LLaMA-Factory has the functions alone
        tools = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]
    return replace(talk, tools=tools, variables=variables)


# ---- images of a record in the places that its texts leave for them


def _texts_with_media(
    texts: list[SamplePart], record: dict[str, Any], rules: RecordRules, key: str
) -> tuple[list[SamplePart], tuple[str, ...]]:
    """Texts at `key` with a record's images and videos, as those of messages; the keys that name
    those.
    """
    messages = [
        {"role": "user", "content": [{"type": "text", "text": piece.text}]} for piece in texts
    ]
    talk, keys = _with_media(Talk(messages, (key,) * len(messages)), record, rules)
    pieces = []
    for message, piece in zip(talk.messages, texts, strict=True):
        found = from_content(message["content"], key, rules)
        pieces += [replace(each, weight=each.weight * piece.weight) for each in found]
    return pieces, keys


def _with_media(
    talk: Talk, record: dict[str, Any], rules: RecordRules
) -> tuple[Talk, tuple[str, ...]]:
    """Messages with a record's images and videos in the places of their texts; the keys that name
    those.

    Where no message has a place, they stand at the beginning of the first of a user, as LLaVA and
    TRL have it.
    """
    keys: dict[str, str] = {}
    values: dict[str, list[Any]] = {}
    for kind in MEDIA_TYPES:
        named = [key for key in (kind, f"{kind}s") if record.get(key) not in (None, [])]
        if len(named) > 1:
            raise RecordError(
                f"`{named[0]}` and `{named[1]}` both name what stands at <{kind}>; leave one out"
            )
        for key in named:
            keys[kind] = key
            named_by = list_at(record[key], key)
            values[kind] = list(named_by) if isinstance(named_by, list) else [named_by]
    places: Counter[str] = Counter()

    def filled(kind: str) -> dict[str, Any]:
        places[kind] += 1
        value = values[kind][places[kind] - 1] if places[kind] <= len(values[kind]) else None
        if isinstance(value, bytes):
            return {"type": kind, "bytes": value}
        if isinstance(value, dict) and not value.keys() <= {"bytes", "path"}:
            return {"type": kind, **value}
        return {"type": kind, kind: value}

    def parts_of(content: Any) -> Iterator[Any]:
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in values and all(part.get(key) is None for key in _SOURCES):
                yield filled(kind)
            elif kind == "text" and isinstance(part.get("text"), str):
                for i, text in enumerate(
                    _PLACE.split(part["text"])
                ):  # text, kind, text, kind, ..., text
                    if i % 2 and text in values:
                        yield filled(text)
                    elif text := f"<{text}>" if i % 2 else text:
                        yield {**part, "text": text}
            else:
                yield part

    messages = []
    for message in talk.messages:
        before, parts = places.total(), list(parts_of(message.get("content")))
        messages.append({**message, "content": parts} if places.total() > before else message)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if (
        not places
        and values
        and rules.media
        and first is not None
        and not any(map(_names_media, messages))
    ):
        line = "\n" if any(key in record for key in _SHAREGPT) else ""  # LLaVA's
        leading = "".join(f"<{kind}>{line}" * len(of) for kind, of in values.items())
        content = messages[first].get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages[first] = {**messages[first], "content": [*parts_of(leading), *parts]}
    if not places:  # nothing in the messages reads them
        return talk, ()
    for kind, key in keys.items():
        if places[kind] != len(values[kind]):
            raise RecordError(
                f"`{key}` names {len(values[kind])} and the messages have {places[kind]} places "
                "for them "
                f"(<{kind}>, or a part of type {kind} that names none)"
            )
    return Talk(messages, talk.paths), tuple(keys.values())


def _names_media(message: dict[str, Any]) -> bool:
    """Whether parts of a message are no texts."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") != "text" for part in content
    )
