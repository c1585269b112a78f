"""The chat template of an exported model: records with `messages` as text, with the ids of training.

A build tokenizes each header and each content alone, a template is tokenized as one string. Where a tokenizer would
merge across that border, the template writes SEAM there; the exported tokenizer cuts at it and drops it. Without it `?`
and the newline behind it would become one token that training never saw. A template is written only when it gives the
ids of a build on a probe of conversations. The data room makes those ids piece by piece.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.core.data.geometry import TOKEN_TEXTS
from megacp.core.training.state import stored_state
from megacp.huggingface.convert.hf_files import read_json, write_json
from megacp.huggingface.convert.source import Loaded
from megacp.huggingface.generation.prompt import PromptMaker
from megacp.prepare.records.chat_template import templates_of
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.beside import TEMPLATE_FOLDER, TEMPLATE_NAMES
from megacp.prepare.tokenize.tokenizer import Tokenizer

CHOICES = ("auto", "messages", "none")
TEMPLATE_FILE, _OLDER_FILE = TEMPLATE_NAMES
SEAM = "\ue000\ue001"
"""Two private characters, which no text has side by side."""
PLACEHOLDERS = {"image": "<|image|>", "video": "<|video|>"}
"""Texts that the library's processor replaces."""
_SPACE = "\u2581"

_TEMPLATE = """\
{#- megacp's messages. Each: <|ROLE|>, a newline, its content; END after an assistant's; a newline between two. -#}
{%- set seam = SEAM -%}
{%- set end = END -%}
{%- set state = namespace(text=false, ended=false) -%}
{{- BEGIN -}}
{%- for message in messages -%}
    {{- (seam if state.text else '') ~ ('' if loop.first else '\\n') ~ '<|' ~ message['role'] ~ '|>\\n' -}}
    {%- set state.text = true -%}
    {%- set state.ended = false -%}
    {%- if message['content'] is string -%}
        {{- seam ~ message['content'] if message['content'] else '' -}}
    {%- else -%}
        {%- set inside = namespace(said=false) -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] in ('image', 'video') -%}
                {{- '<|' ~ part['type'] ~ '|>' -}}
                {%- set state.text = false -%}
                {%- set inside.said = false -%}
            {%- elif part['text'] -%}
                {{- (seam if state.text and not inside.said else '') ~ part['text'] -}}
                {%- set state.text = true -%}
                {%- set inside.said = true -%}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- end -}}
        {%- set state.text = not end -%}
        {%- set state.ended = true -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- (seam if state.text else '') ~ ('\\n' if messages else '') ~ '<|assistant|>\\n' -}}
{%- elif not state.ended -%}
    {{- end -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Conversation:
    """Messages of a record, and the ids that a build makes of them."""

    messages: Sequence[Mapping[str, Any]]
    ids: Sequence[int]
    prompt: bool = False
    """Whether the beginning of an answer follows."""


@dataclass(frozen=True)
class Special:
    """Token ids that stand at the ends of a document; None is none."""

    end: int | None
    begin: int | None = None


def template(seam: str, has_end: bool, begin: str = "") -> str:
    """The template's text; `seam` may be empty, `has_end`: whether there is an end-of-document token.

    `begin`: the text of the token that begins every document, empty without one.
    """
    end = "eos_token" if has_end else repr("")
    text = _TEMPLATE.replace("SEAM -%}", f"{_quoted(seam)} -%}}").replace("END -%}", f"{end} -%}}")
    return text.replace("{{- BEGIN -}}\n", f"{{{{- {_quoted(begin)} -}}}}\n" if begin else "")


def _quoted(text: str) -> str:
    return "'" + "".join(f"\\u{ord(character):04x}" for character in text) + "'"


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> Any:
    """The template as jinja's code; a probe renders one template for some hundred conversations."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)


def render(text: str, conversation: Conversation, eos_token: str | None) -> str:
    """The library's rendering."""
    given = {"messages": conversation.messages, "add_generation_prompt": conversation.prompt, "eos_token": eos_token}
    return _compiled(text).render(**given)


def write_template(folder: Path, special: Special, probe: Sequence[Conversation], media: str) -> bool:
    """Write the template that gives each conversation of `probe` its ids; whether SEAM had to go into tokenizer.json.

    `media` stands for an image in the ids of the probe: texts of special tokens. ValueError when no template can.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    original = path.read_bytes()
    known = Tokenizer.from_str(original.decode())
    eos_token = None if special.end is None else known.id_to_token(special.end)
    begin = "" if special.begin is None else known.id_to_token(special.begin) or ""
    content, wrong = read_json(path, 512 << 20), ""
    for seam in ("", SEAM):
        if seam:
            path.write_text(json.dumps(_with_seam(content), ensure_ascii=False, indent=2), encoding="utf-8")
        text = template(seam, eos_token is not None, begin)
        wrong = _difference(Tokenizer.from_file(str(path)), text, eos_token, probe, media)
        if not wrong:
            (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")
            return bool(seam)
    path.write_bytes(original)
    raise ValueError(wrong)


def _difference(tokenizer: Any, text: str, eos_token: str | None, probe: Sequence[Conversation], media: str) -> str:
    from tokenizers import AddedToken

    if eos_token is not None:  # as the library makes it, where the file does not
        tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    for conversation in probe:
        rendered = render(text, conversation, eos_token).replace(PLACEHOLDERS["image"], media)
        ids = tokenizer.encode(rendered, add_special_tokens=False).ids
        if ids != list(conversation.ids):
            return f"{rendered[:80]!r} gets other ids than its messages got in a build"
    return ""


def _with_seam(content: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that cuts at SEAM and drops it, before anything else; what begins a text begins each part."""
    cut = {"type": "Split", "pattern": {"String": SEAM}, "behavior": "Removed", "invert": False}
    steps = [cut, *_steps(content.get("pre_tokenizer"), "pretokenizers")]
    made = {**content, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    inside = _steps(content.get("normalizer"), "normalizers")
    place = next((i for i, step in enumerate(inside) if step["type"] == "Prepend"), None)
    if place is None:
        return made
    trims = any(step.get("pattern", {}).get("Regex", "").startswith(r"\A +") for step in inside[:place])
    trim = [_replace(f"[ {_SPACE}]*{SEAM} *", SEAM)] if trims else []
    begin = _replace(f"{SEAM}(?=[^{SEAM[0]}])", SEAM + inside[place]["prepend"])
    normalizers = [*inside[:place], *trim, inside[place], begin, *inside[place + 1 :]]
    return {**made, "normalizer": {"type": "Sequence", "normalizers": normalizers}}


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer or a normalizer, which may be none, one or a sequence."""
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def _replace(pattern: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": by}


_CONTENTS = (
    *("Which animal?", "A cat.", "", " one space first", "  two spaces first", "\nnewline first", "newline last\n"),
    *("two newlines last\n\n", "spaces last  ", "x = {'a': [1]};", "\U0001f642 e\u0301 \u4e2d\u6587", "a\n\n  b", "1"),
)
_IMAGE = {"type": "image", "path": "probe"}


def _probe_messages() -> list[list[dict[str, Any]]]:
    """Conversations of one to many turns; each content ends one message and begins another."""
    found: list[list[dict[str, Any]]] = []
    for i, content in enumerate(_CONTENTS):
        other = _CONTENTS[(i + 1) % len(_CONTENTS)]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": other}]
        found += [
            turns[:1],
            turns,
            [{"role": "system", "content": other}, *turns, *turns, {**turns[0], "role": "tool"}],
        ]
        parts = [{"type": "text", "text": content}, {"type": "text", "text": other}]
        found.append([{"role": "user", "content": parts}, *turns[1:]] if content or other else turns)
    return found


def _image_messages() -> list[list[dict[str, Any]]]:
    answer: dict[str, Any] = {"role": "assistant", "content": "A cat."}
    found = list[list[dict[str, Any]]]()
    for text in _CONTENTS:
        says = {"type": "text", "text": text}
        for content in ([_IMAGE], [_IMAGE, says], [says, _IMAGE], [_IMAGE, _IMAGE, says, says], [says, _IMAGE, says]):
            found.append([{"role": "user", "content": content}, answer, {"role": "user", "content": content}])
    return found


def _ids(messages: list[dict[str, Any]], tokenizer: Tokenizer, media: list[int]) -> list[int]:
    """The ids of a record in a build, `media` in place of each image."""
    ids = [] if tokenizer.begins_with is None else [tokenizer.begins_with]
    for piece in parse_record({"messages": messages}, media=True).prefix:
        if piece.text is not None:
            ids += tokenizer.encode_reference(piece.text).tolist()
        elif piece.media is not None:
            ids += media
        elif tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
    return ids


def probe(tokenizer: Tokenizer, image_ids: dict[str, int]) -> list[Conversation]:
    """Conversations with the ids of a build, with images where there are ids for them."""
    media = [image_ids["image_start"], image_ids["image_end"]] if image_ids else []
    every = _probe_messages() + (_image_messages() if media else [])
    found = [Conversation(messages, _ids(messages, tokenizer, media)) for messages in every]
    maker = PromptMaker(tokenizer)
    for messages in _probe_messages():
        answered = {"messages": [*messages, {"role": "assistant", "content": "x"}]}
        ids = maker.of_record(answered).prefix.tokens.tolist()
        found.append(Conversation(messages, ids, prompt=True))
    return found


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the templates of a dataset as files, in place of the tokenizer's own of these uses."""
    _drop_own(folder)
    paths = {"default": folder / TEMPLATE_FILE, "tool_use": folder / TEMPLATE_FOLDER / "tool_use.jinja"}
    for name in paths.keys() & texts.keys():
        paths[name].parent.mkdir(exist_ok=True)
        paths[name].write_bytes(texts[name].encode())  # newlines as they are


def _drop_own(folder: Path) -> None:
    """Take out what a library may choose unasked beside TEMPLATE_FILE; templates that are asked for by name stay."""
    settings = read_json(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:
        write_json(folder / "tokenizer_config.json", settings)
    (folder / _OLDER_FILE).unlink(missing_ok=True)
    (folder / TEMPLATE_FOLDER / "tool_use.jinja").unlink(missing_ok=True)


def _lost(before: Collection[str], folder: Path) -> str:
    """Words on templates of the tokenizer that are no longer there; empty when all are."""
    names = sorted(set(before).difference(templates_of(folder)))
    return f"; the tokenizer's own {', '.join(names)} left out, which training did not have" if names else ""


def write_chat_template(loaded: Loaded, folder: Path, tokenizer: Tokenizer, choice: str) -> str:
    """Write the template where there is one to write; a phrase that says which it is.

    ValueError when `choice` asks for a template that this tokenizer cannot follow, or that training did not have.
    """
    assert loaded.checkpoint is not None
    if (texts := stored_state(loaded.checkpoint).chat_template) is not None and choice != "none":
        if choice != "auto":
            raise ValueError(f"--chat-template {choice}: messages of the run's data were written by another template")
        before = templates_of(folder)
        _write_texts(folder, texts)
        return f"that of the training data{_lost(before, folder)}"
    own = bool(templates_of(folder))
    trained = "updates" in loaded.checkpoint.extra
    if choice == "none":
        return "the tokenizer's own" if own else "none"
    if choice == "auto" and own:
        also = "; --chat-template messages writes that of records with `messages`" if trained else ""
        return f"the tokenizer's own{also}"
    if choice == "auto" and not (loaded.rules is not None and trained):
        return "none; for a model that was trained on records with `messages`: --chat-template messages"
    images = loaded.rules.token_ids if loaded.rules is not None else {}
    media = TOKEN_TEXTS["image_start"] + TOKEN_TEXTS["image_end"]
    try:
        special, before = Special(tokenizer.eos_id, tokenizer.begins_with), templates_of(folder)
        has_seam = write_template(folder, special, probe(tokenizer, images), media)
    except ValueError as error:
        if choice == "auto":
            return f"none: no template gives this tokenizer the ids of training ({error})"
        raise ValueError(
            f"--chat-template {choice}: no template gives this tokenizer the ids of training: {error}"
        ) from error
    _drop_own(folder)
    how = " (texts meet at a mark that tokenizer.json cuts at and drops)" if has_seam else ""
    return f"that of records with `messages`, with the ids of a build{how}{_lost(before, folder)}"
