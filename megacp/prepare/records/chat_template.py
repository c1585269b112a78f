"""Chat templates: where they come from, and conversations written by them as the transformers
library writes them.

The ids are those of `apply_chat_template(tokenize=True)`: one text, tokenized whole. The library
itself takes seconds to import in each worker, its clock would give a resumed build other tokens,
and it loses a generation block within a macro. Here blocks are marked by characters that Unicode
gives only to programs; the marks are taken out again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megacp.prepare.records import sandbox
from megacp.prepare.records.marks import MARK_CHARACTERS, MarkedPlace, Marks, TurnMarks
from megacp.prepare.records.record import LEARNED_ROLES, RecordError
from megacp.prepare.records.sandbox import (
    BLOCK_BEGIN,
    BLOCK_END,
    TOKEN_VARIABLES,
    TemplateLimitError,
    bounded,
)
from megacp.prepare.tokenize.beside import (
    TEMPLATE_FOLDER,
    TEMPLATE_NAMES,
    end_ids,
    read_beside,
    read_object,
    settings_of,
    token_text,
)
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.storage.files import read_regular

OURS = {
    path.stem: path.read_bytes().decode() for path in sorted(Path(__file__).parent.glob("*.jinja"))
}
"""Templates by name, for tokenizers without one and for those whose own does not say what is
learned.
"""
PLACE = "\ufdd2"
"""Stands for a value whose place in a rendering is looked for."""
_RESERVED = (BLOCK_BEGIN, BLOCK_END, PLACE, *MARK_CHARACTERS)
"""Characters that Unicode gives only to programs. They mark a rendering, so no text may hold them.
"""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first is that of templates."""
THOUGHT, THOUGHT_END = "<think>", "</think>"
"""Marks around a thought, as templates write them."""
THINKS = "enable_thinking"
"""The variable by which a template knows whether to think."""
GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""A block of a template that says by itself what is learned."""
_SAID, _TOLD = "Why so?", "Certainly"
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": _SAID},
    {"role": LEARNED_ROLES[0], "content": _TOLD},
]
_CALL: dict[str, Any] = {"id": "call00001", "type": "function"}
_CALL["function"] = {"name": "look", "arguments": {"place": _TOLD}}
_PLACES = {"type": "object", "properties": {"place": {"type": "string", "description": "Where"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks", "parameters": _PLACES},
}
"""A conversation by which a template shows what it writes after answers and calls."""
_MARKS = ("<|im_start|>", "<|im_end|>")
"""Marks of the templates that are known by name."""


@dataclass(frozen=True)
class Rendering:
    """What a template makes of a conversation."""

    text: str
    generated: tuple[tuple[int, int], ...] = ()
    """Characters start..stop of its generation blocks."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template and the tokenizer that it is for."""

    text: str
    today: str | None
    """The date that the template writes, as YYYY-MM-DD."""
    special: Mapping[str, str] = field(repr=False)
    """Tokens that the tokenizer's files name, by name."""
    _model: Any = field(repr=False)
    before_answers: str = ""
    """What ends a prompt where a model learned its answers without a thought: an empty one, or what
    opens none.
    """
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of all renderings that do not give others."""
    folder_ends: tuple[str, ...] = ()
    """Tokens at which the model's folder says that an answer ends; the first is the tokenizer's
    own, if it has one.
    """

    @property
    def decisive(self) -> dict[str, Any]:
        """All of it that decides tokens, in JSON's types."""
        digest = hashlib.sha256("\n".join(map(repr, self._added)).encode()).hexdigest()
        ends = list(self.folder_ends)
        special = dict(self.special)
        return {
            "text": self.text,
            "date": self.today,
            "special": special,
            "added_tokens": digest,
            "ends": ends,
        }

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what decides tokens."""
        return hashlib.sha256(json.dumps(self.decisive, sort_keys=True).encode()).hexdigest()

    @cached_property
    def forgeable(self) -> re.Pattern[str]:
        """Finds special tokens, which only a template may write, and the characters that mark a
        rendering.
        """
        return _any_of([*self.special_texts, *_RESERVED])

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of its special tokens."""
        return tuple(
            token.content for token in self._added if token.special and token.content.strip()
        )

    @cached_property
    def _added(self) -> list[Any]:
        return [token for _, token in sorted(self._model.get_added_tokens_decoder().items())]

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether it knows of thoughts, though it may leave out those of earlier answers."""
        return any(name in self.text for name in (*REASONING, THOUGHT_END))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Tokens that end an answer for which the template writes no end: of the next turn, and of
        the folder.
        """
        tokens = (self._after_answer, self._after_call, *self.folder_ends)
        return tuple(dict.fromkeys(token for token in tokens if token))

    def end_after(self, calls: bool, goes_on: bool) -> str:
        """The token that ends a last answer after which the template writes nothing; empty where it
        writes something.

        `calls`: the answer is a tool call. `goes_on`: a turn follows, which can only begin with its
        own token.
        """
        of_turn = self._after_call if calls else self._after_answer
        if of_turn or goes_on or self._ends_answers:
            return of_turn
        return next(iter(self.folder_ends), "")

    @cached_property
    def _ends_answers(self) -> bool:
        """Whether it writes something after the words of a last answer."""
        text = self._text_of(_TURNS, None)
        return text.rpartition(_TOLD)[2].strip() != ""

    @cached_property
    def _after_answer(self) -> str:
        return self._token_between([*_TURNS, *_TURNS], None)

    @cached_property
    def _after_call(self) -> str:
        call = {"role": LEARNED_ROLES[0], "content": "", "tool_calls": [_CALL]}
        result = {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": _SAID}
        return self._token_between([{**_TURNS[0], "content": "?"}, call, result], [_TOOL])

    def _token_between(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """The first special token between an answer, which says _TOLD, and the next _SAID; empty
        for none.
        """
        _, _, rest = self._text_of(messages, tools).partition(_TOLD)
        between, said, _ = rest.partition(_SAID)
        found = self.forgeable.search(between)
        return found[0] if said and found is not None and not self._ends_answers else ""

    def _text_of(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """The text of messages; empty where it refuses them, for then no such conversation is in
        the data either.
        """
        try:
            return self.render(messages, tools).text
        except RecordError:
            return ""

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it writes a content that is a list of parts, as it writes a string."""
        return self._writes({"role": "user", "content": [{"type": "text", "text": PLACE}]})

    @cached_property
    def takes_objects(self) -> bool:
        """Whether it writes arguments of a tool call that are an object; some take only a string of
        JSON.
        """
        function = {"name": "look", "arguments": {"place": PLACE}}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        asked = {"role": "user", "content": "?"}
        return self._writes(asked, {"role": LEARNED_ROLES[0], "content": "", "tool_calls": calls})

    def _writes(self, *messages: dict[str, Any]) -> bool:
        """Whether it writes PLACE, which stands in the last of some messages; Python would escape
        it in an object.
        """
        try:
            return PLACE in self.render(messages).text
        except RecordError:
            return False

    def is_added(self, text: str) -> bool:
        """Whether a text consists only of added tokens, which are cut out of every text around
        them.
        """
        return (
            re.fullmatch(f"(?:{_any_of(token.content for token in self._added).pattern})+", text)
            is not None
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> Rendering:
        """A conversation as text; `prompt`: with what stands before an answer. RecordError when the
        template cannot.
        """
        own = variables or {}
        if (
            prompt and self.before_answers and THINKS not in own
        ):  # as the template writes it, whatever ends a prompt
            answer = {"role": LEARNED_ROLES[0], "content": PLACE}
            text = self.render([*messages, answer], tools, variables).text.rpartition(PLACE)[0]
            return Rendering(
                text if text.endswith(self.before_answers) else text + self.before_answers
            )
        return _without_blocks(self._written(_as_given(messages), tools, own, prompt))

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Marks,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[MarkedPlace, int]]:
        """Write messages whose values hold some marks, with a new mark for each turn.

        Return the text without any marks, and where each marked place begins in it.
        """
        chat = _as_given(messages)
        text = self._written(chat, tools, variables or {}, False, TurnMarks(marks, chat))
        return marks.found(re.sub(f"[{BLOCK_BEGIN}{BLOCK_END}]", "", text))

    def _written(
        self,
        chat: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        prompt: bool,
        turns: TurnMarks | None = None,
    ) -> str:
        """What the template writes, with the characters that mark its generation blocks."""
        given = {**self.special, **self.variables, **variables, "tools": tools, "documents": None}
        if turns is not None:
            given[sandbox.TURN] = turns
        try:
            with bounded("the template"):
                template = sandbox.compiled_template(self.text, self.today, turns is not None)
                text = sandbox.rendered(
                    template, dict(messages=chat, add_generation_prompt=prompt, **given)
                )
            sandbox.refuse_addresses(text, self.text, (chat, given))
        except TemplateLimitError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise RecordError(f"the chat template refuses it: {_one_line(error)}") from error
        return text

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [n] of a rendering, and the characters start..stop of each, int64 [n, 2]."""
        encoding = self._model.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _as_given(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their thoughts under the names that templates read, as the library hands them
    on.
    """
    chat = []
    for message in messages:
        own = {key: value for key, value in message.items() if value is not None}
        thought = next((own[key] for key in REASONING if key in own), None)
        if thought is not None:
            own = {"thinking": thought, **own, "reasoning_content": thought}
        chat.append(own)
    return chat


def _without_blocks(text: str) -> Rendering:
    """A rendering without the characters that mark its generation blocks, and where these are."""
    generated = []
    length = 0
    for piece in re.split(
        f"({BLOCK_BEGIN}.*?{BLOCK_END})", text, flags=re.DOTALL
    ):  # a block, or the text between two
        block = piece.strip(BLOCK_BEGIN + BLOCK_END)
        if not {BLOCK_BEGIN, BLOCK_END}.isdisjoint(block):
            raise RecordError("the chat template has a generation block within another")
        if piece != block and block:
            generated.append((length, length + len(block)))
        length += len(block)
    return Rendering(re.sub(f"[{BLOCK_BEGIN}{BLOCK_END}]", "", text), tuple(generated))


Template = ChatTemplate | Callable[[], ChatTemplate]
"""One, or what loads it once there are messages."""


def loaded(template: Template) -> ChatTemplate:
    """The template, which now is needed. ValueError: as of load_chat_template."""
    return template if isinstance(template, ChatTemplate) else template()


def load_chat_template(choice: str, tokenizer: Tokenizer, today: str | None) -> ChatTemplate:
    """The template that `--chat-template` names: auto, a name, or a .jinja file.

    ValueError: no such template, one that does not compile or needs a date, a tokenizer that has no
    special tokens.
    """
    flag = f"--chat-template {choice}"
    if tokenizer.kind != "huggingface":
        raise ValueError(
            f"{flag} needs a tokenizer.json: a {tokenizer.kind} tokenizer reads the special tokens "
            "of a template as "
            "plain text"
        )
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{flag} needs the package jinja2: pip install 'megacp[data]'") from error
    text = _chosen(choice, tokenizer.files[0].parent)
    if "strftime_now" in text and today is None:
        raise ValueError(
            f"{flag}: the template writes today's date, so the tokens would be others tomorrow; "
            "fix it with "
            "--chat-template-date YYYY-MM-DD"
        )
    if today is not None:
        try:
            datetime.datetime.strptime(today, "%Y-%m-%d")
        except ValueError as error:
            raise ValueError(
                f"--chat-template-date {today} is no date, as in 2026-01-31"
            ) from error
    try:
        with bounded("the template"):
            sandbox.compiled_template(text, today)
    except TemplateLimitError:
        raise
    except (
        Exception
    ) as error:  # Python's own compiler refuses what is nested too deeply, and not in one way
        raise ValueError(f"{flag}: the template is no Jinja: {_one_line(error)}") from error
    made = template_of(text, tokenizer, today)
    if text in OURS.values() and not all(made.forgeable.fullmatch(token) for token in _MARKS):
        raise ValueError(
            f"{flag}: {tokenizer.files[0]} lacks the special tokens {', '.join(_MARKS)}, and as "
            "plain text any "
            "record could spell them"
        )
    return made


def template_of(
    text: str, tokenizer: Tokenizer, today: str | None, before_answers: str = ""
) -> ChatTemplate:
    """A template for the tokenizer of a tokenizer.json and the settings beside it; it may write
    `today`.

    ValueError: the settings name tokens that it does not have.
    """
    settings = settings_of(tokenizer.files[0].parent)
    named = {
        name: content
        for name in TOKEN_VARIABLES
        if (content := token_text(settings.get(name))) is not None
    }
    model = _model_of(tokenizer.files[0], settings, named.values())
    tokens = [named.get("eos_token"), *map(model.id_to_token, end_ids(tokenizer.files[0].parent))]
    ends = tuple(dict.fromkeys(token for token in tokens if token))
    return ChatTemplate(text, today, named, model, before_answers, folder_ends=ends)


def _chosen(choice: str, folder: Path) -> str:
    """The text of a template by its name or file."""
    if choice.endswith(".jinja"):
        return read_regular(choice).decode()
    found = templates_of(folder)
    name = "default" if choice == "auto" else choice
    if name in found or name in OURS:
        return found[name] if name in found else OURS[name]
    has = f"has the templates {', '.join(sorted(found))}" if found else "has no chat template"
    names = ", ".join(sorted({*found, *OURS}))
    raise ValueError(
        f"--chat-template {choice}: {folder} {has}; give auto, one of the names {names}, or "
        "FILE.jinja"
    )


def templates_of(folder: Path) -> dict[str, str]:
    """The templates in a tokenizer's folder by name, `default` the one without: files before what a
    config says.
    """
    plain, old = TEMPLATE_NAMES
    found = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / plain).is_file():
        found["default"] = folder / plain
    if found:
        return {name: read_regular(path).decode() for name, path in found.items()}
    stated = read_beside(folder).values.get("chat_template")
    if stated is None and (folder / old).is_file():
        stated = read_object(folder / old).get("chat_template")
    if isinstance(stated, list):
        stated = {
            each.get("name"): each.get("template") for each in stated if isinstance(each, dict)
        }
    texts = {"default": stated} if isinstance(stated, str) else stated or {}
    if not isinstance(texts, dict) or not all(
        isinstance(text, str) for pair in texts.items() for text in pair
    ):
        raise ValueError(
            f"{folder}: `chat_template` is neither a text nor a list of names and templates"
        )
    return texts


def _model_of(path: Path, settings: Mapping[str, Any], named: Iterable[str]) -> Any:
    """The `tokenizers.Tokenizer` of a file as the library makes it, with the tokens that the
    settings add.

    It has no post-processor: that only adds tokens, which a template writes, and narrows the places
    of others.
    """
    import tokenizers

    content = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizers.Tokenizer.from_str(json.dumps({**content, "post_processor": None}))
    model.no_truncation()
    model.no_padding()
    listed = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = {token["content"]: tokenizers.AddedToken(**token) for _, token in listed}
    known = {token.content for token in model.get_added_tokens_decoder().values()} | tokens.keys()
    further = [
        settings.get(name) or () for name in ("additional_special_tokens", "extra_special_tokens")
    ]
    texts = [
        token_text(each)
        for more in further
        for each in (more.values() if isinstance(more, dict) else more)
    ]
    for text in (*named, *filter(None, texts)):
        if text not in known:
            tokens[text] = tokenizers.AddedToken(text, special=True, normalized=False)
    if unknown := sorted(text for text in tokens if model.token_to_id(text) is None):
        raise ValueError(
            f"{path}: the files beside it name tokens that it does not have: {', '.join(unknown)}"
        )
    model.add_tokens(list(tokens.values()))  # one that is there as it is stays
    return model


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of some tokens, nothing without any. Blank ones stand in every text, and
    are left out.
    """
    texts = sorted((text for text in tokens if text.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
