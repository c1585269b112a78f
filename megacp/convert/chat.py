"""How records with `messages` become text, as the chat template of an exported tokenizer, with the ids of training.

Key property: a build tokenizes each header and each content on its own, a template is tokenized as one string. Where a
tokenizer would merge across that border, the template writes SEAM there: the exported tokenizer cuts at it and drops
it. What is written was compared with the data room's own ids on a probe of conversations. Rejected: a template alone,
which joins `?` and the newline behind it into one token that training never saw.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.convert.hf_files import read_json

TEMPLATE_FILE = "chat_template.jinja"
SEAM = "\ue000\ue001"
"""Two private characters, which no text has side by side."""
LEARNED_ROLE = "assistant"
PLACEHOLDERS = {"image": "<|image|>", "video": "<|video|>"}
"""What the library's processor replaces."""
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
    """Messages as a record has them, and the ids that a build makes of them."""

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
    """What the library renders."""
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
    before = content.get("pre_tokenizer")
    steps = [] if before is None else before["pretokenizers"] if before["type"] == "Sequence" else [before]
    made = {**content, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, *steps]}}
    normalizer = content.get("normalizer")
    inside = (
        [] if normalizer is None else normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    )
    place = next((i for i, step in enumerate(inside) if step["type"] == "Prepend"), None)
    if place is None:
        return made
    trims = any(step.get("pattern", {}).get("Regex", "").startswith(r"\A +") for step in inside[:place])
    trim = [_replace(f"[ {_SPACE}]*{SEAM} *", SEAM)] if trims else []
    begin = _replace(f"{SEAM}(?=[^{SEAM[0]}])", SEAM + inside[place]["prepend"])
    steps = [*inside[:place], *trim, inside[place], begin, *inside[place + 1 :]]
    return {**made, "normalizer": {"type": "Sequence", "normalizers": steps}}


def _replace(pattern: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": by}
