"""Writes the chat template of an exported model: the template used in training, or one for megacp's
own format of records with `messages`.

A dataset build tokenizes each header and each content separately, but a chat template renders one
string. The template for megacp's format is therefore written only if it reproduces the build's
token ids on a set of test conversations. For other tokenizers it is refused or reported.
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
# File names of the template in current and older versions of the library.
TEMPLATE_FILE, _OLDER_FILE = TEMPLATE_NAMES
# Text that the library's processor replaces with the tokens of an image.
_PLACEHOLDER = "<|image|>"

# The beginning of the template below, which identifies it.
_OPENING = "{#- megacp's messages."
_TEMPLATE = """\
{#- megacp's messages. Each: <|ROLE|>, a newline, its content; END after an assistant's; \
a newline between two. -#}
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
            {{- '<|' ~ part['type'] ~ '|>' if part['type'] in ('image', 'video') \
else part['text'] -}}
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


# Messages of a record, their ids in a build, and whether an answer's header follows (a generation
# prompt).
Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[int], bool]


def write_template(
    folder: Path, tokenizer: Tokenizer, probe: Sequence[Conversation], media: str
) -> None:
    """Write the template for megacp's format; `media` is the text of an image.

    Raise ValueError if it does not reproduce the ids of every conversation in `probe`.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    # Tokenize with the exported file, because the library will use it.
    known = Fast.from_file(str(folder / "tokenizer.json"))
    eos_token = None if tokenizer.eos_id is None else known.id_to_token(tokenizer.eos_id)
    begin = ""
    if tokenizer.begins_with is not None:
        begin = known.id_to_token(tokenizer.begins_with) or ""
    if eos_token is not None:
        # The library does the same for the end token in its settings.
        known.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    # Escape the token, because it may contain quotes.
    escaped = "".join(f"\\u{ord(character):04x}" for character in begin)
    text = _TEMPLATE.replace("BEGIN", f"'{escaped}'")
    compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)
    for messages, ids, prompt in probe:
        given = {"messages": messages, "add_generation_prompt": prompt, "eos_token": eos_token}
        rendered = compiled.render(**given).replace(_PLACEHOLDER, media)
        if known.encode(rendered, add_special_tokens=False).ids != list(ids):
            raise ValueError(f"{rendered[:80]!r} gets different token ids than in a dataset build")
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")


# Contents of test messages. A tokenizer may merge their first or last characters with a header.
_CONTENTS = (
    "Which animal?",
    "A cat.",
    "",
    " one space first",
    "  two spaces first",
    "\nnewline first",
    "newline last\n",
    "two newlines last\n\n",
    "spaces last  ",
    "x = {'a': [1]};",
    "\U0001f642 e\u0301 \u4e2d\u6587",
    "a\n\n  b",
    "1",
)
_IMAGE = {"type": "image", "path": "probe"}


def _ids(messages: list[dict[str, Any]], tokenizer: Tokenizer, media: list[int]) -> list[int]:
    """Return a record's ids as in a dataset build, with `media` in place of each image."""
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
    """Return test conversations with their ids in a dataset build.

    `media`: ids of an image; if empty, no conversation has images. The conversations have one or
    more turns, and each item of `_CONTENTS` occurs both before and after another one.
    """
    answered = {"role": "assistant", "content": "x"}
    # Number of ids after an answer's header: its content and its end token.
    end = len(tokenizer.encode_reference("x")) + (tokenizer.eos_id is not None)
    talks: list[list[dict[str, Any]]] = []
    for content, other in zip(_CONTENTS, (*_CONTENTS[1:], _CONTENTS[0]), strict=True):
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": other}]
        talks += [
            turns[:1],
            turns,
            [{"role": "system", "content": other}, *turns, *turns, {**turns[0], "role": "tool"}],
        ]
        if not media:
            continue
        text = {"type": "text", "text": content}
        for parts in ([_IMAGE], [_IMAGE, text], [text, _IMAGE], [_IMAGE, _IMAGE, text, text]):
            turn = {"role": "user", "content": parts}
            talks.append([turn, turns[1], turn])
    found: list[Conversation] = []
    for messages in talks:
        found.append((messages, _ids(messages, tokenizer, media), False))
        # A generation prompt has the ids up to an answer, without its content and end token.
        prompt = _ids([*messages, answered], tokenizer, media)[:-end]
        found.append((messages, prompt, True))
    return found


def _drop_own(folder: Path) -> None:
    """Remove the templates that the library may prefer to TEMPLATE_FILE.

    Templates that are selected by name are kept.
    """
    settings = read_object(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:
        write_json(folder / "tokenizer_config.json", settings)
    (folder / _OLDER_FILE).unlink(missing_ok=True)
    (folder / TEMPLATE_FOLDER / "tool_use.jinja").unlink(missing_ok=True)


def other_form(state: RunState, templates: Mapping[str, str]) -> str:
    """Return a phrase on how a folder's templates differ from training; empty if they agree."""
    forms = dict(state.answer_forms or {})
    forms.pop("completion", None)
    own = templates.get("default")
    learned = (state.chat_template or {}).get("default")
    if learned:
        is_same = own == learned
    else:
        # Without a training template, answers have megacp's own format or no format.
        is_same = not forms or (own or "").startswith(_OPENING)
    if is_same or not templates:
        return ""
    reason = answers_told(forms).replace("are learned", "were learned", 1)
    if not reason:
        reason = "its messages were formatted with another template"
    return f", which differs from the format used in training: {reason}"


def write_chat_template(loaded: Loaded, folder: Path, tokenizer: Tokenizer, choice: str) -> str:
    """Write the chat template, if there is one; return a phrase that describes it.

    Raise ValueError if the template selected by `choice` cannot be written.
    """
    assert loaded.checkpoint is not None
    state = stored_state(loaded.checkpoint)
    templates = templates_of(folder)
    texts = state.chat_template
    if texts is not None and choice != "none":
        if choice != "auto":
            raise ValueError(
                f"--chat-template {choice}: the messages of the training data were formatted "
                "with another template; remove the flag to export it"
            )
        _drop_own(folder)
        (folder / TEMPLATE_FILE).write_bytes(texts["default"].encode())  # keeps its newlines
        if templates.get("default") in (None, texts["default"]):
            return "from the training data"
        return "from the training data; the tokenizer's template differs and is not exported"
    # A checkpoint that was only converted has no updates.
    trained = "updates" in loaded.checkpoint.extra
    kept = f"from the tokenizer{other_form(state, templates)}" if templates else "none"
    if choice == "none":
        return kept
    # A vision model trained here has learned megacp's format, unless its folder has a template.
    if choice == "auto" and (templates or loaded.rules is None or not trained):
        forms = state.answer_forms or {}
        if forms and "messages" not in forms:
            # No answer was learned in megacp's format, so its template is not offered.
            return kept
        return f"{kept}; --chat-template messages exports megacp's format for `messages` records"
    media_ids: list[int] = []
    media = ""
    if loaded.rules is not None:
        names = loaded.rules.placeholder
        media_ids = [loaded.rules.token_ids[name] for name in names]
        media = "".join(loaded.rules.token_texts[name] for name in names)
    try:
        write_template(folder, tokenizer, probe(tokenizer, media_ids), media)
    except ValueError as error:
        why = f"with this tokenizer, no template reproduces the token ids of training: {error}"
        if choice == "auto":
            return f"none: {why}"
        raise ValueError(f"--chat-template {choice}: {why}") from error
    _drop_own(folder)
    phrase = "megacp's format for `messages` records, with the same token ids as a dataset build"
    learned = {form: count for form, count in (state.answer_forms or {}).items() if form == ALPACA}
    if learned:
        phrase += f", though {answers_told(learned)}"
    return phrase
