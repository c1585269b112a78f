"""The chat template of an exported model: that of training, or one of records with `messages` in
megacp's own form.

A build tokenizes each header and content alone, a template is one string. So the template of
megacp's form is written only where it gives the ids of a build on a probe of conversations; with
other tokenizers it is refused, or reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacp.huggingface.convert.hf_files import write_json
from megacp.huggingface.convert.source import Loaded
from megacp.prepare.records.chat_template import templates_of
from megacp.prepare.records.record import ALPACA, RecordRules
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.beside import TEMPLATE_FOLDER, TEMPLATE_NAMES, read_object
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.training.data.manifest import answers_told
from megacp.training.loop.state import RunState, stored_state

CHOICES = ("auto", "messages", "none")
TEMPLATE_FILE, _OLDER_FILE = TEMPLATE_NAMES
_PLACEHOLDER = "<|image|>"
"""A text that the library's processor replaces."""

_OPENING = "{#- megacp's messages."
_TEMPLATE = """\
{#- megacp's messages. Each: <|ROLE|>, a newline, its content; END after an assistant's; a newline between two. -#}
{%- set end = eos_token or '' -%}
{%- set state = namespace(ended=false) -%}
{{- BEGIN -}}
{%- for message in messages -%}
    {{- ('' if loop.first else '\\n') ~ '<|' ~ message['role'] ~ '|>\\n' -}}
    {%- set state.ended = false -%}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {{- '<|' ~ part['type'] ~ '|>' if part['type'] in ('image', 'video') else part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- end -}}
        {%- set state.ended = true -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ('\\n' if messages else '') ~ '<|assistant|>\\n' -}}
{%- elif not state.ended -%}
    {{- end -}}
{%- endif -%}
"""


Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[int], bool]
"""Messages of a record, the ids that a build makes of them, and whether the beginning of an answer
follows.
"""


def write_template(
    folder: Path, tokenizer: Tokenizer, probe: Sequence[Conversation], media: str
) -> None:
    """Write the template where it gives each conversation of `probe` its ids, `media` for an image.
    ValueError.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    known = Fast.from_file(str(folder / "tokenizer.json"))
    eos_token = None if tokenizer.eos_id is None else known.id_to_token(tokenizer.eos_id)
    begin = "" if tokenizer.begins_with is None else known.id_to_token(tokenizer.begins_with) or ""
    if eos_token is not None:  # as the library makes it, where the file does not
        known.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    text = _TEMPLATE.replace(
        "BEGIN", "'" + "".join(f"\\u{ord(character):04x}" for character in begin) + "'"
    )
    compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)
    for messages, ids, prompt in probe:
        given = {"messages": messages, "add_generation_prompt": prompt, "eos_token": eos_token}
        rendered = compiled.render(**given).replace(_PLACEHOLDER, media)
        if known.encode(rendered, add_special_tokens=False).ids != list(ids):
            raise ValueError(f"{rendered[:80]!r} gets other ids than its messages got in a build")
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")


_CONTENTS = (
    *(
        "Which animal?",
        "A cat.",
        "",
        " one space first",
        "  two spaces first",
        "\nnewline first",
        "newline last\n",
    ),
    *(
        "two newlines last\n\n",
        "spaces last  ",
        "x = {'a': [1]};",
        "\U0001f642 e\u0301 \u4e2d\u6587",
        "a\n\n  b",
        "1",
    ),
)
_IMAGE = {"type": "image", "path": "probe"}


def _ids(messages: list[dict[str, Any]], tokenizer: Tokenizer, media: list[int]) -> list[int]:
    """The ids of a record in a build, `media` in place of each image."""
    ids = [] if tokenizer.begins_with is None else [tokenizer.begins_with]
    for piece in parse_record({"messages": messages}, RecordRules(media=True)).prefix:
        if piece.text is not None:
            ids += tokenizer.encode_reference(piece.text).tolist()
        elif piece.media is not None:
            ids += media
        elif tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
    return ids


def probe(tokenizer: Tokenizer, media: list[int]) -> list[Conversation]:
    """Conversations with the ids of a build, with images where there are ids `media` that stand for
    one.

    They have one to many turns, and each content ends one message and begins another.
    """
    answered = {"role": "assistant", "content": "x"}
    end = len(tokenizer.encode_reference("x")) + (tokenizer.eos_id is not None)
    talks: list[list[dict[str, Any]]] = []
    for content, other in zip(_CONTENTS, (*_CONTENTS[1:], _CONTENTS[0]), strict=True):
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": other}]
        talks += [
            turns[:1],
            turns,
            [{"role": "system", "content": other}, *turns, *turns, {**turns[0], "role": "tool"}],
        ]
        says = {"type": "text", "text": content}
        for parts in (
            ([_IMAGE], [_IMAGE, says], [says, _IMAGE], [_IMAGE, _IMAGE, says, says])
            if media
            else ()
        ):
            turn = {"role": "user", "content": parts}
            talks.append([turn, turns[1], turn])
    found: list[Conversation] = []
    for messages in talks:
        found.append((messages, _ids(messages, tokenizer, media), False))
        found.append(
            (messages, _ids([*messages, answered], tokenizer, media)[:-end], True)
        )  # the answer is cut
    return found


def _drop_own(folder: Path) -> None:
    """Take out what a library may choose unasked beside TEMPLATE_FILE; templates that are asked for
    by name stay.
    """
    settings = read_object(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:
        write_json(folder / "tokenizer_config.json", settings)
    (folder / _OLDER_FILE).unlink(missing_ok=True)
    (folder / TEMPLATE_FOLDER / "tool_use.jinja").unlink(missing_ok=True)


def other_form(state: RunState, templates: Mapping[str, str]) -> str:
    """Return how the templates of a folder differ from the form in which answers were learned;
    empty if they do not.
    """
    forms = {
        form: count for form, count in (state.answer_forms or {}).items() if form != "completion"
    }
    own = templates.get("default")
    learned = (state.chat_template or {}).get("default")
    same = own == learned if learned else not forms or (own or "").startswith(_OPENING)
    if same or not templates:
        return ""
    told = (
        answers_told(forms).replace("are learned", "were learned", 1)
        or "another template wrote its messages"
    )
    return f", which differs from the form that the model knows: {told}"


def write_chat_template(loaded: Loaded, folder: Path, tokenizer: Tokenizer, choice: str) -> str:
    """Write the template where there is one; a phrase that says which. ValueError for a `choice`
    that cannot be.
    """
    assert loaded.checkpoint is not None
    state, templates = stored_state(loaded.checkpoint), templates_of(folder)
    if (texts := state.chat_template) is not None and choice != "none":
        if choice != "auto":
            raise ValueError(
                f"--chat-template {choice}: messages of the run's data were written by another "
                "template"
            )
        _drop_own(folder)
        (folder / TEMPLATE_FILE).write_bytes(texts["default"].encode())  # newlines as they are
        differs = templates.get("default") not in (None, texts["default"])
        return "that of the training data" + (
            ", not the tokenizer's own, which differs" if differs else ""
        )
    trained = "updates" in loaded.checkpoint.extra
    kept = f"the tokenizer's own{other_form(state, templates)}" if templates else "none"
    if choice == "none":
        return kept
    if choice == "auto" and (templates or not (loaded.rules is not None and trained)):
        forms = state.answer_forms or {}
        if forms and "messages" not in forms:  # nothing was learned in that form
            return kept
        return (
            f"{kept}; --chat-template messages writes that of records with `messages` in "
            "megacp's own form"
        )
    names = loaded.rules.placeholder if loaded.rules is not None else ()
    ids = loaded.rules.token_ids if loaded.rules is not None else {}
    media = (
        "".join(loaded.rules.token_texts[name] for name in names)
        if loaded.rules is not None
        else ""
    )
    try:
        write_template(folder, tokenizer, probe(tokenizer, [ids[name] for name in names]), media)
    except ValueError as error:
        why = f"no template gives this tokenizer the ids of training: {error}"
        if choice == "auto":
            return f"none: {why}"
        raise ValueError(f"--chat-template {choice}: {why}") from error
    _drop_own(folder)
    learned = {form: count for form, count in (state.answer_forms or {}).items() if form == ALPACA}
    other = f", though {answers_told(learned)}" if learned else ""
    return f"that of records with `messages`, with the ids of a build{other}"
