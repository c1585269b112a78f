"""A record's messages as a chat template writes them, with the loss weight of every character.

Where a template has `{% generation %}` blocks, these are learned. Elsewhere an answer is what its message adds to the
rendering of all before it with the generation prompt, and both renderings must begin the whole one. What a record says
must change the text, and no text may spell a special token.

An answer whose thought the template leaves out, as of earlier turns, is context: it was not said without. An answer
that had none is learned from its own first word on where the template writes what is around a thought all the same: a
model does not learn to think nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from megacp.prepare.records.chat_template import (
    GENERATION_BLOCK,
    PLACE,
    REASONING,
    THOUGHT,
    THOUGHT_END,
    ChatTemplate,
    Rendering,
    template_of,
)
from megacp.prepare.records.forms import Talk, kind_of, objects_at, role_and_weight, text_of, with_object
from megacp.prepare.records.record import (
    LEARNED_ROLES,
    Media,
    RecordError,
    RecordRules,
    Rendered,
    SamplePart,
    described,
    media_at,
)
from megacp.prepare.tokenize.tokenizer import Tokenizer

_LINKS = ("role", "type", "id", "index", "tool_call_id")
"""Keys that say what stands there or what belongs together: a template need not write them."""
_WRITTEN_AS_THEY_ARE = ("system", "user")
"""Roles whose contents every template writes word by word; it may put what a tool says into JSON."""
_EMPTY_THOUGHT = re.compile(rf"\A\s*{THOUGHT}\s*{THOUGHT_END}\s*")
"""An empty thought at the beginning of a content, whatever the template makes of it."""
_UNASKED = re.compile(rf"{THOUGHT}\s*{THOUGHT_END}\s*\Z")
"""An empty thought at the end of a prompt that asks for none."""
_LONGEST = 60
"""Characters of a text that an error shows."""


class WrittenTalk:
    """The messages of one record for one template. RecordError, from any method, says what is wrong with them."""

    def __init__(self, talk: Talk, template: ChatTemplate, rules: RecordRules) -> None:
        self._talk, self._template, self._rules = talk, template, rules
        self._media: list[tuple[int, int, Media]] = []  # message, part
        self._weights: list[float] = []
        self.answers, self.before_answers = Counter[str](), ""  # as of a Sample
        self._messages = [self._given(i) for i in range(len(talk.messages))]
        self._expected: str | None = None
        if rules.asks and self._messages[-1]["role"] in LEARNED_ROLES:
            self._expected = _words(self._messages.pop())
            self._media = [each for each in self._media if each[0] < len(self._messages)]
        if unknown := [name for name in talk.variables if name not in template.text]:
            raise RecordError(f"`chat_template_kwargs.{unknown[0]}`: the chat template reads no such variable")
        values = (
            *zip(talk.paths, self._messages, strict=not rules.asks),
            ("tools", talk.tools),
            ("variables", talk.variables),
        )
        for path, value in values:  # a special token in a text would end a turn or begin one
            if found := next(filter(None, map(template.forgeable.search, _texts(value))), None):
                raise RecordError(
                    f"a text of `{path}` spells the special token {found[0]!r}, which only the template may write"
                )
        self._whole = self._render(self._messages)
        if not self.text:
            raise RecordError("the chat template writes nothing for this record")
        self.learned: list[tuple[int, int, float]] = []
        """Characters start..stop and their loss weight, in order."""
        if not rules.asks:
            self._refuse_lost()
            self.learned = self._generated() if GENERATION_BLOCK.search(template.text) else self._answers()
        self._places = [self._place(i, j, media) for i, j, media in self._media]

    @property
    def text(self) -> str:
        """All of it."""
        return self._whole.text

    def pieces(self, shared: WrittenTalk | None = None, weight: float = 1.0) -> tuple[SamplePart, ...]:
        """The rendering and all its images. With `shared`, which it goes on: what it adds has the weight.

        Of messages that are asked, the text of a last answer stands behind them, and not in the rendering.
        """
        start = 0 if shared is None else len(shared.text)
        if shared is not None:
            same_learned = [span for span in self.learned if span[0] < start] == shared.learned
            same_places = [place for place in self._places if place[0] < start] == shared._places
            if not (self.text.startswith(shared.text) and same_learned and same_places):
                raise RecordError(
                    "the chat template writes the shared messages otherwise once a branch follows; make a record of "
                    "each branch"
                )
        learned = tuple((a, b, w if b <= start else w * weight) for a, b, w in self.learned)
        rendered = Rendered(self.text, 0.0, None, learned, tuple(self._places))
        expected = [SamplePart(self._expected, 1.0)] if self._expected else []
        return (rendered, *(SamplePart(None, 0.0, media) for *_, media in self._media), *expected)

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> Rendering:
        return self._template.render(messages, self._talk.tools, self._talk.variables, prompt or self._rules.asks)

    def _given(self, i: int) -> dict[str, Any]:
        """Message i as the template gets it; its weight and its images are entered."""
        message, where, ignored = self._talk.messages[i], self._talk.paths[i], self._rules.ignore_keys
        self._weights.append(role_and_weight(message, where, self._rules)[1])
        given = {k: v for k, v in message.items() if v is not None and k != "weight" and k not in ignored}
        if "tool_calls" in given:
            calls, takes = objects_at(given["tool_calls"], f"{where}.tool_calls"), self._template.takes_objects
            given["tool_calls"] = [with_object(call, "arguments") if takes else call for call in calls]
        if all(given[key] in ([], {}) for key in given.keys() - {*_LINKS}):
            raise RecordError(f"`{where}` says nothing: it has no `content`")
        if given["role"] == "developer" and "developer" not in self._template.text:  # OpenAI's word for it
            given["role"] = "system"
        content = given.get("content", "")
        if isinstance(content, list) and content:
            given["content"] = [self._part(i, j, part) for j, part in enumerate(content)]
            if not self._template.takes_parts:
                if any("text" not in part for part in given["content"]):
                    told = f"`{where}.content` is a list with images, and this chat template reads texts alone"
                    raise RecordError(f"{told}: take one that writes images, or give --chat-template ignore")
                given["content"] = "".join(part["text"] for part in given["content"])
        elif not isinstance(content, str):
            raise RecordError(f"`{where}.content` is {described(content)}, it must be a string or a list of parts")
        return given

    def _part(self, i: int, j: int, part: Any) -> dict[str, Any]:
        where = f"{self._talk.paths[i]}.content[{j}]"
        kind = kind_of(part, where)
        if kind == "text":
            return {"type": "text", "text": text_of(part, where, self._rules)}
        self._media.append((i, j, media_at(part, kind, where, self._rules)))
        return {"type": kind, kind: kind}

    def _refuse_lost(self) -> None:
        """What a message or a tool says must change the text, or (what every template writes) be in it by its words.

        An answer whose thought is left out by a template that writes thoughts becomes context.
        """
        writes_thoughts = self._template.writes_thoughts
        for i, (message, where) in enumerate(zip(self._messages, self._talk.paths, strict=True)):
            answers = self._weights[i] > 0 and writes_thoughts
            thought, thoughtless = _thought_apart(message) if answers else ("", {})
            if thought and _solid(self._with(i, thoughtless, self._talk.tools)) == _solid(self.text):
                if i + 1 == len(self._messages):
                    key = next((key for key in REASONING if key in message), "content")
                    said = f"`{where}.{key}`: the chat template leaves out the last thought"
                    raise RecordError(f"{said}; take one that writes it, with --chat-template FILE.jinja")
                self._weights[i] = 0.0
                self.answers["in_context"] += 1
            elif answers and not self._reads_thought(i):
                said = f"`{where}.content`: the chat template reads no thought there"
                raise RecordError(f"{said}; give it as `{REASONING[0]}`")
            for key in message.keys() - {*_LINKS}:
                by_rule = key in REASONING and writes_thoughts and not self._weights[i]
                by_rule |= key == "name" and message["role"] == "tool"  # the call before it names the tool
                blank = not message[key] or (isinstance(message[key], str) and not message[key].strip())
                if key == "content" and message["role"] in _WRITTEN_AS_THEY_ARE:
                    self._refuse_unsaid(i, key, self.text)
                elif key in REASONING and not (blank or writes_thoughts):
                    raise RecordError(
                        f"`{where}.{key}`: the chat template writes no thoughts; take one that does, such as "
                        "--chat-template qwen3"
                    )
                elif not (blank or by_rule or (key == "content" and self._weights[i])):
                    without = {name: value for name, value in message.items() if name != key}
                    self._refuse_same(f"{where}.{key}", i, without, self._talk.tools)
        if self._talk.tools:
            self._refuse_same("tools", 0, self._messages[0], None)

    def _reads_thought(self, i: int) -> bool:
        """Whether a thought in content i is one for the template: written as by its own key, or left out."""
        message, words = self._messages[i], _words(self._messages[i])
        told = {**message, "content": words.replace(THOUGHT_END, PLACE + THOUGHT_END, 1)}  # as an empty one is read too
        thought, thoughtless = _thought_apart(told)
        if THOUGHT_END not in words or not thought:
            return True
        named = {**thoughtless, REASONING[0]: thought}
        read, bare, written = (_solid(self._with(i, m, self._talk.tools)) for m in (named, thoughtless, told))
        return read in ("", bare, written)

    def _refuse_same(self, what: str, i: int, message: dict[str, Any], tools: list[Any] | None) -> None:
        """RecordError where the template writes the same with message i and the tools like this, without `what`."""
        if self._with(i, message, tools) == self.text:
            key = what.rpartition(".")[2]
            raise RecordError(
                f"`{what}` would be lost: the chat template does not write it; --ignore-keys {key} leaves it out"
            )

    def _with(self, i: int, message: dict[str, Any], tools: list[Any] | None) -> str:
        """The text with message i and the tools like this; empty where the template refuses it."""
        return self._tried([*self._messages[:i], message, *self._messages[i + 1 :]], tools)

    def _tried(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
        """The text of messages; empty where the template refuses them, as where what is missing is read."""
        try:
            return self._template.render(messages, tools, self._talk.variables, prompt).text
        except RecordError:
            return ""

    def _answers(self) -> list[tuple[int, int, float]]:
        """What each learned message adds to the rendering of those before it."""
        learned = []
        for i, (weight, where) in enumerate(zip(self._weights, self._talk.paths, strict=True)):
            if not weight:
                continue
            try:
                prompt = self._render(self._messages[:i], prompt=True).text if i else self._opened()
            except RecordError as error:
                told = f"`{where}`: what stands before it cannot be asked alone: {error}"
                raise RecordError(f"{told}; with a `weight` of 0 it is context") from error
            until = self.text if i + 1 == len(self._messages) else self._render(self._messages[: i + 1]).text
            alone, here = self._before_words(i, prompt) or (prompt, prompt)
            own = until[len(alone) :]
            ends = own, re.sub(f"(?:{self._template.forgeable.pattern})+$", "", own)  # without what ends a whole one
            said = next((each for each in ends if self.text.startswith(here + each)), None)
            if not until.startswith(alone) or said is None:
                raise RecordError(
                    f"`{where}`: the chat template writes it, or what stands before it, otherwise than it asks for it, "
                    "or otherwise once more follows; give earlier answers a `weight` of 0, make a record of each, or "
                    "take a template with generation blocks"
                )
            if not said and here == prompt:
                raise RecordError(f"`{where}`: the chat template adds nothing for it that could be learned")
            start, stop = len(here), len(here) + len(said)
            for key in ("content", *REASONING):
                self._refuse_unsaid(i, key, self.text[self._before_thought(start) : stop])
            learned += [(start, stop, weight)] * bool(said)
        return learned

    def _opened(self) -> str:
        """What stands before an answer that is the first message, up to where a question would have asked for it."""
        begin = self._render([{**self._messages[0], "content": PLACE}]).text.partition(PLACE)[0]
        opening = self._render([_ASK], prompt=True).text.removeprefix(self._render([_ASK]).text)
        at = begin.rfind(opening) if opening else -1
        return begin if at < 0 else begin[: at + len(opening)]

    def _before_words(self, i: int, prompt: str) -> tuple[str, str] | None:
        """What stands before the first word of an answer without a thought: where it is the last message, and here.

        None unless the template writes there what it writes around a thought. `prompt`: what asks for it, or empty.
        """
        message, before, tools = self._messages[i], self._messages[:i], self._talk.tools
        empty = _EMPTY_THOUGHT.match(_words(message))
        if _thought_apart(message)[0]:
            self.answers["real_thoughts"] += 1
            bare = _UNASKED.sub("", prompt) + THOUGHT
            if prompt in ("", self.text[: len(prompt)]) or self._talk.variables or not self.text.startswith(bare):
                return None
            rest = self.text[len(bare) :].lstrip()  # it thinks all the same, and is learned from the first word
            alone = self.text.removesuffix(rest)
            return alone, alone
        if not (self._template.writes_thoughts or empty):
            self.answers["no_thoughts"] += 1
            return None
        own = empty[0] if empty else ""
        wordless = {**message, "content": own + PLACE}
        thinking = {key: value for key, value in wordless.items() if key not in REASONING}
        thinking |= {"content": own.replace(THOUGHT_END, PLACE + THOUGHT_END) + PLACE} if own else {REASONING[0]: PLACE}
        both = (wordless, thinking)  # with what follows where none can be the last, as before any question
        wrote, thought = (self._tried([*before, each], tools) or self._with(i, each, tools) for each in both)
        alone, (*around, _) = wrote.partition(PLACE)[0], thought.split(PLACE)
        if len(around) == 1 and _solid(prompt) == _solid(alone) + THOUGHT:  # it asks for a thought, and writes none
            self.answers["empty_thoughts"] += 1
            self.before_answers = alone.removeprefix(self._tried(before, tools) or alone)
            return alone, alone
        if len(around) != 2 or _solid("".join(around)) != _solid(alone):
            return None
        alone = next(filter(self.text.startswith, (alone, alone.rstrip())), alone)  # a blank answer ends with its mark
        here = next((each for each in (alone, prompt) if each and self.text.startswith(each)), None)
        if here is None:  # an earlier answer has none, or another
            here = self._with(i, wordless, tools).partition(PLACE)[0]
        asked = prompt.startswith(here)
        is_behind = _solid(here) == _solid(alone)
        if not (here and self.text.startswith(here) and (is_behind or asked)):
            return None
        self.answers["empty_thoughts" if is_behind or here != prompt else "no_thoughts"] += 1
        goes_on = i > 0 and before[-1]["role"] in LEARNED_ROLES  # which the template may write otherwise here
        if not (self.before_answers or asked or goes_on) and prompt:
            self.before_answers = here[len(os.path.commonprefix((prompt, here))) :]
        return alone, here

    def _generated(self) -> list[tuple[int, int, float]]:
        """The generation blocks, with the weights of their messages."""
        blocks, end = self._whole.generated, 0
        answering = [i for i, message in enumerate(self._messages) if message["role"] in LEARNED_ROLES]
        weights = [self._weights[i] for i in answering]
        said = "".join(self.text[self._before_thought(a) : b] for a, b in blocks)
        for i in answering:
            if self._weights[i]:
                end = self._refuse_unsaid(i, "content", said, end)
        different = len({*weights}) > 1
        if len(blocks) < len(weights) - weights.count(0) or (different and len(blocks) != len(weights)):
            raise RecordError(
                f"{len(weights)} answers have {len(blocks)} generation blocks of the chat template: which belong "
                "together cannot be told"
            )
        each = weights if different else weights[:1] * len(blocks)
        learned = [(i, self._tried(self._messages[:i], self._talk.tools, True)) for i in answering if self._weights[i]]
        begins = [len(found[1]) for i, prompt in learned if (found := self._before_words(i, prompt))]
        starts = [min((begin for begin in begins if a < begin <= b), default=a) for a, b in blocks]
        return [(a, b, w) for a, (_, b), w in zip(starts, blocks, each, strict=True) if w and a < b]

    def _before_thought(self, at: int) -> int:
        """Where the thought begins that may be opened right before a character."""
        return len(self.text[:at].rstrip().removesuffix(THOUGHT))

    def _refuse_unsaid(self, i: int, key: str, said: str, start: int = 0) -> int:
        """RecordError unless the words of a value stand in `said`, in order from `start` on; where they end."""
        words = _words(self._messages[i], key, " ")
        words = re.sub(f"({THOUGHT}|{THOUGHT_END})", r" \1 ", words)  # around which a template may put blanks
        for word in (_EMPTY_THOUGHT.sub("", words) if self._weights[i] else words).split():
            found = said.find(word, start)
            if found < 0:
                raise RecordError(
                    f"`{self._talk.paths[i]}.{key}`: {word[:_LONGEST]!r} would be lost: the chat template does not "
                    "write it here"
                )
            start = found + len(word)
        return start

    def _place(self, i: int, j: int, media: Media) -> tuple[int, int]:
        """The characters that stand for an image or a video: what a text in its place takes the place of."""
        message = self._messages[i]
        parts = [*message["content"][:j], {"type": "text", "text": PLACE}, *message["content"][j + 1 :]]
        other = self._render([*self._messages[:i], {**message, "content": parts}, *self._messages[i + 1 :]]).text
        before, _, after = other.partition(PLACE)
        start, stop = len(before), len(self.text) - len(after)
        same = start <= stop and self.text.startswith(before) and self.text.endswith(after)
        written = self.text[start:stop].strip() if same else ""
        if not self._template.is_added(written):
            raise RecordError(
                f"`{media.key}`: the chat template writes {written[:_LONGEST]!r} where it stands, and {media.kind}s "
                "need a place of special tokens alone; take a template that writes one, or give --chat-template ignore"
            )
        start = self.text.index(written, start)
        return start, start + len(written)


def _words(message: dict[str, Any], key: str = "content", between: str = "") -> str:
    """The texts of a value of a message."""
    value = message.get(key)
    parts = value if isinstance(value, list) else [{"text": value}]
    return between.join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _thought_apart(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The thought of an answer, by itself or before its words (the prompt may open it), and the answer without."""
    given = {key: value for key, value in message.items() if key not in REASONING}
    thoughts = [str(message[key] or "") for key in message.keys() - given.keys()]
    content = _words(message)
    if THOUGHT_END in content and (content.lstrip().startswith(THOUGHT) or THOUGHT not in content):
        thought, _, said = content.rpartition(THOUGHT_END)
        given["content"] = said.lstrip("\n")
        thoughts.append(thought.replace(THOUGHT, ""))
    return "".join(thoughts).strip(), given


def _solid(text: str) -> str:
    """A text without its blanks."""
    return "".join(text.split())


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value, keys of objects too; not who says a message or what kind a part is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key not in ("role", "type"):
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif not (value is None or isinstance(value, int | float)):  # of a table
        raise RecordError(f"messages hold {described(value)}, which a chat template cannot write as text")


# ---- what stops a model that was trained on messages

_WORD = "Certainly"
_DAY = "2026-01-31"
"""Day for templates that write a date: no answer ends with it."""
_ASK: dict[str, Any] = {"role": "user", "content": "Why?"}
_TELL: dict[str, Any] = {"role": "assistant", "content": _WORD}
_CALLED = {"name": "look", "arguments": {"place": _WORD}}
_CALL: dict[str, Any] = {"role": "assistant", "tool_calls": [{"type": "function", "function": _CALLED}]}
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "Where"}}}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks", "parameters": _PARAMETERS}}]
_PROBE = (([_ASK, _TELL], None), ([_ASK, _TELL] * 2, None), ([_ASK, _CALL], _TOOLS))


def answer_ends(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the special tokens that a template has learned behind an answer; none where none is known.

    Of a call the last one alone, for others may end its parts. ValueError: the files beside the tokenizer's name tokens
    that it does not have.
    """
    template, found = template_of(text, tokenizer, _DAY), list[str]()
    for messages, tools in _PROBE:
        talk = Talk(messages, tuple(f"messages[{i}]" for i in range(len(messages))), tools)
        try:
            written = WrittenTalk(talk, template, RecordRules())
        except RecordError:  # no such conversation is in the data either
            continue
        for start, stop, _ in written.learned:
            _, word, behind = written.text[start:stop].rpartition(_WORD)
            tokens = template.forgeable.findall(behind) if word else []
            found += tokens[-1:] if tools else tokens
    ids = [tokenizer.token_id(token) for token in dict.fromkeys(found)]
    return tuple(i for i in ids if i is not None)
