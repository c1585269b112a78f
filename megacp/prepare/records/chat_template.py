"""Load chat templates and render conversations like the transformers library.

The token ids are identical to `apply_chat_template(tokenize=True)`: one text, tokenized as a whole.
The library itself is not used for three reasons. Importing it takes seconds in each worker. It
reads the clock, so a resumed build would get different tokens. It loses generation blocks inside
macros. Here noncharacters of Unicode mark the generation blocks and are removed again.
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
"""Built-in templates by name, for tokenizers without a template or with one that does not mark
the learned text.
"""
_TEMPLATE_SUFFIX = ".jinja"
PLACE = "\ufdd2"
"""Placeholder for a value whose position in a rendering is to be found."""
_RESERVED = (BLOCK_BEGIN, BLOCK_END, PLACE, *MARK_CHARACTERS)
"""Noncharacters of Unicode that mark a rendering; no text may contain them."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning of a message; templates use the first."""
THOUGHT, THOUGHT_END = "<think>", "</think>"
"""Tags around a thought, as templates write them."""
THINKS = "enable_thinking"
"""Variable that switches thinking on or off in templates."""
GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Opening tag of a block that marks learned text in a template."""
_SAID = "Why so?"
_TOLD = "Certainly"
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": _SAID},
    {"role": LEARNED_ROLES[0], "content": _TOLD},
]
# some templates require ids of nine characters
_CALL: dict[str, Any] = {"id": "call00001", "type": "function"}
_CALL["function"] = {"name": "look", "arguments": {"place": _TOLD}}
_PLACES = {"type": "object", "properties": {"place": {"type": "string", "description": "Where"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks", "parameters": _PLACES},
}
"""A tool, and above it a conversation and a call: they show the text that a template writes after
answers and calls.
"""
_MARKS = ("<|im_start|>", "<|im_end|>")
"""Special tokens of the built-in templates."""


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation, as rendered by a template."""

    text: str
    generated: tuple[tuple[int, int], ...] = ()
    """Ranges of characters (start, stop) of the generation blocks."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template together with the tokenizer that encodes its renderings."""

    text: str
    today: str | None
    """Date (YYYY-MM-DD) for templates that write the current date."""
    special: Mapping[str, str] = field(repr=False)
    """Special tokens by the names that the tokenizer's files give them."""
    _model: Any = field(repr=False)
    before_answers: str = ""
    """Ending of every prompt if the model was trained on answers without thoughts: an empty
    thought, or text that opens none.
    """
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Default variables of all renderings."""
    folder_ends: tuple[str, ...] = ()
    """Tokens that end an answer according to the model's folder; the tokenizer's EOS token comes
    first.
    """

    @property
    def decisive(self) -> dict[str, Any]:
        """Everything that affects the tokens, as JSON types."""
        # thousands of added tokens: a digest of them is enough to detect a change
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
        """Digest of everything that affects the tokens."""
        return hashlib.sha256(json.dumps(self.decisive, sort_keys=True).encode()).hexdigest()

    @cached_property
    def forgeable(self) -> re.Pattern[str]:
        """Pattern of the special tokens and marks, which no text of a record may contain."""
        return _any_of([*self.special_texts, *_RESERVED])

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(
            token.content for token in self._added if token.special and token.content.strip()
        )

    @cached_property
    def _added(self) -> list[Any]:
        return [token for _, token in sorted(self._model.get_added_tokens_decoder().items())]

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether the template supports thoughts, even if it omits them from earlier answers."""
        return any(name in self.text for name in (*REASONING, THOUGHT_END))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Tokens that may end an answer if the template writes no end: from the next turn or from
        the folder.
        """
        tokens = (self._after_answer, self._after_call, *self.folder_ends)
        return tuple(dict.fromkeys(token for token in tokens if token))

    def end_after(self, calls: bool, goes_on: bool) -> str:
        """Return the token that ends a last answer, or "" if the template writes an end.

        `calls`: the answer is a tool call. `goes_on`: a turn follows, so only the token with which
        turns begin can end the answer.
        """
        # the token that training on several turns would teach as the end of an answer
        of_turn = self._after_call if calls else self._after_answer
        if of_turn or goes_on or self._ends_answers:
            return of_turn
        return next(iter(self.folder_ends), "")

    @cached_property
    def _ends_answers(self) -> bool:
        """Whether the template writes text after the words of a last answer."""
        # after the last turn, without a generation prompt
        text = self._text_of(_TURNS, None)
        return text.rpartition(_TOLD)[2].strip() != ""

    @cached_property
    def _after_answer(self) -> str:
        """First special token between an answer and the next turn."""
        return self._token_between([*_TURNS, *_TURNS], None)

    @cached_property
    def _after_call(self) -> str:
        """First special token between a tool call and its result."""
        # the answer is _TOLD, an argument of the call, and the result is the next _SAID
        call = {"role": LEARNED_ROLES[0], "content": "", "tool_calls": [_CALL]}
        result = {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": _SAID}
        return self._token_between([{**_TURNS[0], "content": "?"}, call, result], [_TOOL])

    def _token_between(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the first special token between _TOLD and the next _SAID, or "".

        Return "" as well if the template writes an end of answers.
        """
        # the text between the answer and the next message has the end of the answer
        _, _, rest = self._text_of(messages, tools).partition(_TOLD)
        between, said, _ = rest.partition(_SAID)
        found = self.forgeable.search(between)
        if not said or found is None or self._ends_answers:
            return ""
        return found[0]

    def _text_of(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the rendering of messages, or "" if the template refuses them, as it would in the
        data.
        """
        try:
            return self.render(messages, tools).text
        except RecordError:
            return ""

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template accepts a list of parts as content, in addition to a string."""
        return self._writes({"role": "user", "content": [{"type": "text", "text": PLACE}]})

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template accepts tool-call arguments as an object; some accept only a JSON
        string.
        """
        function = {"name": "look", "arguments": {"place": PLACE}}
        # an object that is printed by Python instead of JSON does not show PLACE
        calls = [{"id": "call00001", "type": "function", "function": function}]
        asked = {"role": "user", "content": "?"}
        return self._writes(asked, {"role": LEARNED_ROLES[0], "content": "", "tool_calls": calls})

    def _writes(self, *messages: dict[str, Any]) -> bool:
        """Return whether the rendering of messages contains PLACE, which the last of them has.

        A template that prints an object by Python's `str` would escape it.
        """
        try:
            return PLACE in self.render(messages).text
        except RecordError:
            return False

    def is_added(self, text: str) -> bool:
        """Return whether a text consists only of added tokens, whatever text surrounds it."""
        added = _any_of(token.content for token in self._added).pattern
        return re.fullmatch(f"(?:{added})+", text) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> Rendering:
        """Render a conversation; `prompt` appends the generation prompt.

        Raise RecordError if the template refuses the messages.
        """
        own = variables or {}
        # The model was trained on prompts that end with `before_answers`: take the text that the
        # template writes before an answer, and append that ending if it is not there.
        if prompt and self.before_answers and THINKS not in own:
            answer = {"role": LEARNED_ROLES[0], "content": PLACE}
            text = self.render([*messages, answer], tools, variables).text.rpartition(PLACE)[0]
            if not text.endswith(self.before_answers):
                text += self.before_answers
            return Rendering(text)
        return _without_blocks(self._written(_as_given(messages), tools, own, prompt))

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Marks,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[MarkedPlace, int]]:
        """Render messages whose values contain marks, with a new mark for each turn.

        Return the text without marks, and the position of each marked place in it.
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
        """Render messages, with the characters that mark generation blocks."""
        # later entries win: a record's variables override the defaults
        given = {**self.special, **self.variables, **variables, "tools": tools, "documents": None}
        if turns is not None:
            given[sandbox.TURN] = turns
        # one memory and time limit for compiling and rendering: a template is untrusted code
        try:
            with bounded("the template"):
                template = sandbox.compiled_template(self.text, self.today, turns is not None)
                text = sandbox.rendered(
                    template, dict(messages=chat, add_generation_prompt=prompt, **given)
                )
            sandbox.refuse_addresses(text, self.text, (chat, given))
        # a limit ends the build, unlike any other failure of a template, which only costs a record
        except TemplateLimitError:
            raise
        except Exception as error:
            reason = _one_line(error)
            undefined = re.fullmatch(r"'(\w+)' is undefined", reason)
            if undefined is not None and undefined[1] in TOKEN_VARIABLES:
                reason += ": tokenizer_config.json, next to the tokenizer, must name this token"
            raise RecordError(
                f"the chat template refuses it: {reason}; change the record, or use another "
                "--chat-template"
            ) from error
        return text

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int32 [n], and their ranges of characters, int64 [n, 2]."""
        # the template has written all special tokens, such as BOS
        encoding = self._model.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _as_given(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their thought under every key that templates read."""
    # copies: a template must not change the caller's messages
    chat = []
    for message in messages:
        own = {key: value for key, value in message.items() if value is not None}
        thought = next((own[key] for key in REASONING if key in own), None)
        if thought is not None:
            own = {"thinking": thought, **own, "reasoning_content": thought}
        chat.append(own)
    return chat


def _without_blocks(text: str) -> Rendering:
    """Remove the marks of generation blocks; return the text and the ranges of the blocks."""
    generated = []
    length = 0
    # each piece is a block, or the text between two blocks
    for piece in re.split(f"({BLOCK_BEGIN}.*?{BLOCK_END})", text, flags=re.DOTALL):
        block = piece.strip(BLOCK_BEGIN + BLOCK_END)
        if not {BLOCK_BEGIN, BLOCK_END}.isdisjoint(block):
            raise RecordError("the chat template has a generation block inside another one")
        # an empty block teaches nothing
        if piece != block and block:
            generated.append((length, length + len(block)))
        length += len(block)
    return Rendering(re.sub(f"[{BLOCK_BEGIN}{BLOCK_END}]", "", text), tuple(generated))


Template = ChatTemplate | Callable[[], ChatTemplate]
"""A template, or a function that loads it when the first messages appear."""


def loaded(template: Template) -> ChatTemplate:
    """Return the template, loading it if necessary. Raise ValueError like `load_chat_template`."""
    return template if isinstance(template, ChatTemplate) else template()


def load_chat_template(choice: str, tokenizer: Tokenizer, today: str | None) -> ChatTemplate:
    """Load the template of `--chat-template`: auto, a name, or a .jinja file.

    Raise ValueError if it does not exist, does not compile or needs a date, or if the tokenizer
    lacks special tokens.
    """
    flag = f"--chat-template {choice}"
    if choice.endswith(_TEMPLATE_SUFFIX) and not Path(choice).is_file():
        raise ValueError(
            f"{flag}: no such file; give the path of a template, a built-in one "
            f"({', '.join(sorted(OURS))}), or auto for the template in the tokenizer's folder"
        )
    if tokenizer.kind != "huggingface":
        raise ValueError(
            f"{flag} needs a tokenizer.json: a {tokenizer.kind} tokenizer would encode the "
            "template's special tokens as plain text"
        )
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{flag} needs the package jinja2: pip install -e '.[data]'") from error
    # templates call strftime_now for the current date
    text = _chosen(choice, tokenizer.files[0].parent)
    if "strftime_now" in text and today is None:
        raise ValueError(
            f"{flag}: the template writes the current date, so the tokens would change every day; "
            "set a date with --chat-template-date YYYY-MM-DD"
        )
    if today is not None:
        try:
            datetime.datetime.strptime(today, "%Y-%m-%d")
        except ValueError as error:
            raise ValueError(
                f"--chat-template-date {today} is not a date; use YYYY-MM-DD, such as 2026-01-31"
            ) from error
    try:
        with bounded("the template"):
            sandbox.compiled_template(text, today)
    except TemplateLimitError:
        raise
    # Jinja reports syntax errors, but Python's compiler fails in several ways on deep nesting
    except Exception as error:
        raise ValueError(f"{flag}: this is not a Jinja template: {_one_line(error)}") from error
    made = template_of(text, tokenizer, today)
    # the built-in templates rely on these tokens to separate turns
    if text in OURS.values() and not all(made.forgeable.fullmatch(token) for token in _MARKS):
        raise ValueError(
            f"{flag}: {tokenizer.files[0]} lacks the special tokens {', '.join(_MARKS)}; as plain "
            "text, any record could contain them"
        )
    return made


def template_of(
    text: str, tokenizer: Tokenizer, today: str | None, before_answers: str = ""
) -> ChatTemplate:
    """Return a template for a tokenizer.json and the settings next to it.

    `today` is the date that the template may write. Raise ValueError if the settings name tokens
    that the tokenizer does not have.
    """
    folder = tokenizer.files[0].parent
    settings = settings_of(folder)
    named = {}
    for name in TOKEN_VARIABLES:
        content = token_text(settings.get(name))
        if content is not None:
            named[name] = content
    model = _model_of(tokenizer.files[0], settings, named.values())
    # the tokenizer's own end first, then the ends in the generation settings
    tokens = [named.get("eos_token"), *map(model.id_to_token, end_ids(folder))]
    ends = tuple(dict.fromkeys(token for token in tokens if token))
    return ChatTemplate(text, today, named, model, before_answers, folder_ends=ends)


def _chosen(choice: str, folder: Path) -> str:
    """Return the text of a template, given its name or file."""
    if choice.endswith(_TEMPLATE_SUFFIX):
        return read_regular(choice).decode()
    found = templates_of(folder)
    name = "default" if choice == "auto" else choice
    if name in found:
        return found[name]
    if name in OURS:
        return OURS[name]
    # an unknown name: list the names that exist
    has = f"has the templates {', '.join(sorted(found))}" if found else "has no chat template"
    names = ", ".join(sorted({*found, *OURS}))
    raise ValueError(
        f"--chat-template {choice}: {folder} {has}; give auto, one of the names {names}, or "
        "FILE.jinja"
    )


def templates_of(folder: Path) -> dict[str, str]:
    """Return the templates in a tokenizer's folder by name; the unnamed one is `default`.

    Template files take precedence over the settings. Raise ValueError if the settings are invalid.
    """
    # newer folders have template files, one for each name
    plain, old = TEMPLATE_NAMES
    found = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / plain).is_file():
        found["default"] = folder / plain
    if found:
        return {name: read_regular(path).decode() for name, path in found.items()}

    # the settings have a text, or a list of names and texts
    stated = read_beside(folder).values.get("chat_template")
    if stated is None and (folder / old).is_file():
        stated = read_object(folder / old).get("chat_template")
    if isinstance(stated, list):
        stated = {
            each.get("name"): each.get("template") for each in stated if isinstance(each, dict)
        }
    texts = {"default": stated} if isinstance(stated, str) else stated or {}
    is_valid = isinstance(texts, dict)
    if is_valid:
        is_valid = all(isinstance(text, str) for text in (*texts.keys(), *texts.values()))
    if not is_valid:
        raise ValueError(
            f"{folder}: `chat_template` must be a text, or a list of names and templates"
        )
    return texts


def _model_of(path: Path, settings: Mapping[str, Any], named: Iterable[str]) -> Any:
    """Return the `tokenizers.Tokenizer` of a file, with the tokens that the settings add.

    This is the library's tokenizer without its post-processor. The post-processor would only add
    tokens that the template writes itself, and narrow the offsets of other tokens.
    """
    import tokenizers

    # change the file's JSON, because the package cannot remove a post-processor
    content = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizers.Tokenizer.from_str(json.dumps({**content, "post_processor": None}))
    model.no_truncation()
    model.no_padding()
    # tokens of the settings, in the order of their ids
    listed = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = {token["content"]: tokenizers.AddedToken(**token) for _, token in listed}
    known = {token.content for token in model.get_added_tokens_decoder().values()} | tokens.keys()
    # further special tokens have a list, or an object with a name for each
    texts = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name) or ()
        if isinstance(more, dict):
            more = more.values()
        texts += [token_text(each) for each in more]
    for text in (*named, *filter(None, texts)):
        if text not in known:
            tokens[text] = tokenizers.AddedToken(text, special=True, normalized=False)
    unknown = sorted(text for text in tokens if model.token_to_id(text) is None)
    if unknown:
        raise ValueError(
            f"{path}: the files next to it name tokens that it does not have: {', '.join(unknown)}"
        )
    # adding a token again changes nothing unless its properties differ
    model.add_tokens(list(tokens.values()))
    return model


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some tokens, and nothing if there are none.

    Tokens of white space are left out, because every text contains them.
    """
    # the longest first: a pattern tries its alternatives in order
    texts = sorted((text for text in tokens if text.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _one_line(error: object) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())
