"""The forms of a record: which keys have its text or messages, and how to read them.

A record must have exactly one form. If its keys match two forms, only one would be trained on, so
the record is refused with both names, unless one repeats the other word for word. Whether a message
has a loss depends only on its role and its `weight`.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
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
    REQUESTS,
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
from megacp.storage.wording import counted

# keys of a message that are read without a chat template
MESSAGE_KEYS = ("role", "content", "weight", "id")
MOST_WEIGHT = 1e12
"""Largest weight of a record, branch or message; the product of all three must be finite in
float32.
"""
# LLaVA's placeholders; the group is the kind
_PLACE = re.compile(r"<(image|video)>")
"""Placeholder in a text for the record's next image or video."""
_UNFILLED = re.compile(r"^<image>|<image>$", re.MULTILINE)
"""A placeholder at the edge of a line; within a line, the word may belong to a text about
images.
"""
_SOURCES = (*MEDIA_SOURCES, *MEDIA_TYPES, *LINKS)
"""Keys of a content part that refer to its image or video."""
IMAGE_AS_TEXT = "<image>"
"""Value of --ignore-keys that keeps placeholders without an image as text."""
_TAG = re.compile(r"<img>[^<>\n]+</img>")
"""An image in a text of Qwen-VL's first version: <img>, its path and </img>."""
TAG_AS_TEXT = "<img>"
"""Value of --ignore-keys that keeps such an image as text."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"


@dataclass(frozen=True)
class Talk:
    """The messages of a record in any form, with the tools and variables for a chat template."""

    messages: list[dict[str, Any]]
    paths: tuple[str, ...]
    """Path of each message in the record, for error messages."""
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


Said = list[SamplePart] | Talk


# ---- messages and contents


def talk_of(value: Any, key: str, rules: RecordRules) -> Talk:
    """Return the messages at `key` of a record. Raise RecordError if the value is not a list of
    messages.
    """
    messages = messages_at(value, key, rules)
    return Talk(messages, tuple(f"{key}[{i}]" for i in range(len(messages))))


def role_and_weight(message: dict[str, Any], where: str, rules: RecordRules) -> tuple[str, float]:
    """Return the role of a message and the loss weight of its content.

    The weight is the message's `weight` (default 1) if answers of this role are learned, else 0.
    Raise RecordError for an unknown role, or for a weight on a message without loss.
    """
    role = text_at(message["role"], f"{where}.role")
    weight = weight_of(message, f"{where}.weight")
    # a role without a known meaning is refused, unless the user lists it
    known = (*LEARNED_ROLES, *CONTEXT_ROLES, *rules.context_roles)
    if role not in known and "*" not in rules.context_roles:
        raise RecordError(
            f"`{where}.role`: {role!r} is not one of the roles "
            f"{', '.join((*CONTEXT_ROLES, *LEARNED_ROLES))}. "
            f"Use --roles assistant={role} to learn its messages, --roles user={role} if it asks "
            f"the questions, --roles tool={role} if it gives the results of tools, or "
            f"--context-roles {role} for any other speaker without loss"
        )
    if role in LEARNED_ROLES:
        return role, 1.0 if rules.ignore_weights else weight
    if message.get("weight") is not None and weight > 0:
        raise RecordError(
            f"`{where}.weight` is {weight:g}, but messages of role {role} have no loss; leave the "
            "weight out"
        )
    return role, 0.0


def from_messages(talk: Talk, rules: RecordRules) -> list[SamplePart]:
    """Return the parts of messages written without a chat template: `<|ROLE|>` and the content."""
    pieces: list[SamplePart] = []
    for i, (message, where) in enumerate(zip(talk.messages, talk.paths, strict=True)):
        if "content" not in message:
            hint = "; give it a text, or remove the message"
            if "tool_calls" in message:
                hint = "; only a chat template can write tool calls, so give --chat-template"
            raise RecordError(f"`{where}` has no `content`{hint}")
        role, learned = role_and_weight(message, where, rules)
        content = message["content"]
        known = (*MESSAGE_KEYS, "name") if role == "tool" else MESSAGE_KEYS
        rules.refuse_lost(message, known, f"`{where}`")
        pieces.append(turn_header(role, first=not i))
        if isinstance(content, list):
            for piece in from_content(content, f"{where}.content", rules):
                pieces.append(SamplePart(piece.text, learned * piece.weight, piece.media))
        elif text_at(content, f"{where}.content"):
            pieces.append(SamplePart(content, learned))
        # the end-of-document token ends an answer, so the model learns to stop there
        if role in LEARNED_ROLES:
            pieces.append(replace(END, weight=learned))
    return pieces


def turn_header(role: str, first: bool) -> SamplePart:
    """Return the header of a message that is written without a chat template."""
    separator = "" if first else "\n"
    return SamplePart(f"{separator}<|{role}|>\n", 0.0)


def from_content(value: Any, key: str, rules: RecordRules) -> list[SamplePart]:
    """Return the parts of a content list; consecutive texts become one part."""
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one part, found {described(value)}")
    pieces: list[SamplePart] = []
    for i, part in enumerate(value):
        where = f"{key}[{i}]"
        kind = kind_of(part, where)
        if kind != "text":
            pieces.append(SamplePart(None, 0.0, media_at(part, kind, where, rules)))
            continue
        text = text_of(part, where, rules)
        if not text:
            continue
        # extend the previous text: tokens may span the boundary of two text parts
        before = ""
        if pieces and pieces[-1].media is None:
            before = pieces.pop().text or ""
        pieces.append(SamplePart(before + text, 1.0))
    if not pieces:
        raise RecordError(f"`{key}` has no text")
    return pieces


def kind_of(part: Any, where: str) -> str:
    """Return the type of a content part: text, image or video. Raise RecordError for other
    types.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    # OpenAI's name of an image part
    if kind == "image_url":
        return "image"
    if kind not in ("text", *MEDIA_TYPES):
        allowed = f"text (or {', '.join(MEDIA_TYPES)})"
        # some data sets leave the type out, as the other key says it
        hint = ""
        for name in ("text", *MEDIA_TYPES):
            if kind is None and isinstance(part, dict) and part.get(name) is not None:
                hint = f' without it; add "type": "{name}" to the part'
        raise RecordError(
            f"`{where}` must be an object with `type` {allowed}, found {described(part)}{hint}"
        )
    return str(kind)


def text_of(part: dict[str, Any], where: str, rules: RecordRules) -> str:
    """Return the text of a content part."""
    rules.refuse_lost(part, ("type", "text"), f"`{where}`")
    return text_at(part.get("text"), f"{where}.text")


def weight_of(record: dict[str, Any], key: str) -> float:
    """Return the `weight` of a record, branch or message (default 1); `key` names it in errors."""
    # a boolean is an int in Python, but not a weight
    weight = record.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RecordError(f"`{key}` is {described(weight)}, but it must be a number")
    if not 0.0 <= weight <= MOST_WEIGHT:  # also refuses NaN
        raise RecordError(f"`{key}` is {weight}, but it must be between 0 and {MOST_WEIGHT:g}")
    return float(weight)


# ---- forms


Reader = Callable[[dict[str, Any], Callable[[str], str], RecordRules], Said]
"""Read the contents of a record. The second argument maps a key to its path for error messages."""


def plain_text(value: Any, key: str) -> list[SamplePart]:
    """Return a text as one part with loss weight 1. Raise RecordError if it is empty."""
    if not text_at(value, key):
        raise RecordError(
            f"`{key}` is empty; remove the record, or use --on-error skip to leave out bad records"
        )
    return [SamplePart(value, 1.0)]


def _answered(prompt: str, answer: list[SamplePart]) -> list[SamplePart]:
    """Return an answer after its prompt, which has no loss."""
    return [SamplePart(prompt, 0.0), *answer] if prompt else answer


def _prompt_and_completion(
    record: dict[str, Any], at: Callable[[str], str], rules: RecordRules
) -> Said:
    prompt = record["prompt"]
    completion = record["completion"]
    # two plain texts, which need no template
    if isinstance(prompt, str) and isinstance(completion, str):
        for key, value in (("prompt", prompt), ("completion", completion)):
            _refuse_hidden_messages(value, at(key))
        return _answered(prompt, plain_text(completion, at("completion")))
    prompt, completion = list_at(prompt, at("prompt")), list_at(completion, at("completion"))
    prompt = list_at(prompt, at("prompt"))
    completion = list_at(completion, at("completion"))
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RecordError(
            f"`{at('prompt')}` is {described(prompt)} and `{at('completion')}` is "
            f"{described(completion)}, but both must be strings or both lists of messages"
        )
    asked = talk_of(prompt, at("prompt"), rules)
    answer = talk_of(completion, at("completion"), rules)
    # an assistant message in the prompt is context: it has no loss unless it has a weight
    before = []
    for message in asked.messages:
        if message["role"] in LEARNED_ROLES:
            message = {**message, "weight": message.get("weight") or 0}
        before.append(message)
    return Talk([*before, *answer.messages], asked.paths + answer.paths)


def _refuse_hidden_messages(text: str, where: str) -> None:
    """Raise RecordError for a text that is a JSON list of messages; its JSON would be learned."""
    if not text.lstrip().startswith("["):
        return
    try:
        value = decode_json(text.encode())
    except (RecordError, UnicodeEncodeError):  # an ordinary text that begins with a bracket
        return
    if are_messages(value):
        raise RecordError(
            f"`{where}` is a string that contains messages as JSON; convert it to a list: "
            f"jq -c '.{where} |= fromjson' FILE > NEW.jsonl"
        )


def _alpaca(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    """Return an Alpaca record as a conversation, in the way of LLaMA-Factory.

    The input becomes the last line of the question; pairs in `history` precede it.
    """
    key = at("history")
    history = list_at(record.get("history") or [], key)
    pairs = history if isinstance(history, list) else [history]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RecordError(f"`{key}` must be a list of pairs, each a question and its answer")
    said = []  # (role, text, path)
    for i, (question, answer) in enumerate(pairs):
        said.append(("user", question, f"{key}[{i}][0]"))
        said.append(("assistant", answer, f"{key}[{i}][1]"))
    instruction, given = _alpaca_question(record, at)
    asked = f"{instruction}\n{given}" if given else instruction
    said.append(("user", asked, at("instruction")))
    said.append(("assistant", record["output"], at("output")))
    messages = [{"role": role, "content": text_at(text, where)} for role, text, where in said]
    return Talk(messages, tuple(where for *_, where in said))


def alpaca_prompt(instruction: str, given: str = "") -> str:
    """Return Alpaca's prompt for an instruction with an optional input."""
    # Alpaca has one prompt for instructions with an input, and one for instructions without
    paired = _PAIRED if given else ""
    shown = f"### Input:\n{given}\n\n" if given else ""
    return _ALPACA.format(paired=paired, instruction=instruction, input=shown)


def _alpaca_question(record: dict[str, Any], at: Callable[[str], str]) -> tuple[str, str]:
    """Return the instruction of an Alpaca record, and its input ("" if absent)."""
    instruction, given = (text_at(record.get(key, ""), at(key)) for key in ("instruction", "input"))
    if not instruction:
        raise RecordError(f"`{at('instruction')}` is empty")
    return instruction, given


def _content(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    value = record["content"]
    # a single message of a conversation, not a record
    if any(key in record for key in ROLE_KEYS):
        raise RecordError(advice_for(record))
    # a table may store the list as a JSON string
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(RecordError):
            value = json_at(value, at("content"))
    if isinstance(value, str):
        raise RecordError(
            f"`{at('content')}` is a string, but it must be a list of parts; use --text-key "
            "content to learn it as plain text"
        )
    return from_content(value, at("content"), rules)


def _messages_of(key: str) -> Reader:
    """Return a reader of the list of messages at `key`."""
    return lambda record, at, rules: talk_of(record[key], at(key), rules)


def objects_at(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, decoded if it is a JSON string; a blank string is an empty list."""
    if isinstance(value, str) and not value.strip():
        return []
    value = json_at(value, where)
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise RecordError(f"`{where}` must be a list of objects, found {described(value)}")
    return value


def with_object(call: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a tool or tool call whose value at `key` is decoded, if that is a JSON string.

    OpenAI's API writes the arguments of a call as a JSON string.
    """
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": with_object(inner, key)}
    value = call.get(key)
    # a string that is not JSON stays as it is
    with contextlib.suppress(RecordError):
        if isinstance(value, str):
            value = decode_json(value.encode())
    return {**call, key: value} if isinstance(value, dict) else call


TALKS = ("messages", "conversations", "conversation")
"""Keys whose value is a whole conversation."""
_SHAREGPT = ("conversations", "conversation")
_ALPACA_KEYS = ("instruction", "output")
FORMS: dict[tuple[str, ...], tuple[Reader, tuple[str, ...]]] = {
    **{(key,): (_messages_of(key), ()) for key in TALKS},
    ("caption",): (lambda record, at, rules: plain_text(record["caption"], at("caption")), ()),
    ("content",): (_content, ()),
    ("prompt", "completion"): (_prompt_and_completion, ()),
    _ALPACA_KEYS: (_alpaca, ("input", "history")),
}
"""All forms except plain text: required keys -> (reader, optional keys)."""
# columns that data sets keep next to the conversation that they were made into
_REPEATED_QUESTIONS = ("prompt", "question", "query", "instruction", "input")
_REPEATED_ANSWERS = ("completion", "response", "answer", "output")
_REPEATED = (*_REPEATED_QUESTIONS, *_REPEATED_ANSWERS)
"""Keys next to a conversation that may repeat the first user message or the last answer."""
READ_KEYS = tuple(
    dict.fromkeys(
        [
            "text",
            *itertools.chain.from_iterable(FORMS),
            "input",
            "history",
            "system",
            "tools",
            "image",
            "images",
            "video",
            "videos",
            "chat_template_kwargs",
            "weight",
            "branches",
            "completions",
            "rollouts",
        ]
    )
)
"""All keys of a record that are read; --columns can rename these."""
_SPELLED = [key for key in ("text", *itertools.chain(*FORMS)) if key != "content"]
"""Keys that a record may have in another spelling; `context` is not a misspelled `content`."""


def said_by(
    record: dict[str, Any],
    rules: RecordRules,
    own_keys: tuple[str, ...],
    has_template: bool,
    where: str = "",
) -> tuple[Said, str]:
    """Return the contents of a record, or of a branch at `where`, and the form of its answers.

    `own_keys` are keys that it may have in any form. Raise RecordError if it has no form or several
    forms, if a value does not fit its form, or if a key would be lost.
    """
    # --text-key may name a key of another form, which then is plain text. Ignored keys count as
    # absent, unless the user also names them by another flag.
    text_key = rules.text_key
    ignored = {*rules.ignore_keys} - {text_key, *own_keys, *(key for key, _ in rules.columns)}
    forms = [(text_key,), *(keys for keys in FORMS if text_key not in keys)]
    given = {
        key: value for key, value in record.items() if value is not None and key not in ignored
    }
    given |= {key: without_nulls(value) for key, value in given.items() if key not in own_keys}
    names = dict(rules.columns)

    def at(key: str) -> str:
        """Return the path of a key, by its name in the record."""
        prefix = f"{where}." if where else ""
        return f"{prefix}{names.get(key, key)}"

    refuse_untrained(given, rules)
    # find the only form whose required keys are all there
    present = [keys for keys in forms if given.keys() >= {*keys}]
    if len(present) > 1:
        given, present = _without_copies(given, present, at, rules)
    if len(present) != 1:
        raise RecordError(_no_form(record, given, present, forms, rules, where))

    # read the contents
    # `read` collects the keys that are used; all other keys must be metadata or ignored
    keys = present[0]
    read = {*keys, *own_keys}
    if keys == (text_key,):
        said: Said = plain_text(given[text_key], at(text_key))
    else:
        reader, beside = FORMS[keys]
        read |= {*beside}
        # Alpaca's own prompt has no place for earlier turns or a system prompt
        own_prompt = keys == _ALPACA_KEYS and not (has_template or rules.form == AS_MESSAGES)
        earlier = list_at(given.get("history"), at("history"))
        if own_prompt and not (earlier or given.get("system")):
            prompt_text = alpaca_prompt(*_alpaca_question(given, at))
            said = _answered(prompt_text, plain_text(given["output"], at("output")))
        else:
            said = reader(given, at, rules)
    form = _form_of(said, keys, has_template)
    if rules.form == ALPACA and form not in ("", "completion", ALPACA):
        raise RecordError(
            f"`{at(keys[0])}` is a conversation, but --chat-template {ALPACA} accepts only "
            "records of `instruction` and `output` without `history` and `system`"
        )

    if form or rules.media:
        _refuse_image_tags(said, given, at(keys[0]), rules)

    # add what other keys of the record contribute to it, and note which keys have been read
    # (_copies compares plain strings, so it precedes _with_media, which makes lists of parts)
    if isinstance(said, Talk):
        said = _with_system(said, given, at)
        read |= {"system", *_copies(given, said)}
        said, media_keys = _with_media(said, given, rules)
        read |= {*media_keys}
        _refuse_empty_places(said, media_keys, rules)
        if has_template:
            said = _with_tools(said, given)
            read |= {"tools", "chat_template_kwargs"}
        elif given.get("tools"):
            raise RecordError(
                "`tools` would be lost, because only a chat template can write tools; give "
                "--chat-template, or use --ignore-keys tools to leave it out"
            )
        elif "chat_template_kwargs" in given:
            # variables without a value change nothing, so they are not lost without a template
            if not any(_objects(given["chat_template_kwargs"]).values()):
                read.add("chat_template_kwargs")
        _refuse_other_questions(given, read, at, rules)
    # texts with the placeholders of a record's own images
    elif rules.media and all(piece.media is None for piece in said):
        said, media_keys = _texts_with_media(said, given, rules, at(keys[0]))
        read |= {*media_keys}
    rules.refuse_lost(given, read, f"`{where}`" if where else "", in_record=True)
    return said, form


def _form_of(said: Said, keys: tuple[str, ...], has_template: bool) -> str:
    """Return the form of the answers (one of ANSWER_FORMS), or "" for plain text."""
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
    """Return the error message for a record with no form or several, with advice."""
    shown = {}
    for keys in forms:
        shown[keys] = " with ".join(f"`{key}`" for key in keys)
    found = ", ".join(f"`{key}`" for key in list(record)[:8]) or "no key"
    ignored = {*rules.ignore_keys}
    wanted = " or ".join(words for keys, words in shown.items() if ignored.isdisjoint(keys))
    what = where or "a record"
    if present:
        several = " and ".join(shown[keys] for keys in present)
        # Of a conversation and a text of it, suggest to drop the text: learning it would also
        # teach the model to write the user's messages.
        others = [
            keys for keys in present if keys[0] not in TALKS and keys != ("prompt", "completion")
        ]
        candidates = others if len(others) < len(present) else present
        dropped = [",".join(keys) for keys in candidates]
        ways = " or ".join(f"--ignore-keys {names}" for names in dropped)
        return (
            f"more than one content key: {what} needs exactly one of {wanted}, but it has "
            f"{several}; use {ways} to leave one out. Its keys: {found}"
        )
    # a null is most likely a hole in the data, so it is reported in place of a missing key
    reason = "missing key"
    for key in itertools.chain.from_iterable(forms):
        if key in record and record[key] is None:
            reason = f"`{key}` is null"
            break
    # a name in --columns that the record does not have is a likely cause
    columns = ", ".join(
        f"{key}={name}" for key, name in rules.columns if name not in record and key not in record
    )
    unnamed = f" (--columns {columns}: the record has no such key)" if columns else ""
    advice = advice_for(given) or _advice_on_names(given, rules)
    ending = f". {advice}" if advice else ""
    return f"{reason}: {what} needs exactly one of {wanted}, found {found}{unnamed}{ending}"


def _advice_on_names(given: dict[str, Any], rules: RecordRules) -> str:
    """Return advice for a record with almost the right keys; "" if none is known."""
    if "text" in given and rules.text_key != "text":
        return f"Leave out --text-key {rules.text_key} to read `text`"
    for keys in FORMS:
        there = [key for key in keys if key in given]
        if there and len(keys) > len(there):
            missing = next(key for key in keys if key not in given)
            return f"`{there[0]}` needs `{missing}` next to it; --columns renames a key"
    # a key that is spelled almost like a known one
    for key in given:
        close = difflib.get_close_matches(key.lower(), _SPELLED, 1, 0.8)
        if close and close[0] != key:
            return f"Build with --columns {close[0]}={key} if `{key}` means `{close[0]}`"
    return ""


# ---- keys next to a conversation


def _without_copies(
    given: dict[str, Any],
    present: list[tuple[str, ...]],
    at: Callable[[str], str],
    rules: RecordRules,
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return a record and its forms without keys that only repeat its conversation.

    A record that has several forms for another reason is returned unchanged.
    """
    # only pairs of a question and an answer can be copies; other texts next to one are an error
    talks = [keys for keys in present if keys[0] in TALKS]
    copies = ({"prompt", "completion"}, {*_ALPACA_KEYS})
    if len(talks) != 1 or any({*keys} not in copies for keys in present if keys != talks[0]):
        return given, present
    # read the conversation to compare its messages with the other keys
    said = FORMS[talks[0]][0](given, at, rules)
    assert isinstance(said, Talk), "its key is one of TALKS"
    copied = _copies(given, said)
    left = {key: value for key, value in given.items() if key not in copied}
    return left, [keys for keys in present if left.keys() >= {*keys}]


def _copies(given: dict[str, Any], talk: Talk) -> set[str]:
    """Return the keys next to a conversation that repeat one of its messages word for word."""
    if given.keys().isdisjoint(_REPEATED):
        return set()
    questions = [_plain(message) for message in talk.messages if message["role"] == "user"]
    answers = [_plain(message) for message in talk.messages if message["role"] in LEARNED_ROLES]
    # a question repeats the first user message, an answer the last assistant message
    pairs = [(key, questions[0]) for key in _REPEATED_QUESTIONS if questions]
    pairs += [(key, answers[-1]) for key in _REPEATED_ANSWERS if answers]
    found = {
        key for key, text in pairs if isinstance(given.get(key), str) and _same(given[key], text)
    }
    # TRL's `prompt` is a list of messages: those with which the conversation begins
    asked = given.get("prompt")
    if isinstance(asked, list) and 0 < len(asked) <= len(talk.messages):
        before = [_plain(message) for message in talk.messages[: len(asked)]]
        texts = [_plain(message) if isinstance(message, dict) else None for message in asked]
        pairs_of_prompt = zip(texts, before, strict=True)
        if all(text is not None and _same(text, own) for text, own in pairs_of_prompt):
            found.add("prompt")
    return found


def _plain(message: dict[str, Any]) -> str | None:
    """Return the content of a message if it is a string, otherwise None."""
    content = message.get("content", message.get("value"))
    return content if isinstance(content, str) else None


def _same(text: str, other: str | None) -> bool:
    """Return whether two texts have the same words."""
    return other is not None and text.split() == other.split()


def _with_system(talk: Talk, record: dict[str, Any], at: Callable[[str], str]) -> Talk:
    """Return the messages with the record's `system` prompt in front, unless they begin with it."""
    # an empty system prompt is the same as none
    if not record.get("system"):
        return talk
    text = system_text(record["system"], at("system"))
    if talk.messages[0]["role"] == "system":
        if _same(text, _plain(talk.messages[0])):
            return talk
        raise RecordError(
            f"`{at('system')}` and `{talk.paths[0]}` are different system prompts; leave one out"
        )
    system = {"role": "system", "content": text}
    return Talk([system, *talk.messages], (at("system"), *talk.paths))


def _refuse_other_questions(
    given: dict[str, Any], read: set[str], at: Callable[[str], str], rules: RecordRules
) -> None:
    """Raise RecordError for a question or answer that the conversation next to it does not have."""
    if given.keys().isdisjoint(_REPEATED):
        return
    for key in _REPEATED:
        if key in read or rules.leaves_out(key):
            continue
        if not isinstance(given.get(key), str) or not given[key]:
            continue
        what = "the last answer"
        other = ""
        if key in _REPEATED_QUESTIONS:
            what = "the first user message"
            other = f"use --columns system={key} if it is a system prompt, or "
        else:
            other = "use "
        raise RecordError(
            f"`{at(key)}` differs from {what} of the conversation next to it, and would be lost; "
            f"{other}--ignore-keys {key} to leave it out"
        )


def _refuse_empty_places(talk: Talk, media_keys: tuple[str, ...], rules: RecordRules) -> None:
    """Raise RecordError for an image placeholder in a record without images.

    Only a build with images checks this.
    """
    if not rules.media or media_keys or {IMAGE_AS_TEXT, "*"} & {*rules.ignore_keys}:
        return
    for message, path in zip(talk.messages, talk.paths, strict=True):
        content = message.get("content")
        if not isinstance(content, str) or message["role"] in LEARNED_ROLES:
            continue
        if _UNFILLED.search(content):
            raise RecordError(
                f"`{path}` has a placeholder <image>, but the record has no image; add `image` or "
                f"`images`, or use --ignore-keys '{IMAGE_AS_TEXT}' to learn it as text"
            )


def _refuse_image_tags(said: Said, given: dict[str, Any], where: str, rules: RecordRules) -> None:
    """Raise RecordError for a text that names an image as `<img>a.jpg</img>`.

    `given` is the record, and `where` the path of its first text.
    """
    if {TAG_AS_TEXT, "*"} & {*rules.ignore_keys}:
        return
    # the texts of a record with their paths
    texts: list[tuple[str, Any]] = []
    if isinstance(said, Talk):
        for message, path in zip(said.messages, said.paths, strict=True):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts += [(path, part.get("text")) for part in parts if isinstance(part, dict)]
    else:
        texts = [(where, piece.text) for piece in said]

    for path, text in texts:
        if not isinstance(text, str) or (found := _TAG.search(text)) is None:
            continue
        key = path.partition("[")[0]
        turns = given.get(key)
        # the command works for messages whose contents are texts
        way = ""
        if isinstance(turns, list) and isinstance(turns[0], dict):
            name = "value" if "value" in turns[0] else "content"
            texts_of = f".{key}[].{name}"
            way = (
                f': jq -c \'.images = [{texts_of} | scan("<img>([^<]+)</img>")[]] | {texts_of} '
                '|= gsub("<img>[^<]+</img>"; "<image>")\' FILE > NEW.jsonl'
            )
        raise RecordError(
            f"`{path}` names an image as {found[0]!r:.100}, but images must be in `images`, with "
            f"<image> in the text{way}; or use --ignore-keys '{TAG_AS_TEXT}' to learn it as text"
        )


def _objects(value: Any) -> dict[str, Any]:
    """Return the variables for a chat template, decoded if they are a JSON string."""
    if isinstance(value, str) and value.strip():
        value = json_at(value, "chat_template_kwargs")
    value = value or {}
    if not isinstance(value, dict):
        raise RecordError(f"`chat_template_kwargs` is {described(value)}, but it must be an object")
    return value


def _with_tools(talk: Talk, record: dict[str, Any]) -> Talk:
    """Return the messages with the record's tools and variables for a chat template."""
    variables = _objects(record.get("chat_template_kwargs"))
    tools = []
    for tool in objects_at(record.get("tools") or [], "tools"):
        tools.append(with_object(tool, "parameters"))
    # LLaMA-Factory's records list bare functions; templates expect OpenAI's wrapper around them
    if any(key in record for key in (*_SHAREGPT, *_ALPACA_KEYS)):
        tools = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]
    return replace(talk, tools=tools or None, variables=variables)


# ---- images and videos of a record, placed into its texts


def _texts_with_media(
    texts: list[SamplePart], record: dict[str, Any], rules: RecordRules, key: str
) -> tuple[list[SamplePart], tuple[str, ...]]:
    """Return texts with the record's images and videos placed into them, and the keys of those.

    The texts are treated as user messages; `key` is their path for error messages.
    """
    # user messages, because leading images precede the first user message
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
    """Return the messages with the record's images and videos placed into them, and their keys.

    Each placeholder takes the next image or video. If no message has a placeholder, all of them
    precede the first user message, as in LLaVA and TRL. Raise RecordError if the numbers differ.
    """
    keys: dict[str, str] = {}  # kind -> key of the record
    values: dict[str, list[Any]] = {}  # kind -> its images or videos
    for kind in MEDIA_TYPES:
        named = [key for key in (kind, f"{kind}s") if record.get(key) not in (None, [])]
        if len(named) > 1:
            raise RecordError(
                f"`{named[0]}` and `{named[1]}` both give the files for <{kind}>; leave one out"
            )
        for key in named:
            keys[kind] = key
            named_by = list_at(record[key], key)
            values[kind] = list(named_by) if isinstance(named_by, list) else [named_by]
    places: Counter[str] = Counter()  # placeholders found so far, by kind

    def filled(kind: str) -> dict[str, Any]:
        """Return the next image or video as a content part; a surplus placeholder gets None."""
        value = None
        if places[kind] < len(values[kind]):
            value = values[kind][places[kind]]
        places[kind] += 1
        if isinstance(value, bytes):
            return {"type": kind, "bytes": value}
        # {bytes, path} is the value of Hugging Face's image feature; other objects are parts
        if isinstance(value, dict) and not value.keys() <= {"bytes", "path"}:
            return {"type": kind, **value}
        return {"type": kind, kind: value}

    def parts_of_text(part: dict[str, Any]) -> Iterator[Any]:
        """Split a text part at its placeholders and fill them."""
        # text, kind, text, kind, ..., text
        for i, text in enumerate(_PLACE.split(part["text"])):
            if i % 2 and text in values:
                yield filled(text)
                continue
            # a placeholder of a kind that the record does not have stays text
            if i % 2:
                text = f"<{text}>"
            if text:
                yield {**part, "text": text}

    def parts_of(content: Any) -> Iterator[Any]:
        """Yield the parts of a content with its placeholders filled."""
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in values and all(part.get(key) is None for key in _SOURCES):
                # keys such as `max_pixels` belong to the image at this place
                asked = {key: part[key] for key in REQUESTS[kind] if part.get(key) is not None}
                yield filled(kind) | asked
            elif kind == "text" and isinstance(part.get("text"), str):
                yield from parts_of_text(part)
            else:
                yield part

    messages = []
    for message in talk.messages:
        before = places.total()
        parts = list(parts_of(message.get("content")))
        # a message without a placeholder keeps its content, such as a string
        has_places = places.total() > before
        messages.append({**message, "content": parts} if has_places else message)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if (
        not places
        and values
        and rules.media
        and first is not None
        and not any(map(_names_media, messages))
    ):
        # LLaVA writes a newline after each leading placeholder, TRL does not
        line = "\n" if any(key in record for key in _SHAREGPT) else ""
        leading = "".join(f"<{kind}>{line}" * len(of) for kind, of in values.items())
        content = messages[first].get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages[first] = {**messages[first], "content": [*parts_of(leading), *parts]}
    if not places:  # nothing in the messages reads them
        return talk, ()
    # each image needs a placeholder, and each placeholder an image
    for kind, key in keys.items():
        count = len(values[kind])
        if places[kind] != count:
            entries = "1 entry" if count == 1 else f"{count} entries"
            raise RecordError(
                f"`{key}` has {entries}, but the messages have "
                f"{counted(places[kind], 'placeholder')} for them (<{kind}>, or a part of type "
                f"{kind} without a source); each needs one"
            )
    return Talk(messages, talk.paths), tuple(keys.values())


def _names_media(message: dict[str, Any]) -> bool:
    """Return whether a message has content parts other than text."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") != "text" for part in content
    )
