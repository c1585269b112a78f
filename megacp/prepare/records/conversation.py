"""Write a record's messages by a chat template, with the loss weight of every character.

If a template has `{% generation %}` blocks, these are learned. Otherwise an answer is the text that
its message adds to the rendering of all messages before it with the generation prompt, and both
renderings must begin the whole one. An answer is learned with the token that ends it, even if the
template writes this token only as the beginning of the next turn, or not at all after the last
answer. Every value of a record must appear in the text, and no text may spell a special token.

If the template leaves out the thought of an answer, as it does for earlier turns, the answer is
context: its author did not say it without the thought. If an answer had no thought, but the
template writes an empty one, it is learned from its own first word on, so that a model does not
learn to think nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from megacp.prepare.records.answers import AnswerFinder, LocatedAnswer
from megacp.prepare.records.chat_template import (
    GENERATION_BLOCK,
    PLACE,
    REASONING,
    THOUGHT,
    THOUGHT_END,
    ChatTemplate,
    template_of,
)
from megacp.prepare.records.forms import (
    Talk,
    kind_of,
    objects_at,
    role_and_weight,
    text_of,
    with_object,
)
from megacp.prepare.records.marks import THOUGHT_WORDS
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
from megacp.prepare.records.renderings import Renderings
from megacp.prepare.records.thoughts import (
    EMPTY_THOUGHT,
    LINK_KEYS,
    is_blank,
    message_words,
    solid,
    thought_apart,
)
from megacp.prepare.tokenize.tokenizer import Tokenizer

_WRITTEN_AS_THEY_ARE = ("system", "user")
"""Roles whose contents every template writes word by word; it may put what a tool says into JSON.
"""
_LONGEST = 60
"""Characters of a text that an error shows."""


class WrittenTalk:
    """The messages of one record for one template. RecordError, from any method, says what is wrong
    with them.
    """

    def __init__(
        self, talk: Talk, template: ChatTemplate, rules: RecordRules, goes_on: bool = False
    ) -> None:
        """`goes_on`: whether branches follow, so that the text ends as they begin."""
        self._goes_on = goes_on
        self._talk, self._template, self._rules = talk, template, rules
        self._media: list[tuple[int, int, Media]] = []  # message, part
        self._weights: list[float] = []
        self.answers, self.before_answers = Counter[str](), ""  # as of a Sample
        self._messages = [self._given(i) for i in range(len(talk.messages))]
        self._expected: str | None = None
        if rules.asks and self._messages[-1]["role"] in LEARNED_ROLES:
            self._expected = message_words(self._messages.pop())
            self._media = [each for each in self._media if each[0] < len(self._messages)]
        if unknown := [name for name in talk.variables if name not in template.text]:
            raise RecordError(
                f"`chat_template_kwargs.{unknown[0]}`: the chat template reads no such variable"
            )
        values = (
            *zip(talk.paths, self._messages, strict=not rules.asks),
            ("tools", talk.tools),
            ("variables", talk.variables),
        )
        for path, value in values:  # a special token in a text would end a turn or begin one
            if found := next(filter(None, map(template.forgeable.search, _texts(value))), None):
                raise RecordError(
                    f"a text of `{path}` spells the special token {found[0]!r}, which only the "
                    "template may write"
                )
        self._renderings = Renderings(
            template, self._messages, talk.tools, talk.variables, rules.asks
        )
        self._closing = ""
        """The token that ends a last answer after which the template writes none."""
        if not self._renderings.text:
            raise RecordError("the chat template writes nothing for this record")
        self.learned: list[tuple[int, int, float]] = []
        """Characters start..stop and their loss weight, in order."""
        if not rules.asks:
            self._refuse_lost()
            self.learned = (
                self._generated() if GENERATION_BLOCK.search(template.text) else self._answers()
            )
        self._places = self._find_places()

    @property
    def text(self) -> str:
        """All of it."""
        return self._renderings.text + self._closing

    def pieces(
        self, shared: WrittenTalk | None = None, weight: float = 1.0
    ) -> tuple[SamplePart, ...]:
        """The rendering and all its images. With `shared`, which it goes on: what it adds has the
        weight.

        Of messages that are asked, the text of a last answer stands behind them, and not in the
        rendering.
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

    def _given(self, i: int) -> dict[str, Any]:
        """Message i as the template gets it; its weight and its images are entered."""
        message, where, ignored = (
            self._talk.messages[i],
            self._talk.paths[i],
            self._rules.ignore_keys,
        )
        self._weights.append(role_and_weight(message, where, self._rules)[1])
        given = {
            k: v for k, v in message.items() if v is not None and k != "weight" and k not in ignored
        }
        if "tool_calls" in given:
            calls, takes = (
                objects_at(given["tool_calls"], f"{where}.tool_calls"),
                self._template.takes_objects,
            )
            given["tool_calls"] = [
                with_object(call, "arguments") if takes else call for call in calls
            ]
        if all(given[key] in ([], {}) for key in given.keys() - {*LINK_KEYS}):
            raise RecordError(f"`{where}` says nothing: it has no `content`")
        if (
            given["role"] == "developer" and "developer" not in self._template.text
        ):  # OpenAI's word for it
            given["role"] = "system"
        content = given.get("content", "")
        if isinstance(content, list) and content:
            given["content"] = [self._part(i, j, part) for j, part in enumerate(content)]
            if not self._template.takes_parts:
                if any("text" not in part for part in given["content"]):
                    told = (
                        f"`{where}.content` is a list with images, and this chat template reads "
                        "texts alone"
                    )
                    raise RecordError(
                        f"{told}: take one that writes images, or give --chat-template ignore"
                    )
                given["content"] = "".join(part["text"] for part in given["content"])
        elif not isinstance(content, str):
            raise RecordError(
                f"`{where}.content` is {described(content)}, it must be a string or a list of parts"
            )
        return given

    def _part(self, i: int, j: int, part: Any) -> dict[str, Any]:
        where = f"{self._talk.paths[i]}.content[{j}]"
        kind = kind_of(part, where)
        if kind == "text":
            return {"type": "text", "text": text_of(part, where, self._rules)}
        self._media.append((i, j, media_at(part, kind, where, self._rules)))
        return {"type": kind, kind: kind}

    def _refuse_lost(self) -> None:
        """What a message or a tool says must change the text, or (what every template writes) be in
        it by its words.

        An answer whose thought is left out by a template that writes thoughts becomes context.
        """
        left_out = self._left_out
        for i, where in enumerate(self._talk.paths):
            if i in left_out:
                if i + 1 == len(self._messages):
                    key = next((key for key in REASONING if key in self._messages[i]), "content")
                    said = f"`{where}.{key}`: the chat template leaves out the last thought"
                    raise RecordError(
                        f"{said}; take one that writes it, with --chat-template FILE.jinja"
                    )
                self._leave_as_context(i)
            elif i in self._renderings.unwritten_contents:
                self._leave_as_context(i)
            elif self._is_taken_for_words(i):
                said = f"`{where}.content`: the chat template reads no thought there"
                raise RecordError(f"{said}; give it as `{REASONING[0]}`")
            for key in self._messages[i]:
                if key not in LINK_KEYS:
                    self._refuse_lost_key(i, key)
        if self._talk.tools and self._renderings.without_tools() == self._renderings.text:
            raise RecordError(_would_be_lost("tools", "tools"))

    def _leave_as_context(self, i: int) -> None:
        """Learn nothing of answer i, of which the template leaves out something."""
        if self._weights[i]:
            self.answers["in_context"] += 1
        self._weights[i] = 0.0

    def _refuse_lost_key(self, i: int, key: str) -> None:
        """RecordError where the template does not write the value at a key of message i."""
        message = self._messages[i]
        where = f"{self._talk.paths[i]}.{key}"
        writes_thoughts = self._template.writes_thoughts
        if key == "content" and message["role"] in _WRITTEN_AS_THEY_ARE:
            self._refuse_unwritten_words(i)
        elif key in REASONING and not (is_blank(message[key]) or writes_thoughts):
            raise RecordError(
                f"`{where}`: the chat template writes no thoughts; take one that does, such as "
                "--chat-template qwen3"
            )
        else:
            by_rule = key in REASONING and writes_thoughts and not self._weights[i]
            by_rule |= (
                key == "name" and message["role"] == "tool"
            )  # the call before it names the tool
            by_rule |= key == "content" and self._weights[i] > 0  # its words are looked for
            by_rule |= key == "content" and i in self._renderings.unwritten_contents
            place = i, THOUGHT_WORDS if key in REASONING else key
            if by_rule or is_blank(message[key]) or place in self._renderings.begins:
                return
            without = {name: value for name, value in message.items() if name != key}
            if self._renderings.with_message(i, without) == self._renderings.text:
                raise RecordError(_would_be_lost(where, key))

    @cached_property
    def _left_out(self) -> set[int]:
        """Learned answers whose thoughts a template leaves out that writes thoughts."""
        if not self._template.writes_thoughts:
            return set()
        thoughtless = {}
        for i in self._learned_messages():
            thought, without = thought_apart(self._messages[i])
            if thought:
                thoughtless[i] = without
        return self._renderings.unwritten_thoughts(thoughtless) if thoughtless else set()

    def _is_taken_for_words(self, i: int) -> bool:
        """Whether the template takes a thought in the content of answer i for words."""
        variants = self._thoughts_inside.get(i)
        return variants is not None and not self._all_are_read and not self._are_read({i: variants})

    @cached_property
    def _thoughts_inside(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Learned answers whose contents begin with a thought: with it by its own key, without it,
        and as they are.
        """
        inside: dict[int, tuple[dict[str, Any], ...]] = {}
        if not self._template.writes_thoughts:
            return inside
        for i in self._learned_messages():
            message = self._messages[i]
            words = message_words(message)
            # an empty thought is also looked for, and is not empty then
            told = {**message, "content": words.replace(THOUGHT_END, PLACE + THOUGHT_END, 1)}
            thought, thoughtless = thought_apart(told)
            if THOUGHT_END in words and thought and i not in self._left_out:
                inside[i] = {**thoughtless, REASONING[0]: thought}, thoughtless, told
        return inside

    @cached_property
    def _all_are_read(self) -> bool:
        return self._are_read(self._thoughts_inside)

    def _are_read(self, inside: dict[int, tuple[dict[str, Any], ...]]) -> bool:
        """Whether thoughts in contents are written as by their own key, or left out."""
        texts = []
        for variant in range(3):
            texts.append(
                solid(
                    self._renderings.with_messages({i: each[variant] for i, each in inside.items()})
                )
            )
        read, bare, written = texts
        return read in ("", bare, written)

    def _learned_messages(self) -> list[int]:
        return [i for i, weight in enumerate(self._weights) if weight > 0]

    # ---- what is learned

    def _answers(self) -> list[tuple[int, int, float]]:
        """What each learned message adds to the rendering of those before it, with the token that
        ends it.
        """
        learned = []
        for i, answer in self._found(has_blocks=False).items():
            start, stop = answer.start, answer.stop
            assert start is not None and stop is not None
            said = self.text[self._before_thought(start) : stop]
            for key in ("content", *REASONING):
                self._refuse_unsaid(i, key, said)
            stop = self._with_end(i, stop)
            if start < stop:
                learned.append((start, stop, self._weights[i]))
            if not (
                self._has_end(stop)
                or self._template.forgeable.match(self.text, self._after_blanks(stop))
            ):
                self.answers["no_end"] += 1
        return learned

    def _found(self, has_blocks: bool) -> dict[int, LocatedAnswer]:
        """The learned answers, which are counted."""
        finder = AnswerFinder(self._renderings, self._talk.paths, has_blocks)
        found = finder.find(self._learned_messages())
        for answer in found.values():
            if answer.thought:
                self.answers[answer.thought] += 1
            if answer.before_answers and (answer.opens_thought or not self.before_answers):
                self.before_answers = answer.before_answers
        return found

    def _generated(self) -> list[tuple[int, int, float]]:
        """The generation blocks, with the weights of their messages."""
        blocks, end = self._renderings.whole.generated, 0
        answering = [
            i for i, message in enumerate(self._messages) if message["role"] in LEARNED_ROLES
        ]
        weights = [self._weights[i] for i in answering]
        said = "".join(self.text[self._before_thought(a) : b] for a, b in blocks)
        for i in answering:
            if self._weights[i]:
                end = self._refuse_unsaid(i, "content", said, end)
        different = len({*weights}) > 1
        if len(blocks) < len(weights) - weights.count(0) or (
            different and len(blocks) != len(weights)
        ):
            raise RecordError(
                f"{len(weights)} answers have {len(blocks)} generation blocks of the chat "
                "template: which belong "
                "together cannot be told"
            )
        each = weights if different else weights[:1] * len(blocks)
        found = self._found(has_blocks=True).values()
        begins = sorted(answer.start for answer in found if answer.start is not None)
        learned = []
        for (start, stop), weight in zip(blocks, each, strict=True):
            first = bisect.bisect_right(begins, start)
            if first < len(begins) and begins[first] <= stop:
                start = begins[first]
            if weight and start < stop:
                learned.append((start, stop, weight))
        ended = sum(
            self._has_end(stop) for _, stop, _ in learned
        )  # an answer may have a block for its end alone
        if ended < len(self._learned_messages()):
            self.answers["no_end"] += len(self._learned_messages()) - ended
        return learned

    def _with_end(self, i: int, stop: int) -> int:
        """Where answer i stops with the token that ends it; a last one gets it, if the template
        writes none.
        """
        if self._has_end(stop):
            return stop
        after = self._after_blanks(stop)
        for (
            token
        ) in self._template.ends:  # it may be the beginning of the next turn, as under GLM's
            if self.text.startswith(token, after):
                return after + len(token)
        if i + 1 == len(self._messages) and stop == len(self.text):
            self._closing = self._template.end_after(
                "tool_calls" in self._messages[i], self._goes_on
            )
        return stop + len(self._closing)

    def _has_end(self, stop: int) -> bool:
        """Whether a special token, and maybe blanks, stand before a character."""
        while stop and self.text[stop - 1].isspace():
            stop -= 1
        return self.text.endswith((*self._template.special_texts, *self._template.ends), 0, stop)

    def _after_blanks(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at

    def _before_thought(self, at: int) -> int:
        """Where the thought begins that may be opened right before a character."""
        while at and self.text[at - 1].isspace():
            at -= 1
        return at - len(THOUGHT) if self.text.endswith(THOUGHT, 0, at) else at

    def _refuse_unwritten_words(self, i: int) -> None:
        """RecordError unless the words of a content stand in the text, where its mark is or
        anywhere.
        """
        begin = self._renderings.begin_of(i)
        if begin is not None:
            with contextlib.suppress(RecordError):
                self._refuse_unsaid(i, "content", self.text, begin)
                return
        self._refuse_unsaid(i, "content", self.text)

    def _refuse_unsaid(self, i: int, key: str, said: str, start: int = 0) -> int:
        """RecordError unless the words of a value stand in `said`, in order from `start` on; where
        they end.
        """
        words = message_words(self._messages[i], key, " ")
        words = re.sub(
            f"({THOUGHT}|{THOUGHT_END})", r" \1 ", words
        )  # around which a template may put blanks
        for word in (EMPTY_THOUGHT.sub("", words) if self._weights[i] else words).split():
            found = said.find(word, start)
            if found < 0:
                raise RecordError(
                    f"`{self._talk.paths[i]}.{key}`: {word[:_LONGEST]!r} would be lost: the chat "
                    "template does not "
                    "write it here"
                )
            start = found + len(word)
        return start

    # ---- images

    def _find_places(self) -> list[tuple[int, int]]:
        """The characters of each image or video: those of which a text in its place takes the
        place.
        """
        if len(self._media) < 2:
            return [self._place(*media) for media in self._media]
        return self._places_at_once() or [self._place(*media) for media in self._media]

    def _places_at_once(self) -> list[tuple[int, int]]:
        """The places by one rendering with a text in each; empty unless images are all written as
        the first is.
        """
        text = self._renderings.text
        written: dict[
            str, tuple[str, int, int]
        ] = {}  # by kind, and where in it its tokens begin and end
        messages = list(self._messages)
        for i, j, media in self._media:
            if media.kind not in written:
                start, stop = self._replaced(i, j)
                first, last = self._place(i, j, media)
                written[media.kind] = text[start:stop], first - start, last - start
            messages[i] = _with_text(messages[i], j)
        before, *after = self._renderings.tried(messages, self._rules.asks).split(PLACE)
        if len(after) != len(self._media) or not text.startswith(before):
            return []
        places = []
        at = len(before)
        for (_, _, media), following in zip(self._media, after, strict=True):
            own, first, last = written[media.kind]
            if not text.startswith(own + following, at):
                return []
            places.append((at + first, at + last))
            at += len(own) + len(following)
        return places if at == len(text) else []

    def _place(self, i: int, j: int, media: Media) -> tuple[int, int]:
        """The characters of the tokens of one image."""
        text = self._renderings.text
        start, stop = self._replaced(i, j)
        written = text[start:stop].strip()
        if not self._template.is_added(written):
            raise RecordError(
                f"`{media.key}`: the chat template writes {written[:_LONGEST]!r} where it stands, "
                f"and {media.kind}s "
                "need a place of special tokens alone; take a template that writes one, or give --chat-template ignore"
            )
        start = text.index(written, start)
        return start, start + len(written)

    def _replaced(self, i: int, j: int) -> tuple[int, int]:
        """The characters whose place a text takes that stands in part j of message i; none where it
        changes others.
        """
        text = self._renderings.text
        messages = [*self._messages[:i], _with_text(self._messages[i], j), *self._messages[i + 1 :]]
        before, _, after = self._renderings.render(messages, self._rules.asks).text.partition(PLACE)
        start, stop = len(before), len(text) - len(after)
        if start <= stop and text.startswith(before) and text.endswith(after):
            return start, stop
        return 0, 0


def _with_text(message: dict[str, Any], j: int) -> dict[str, Any]:
    """A message with PLACE as part j of its content."""
    parts = list(message["content"])
    parts[j] = {"type": "text", "text": PLACE}
    return {**message, "content": parts}


def _would_be_lost(what: str, key: str) -> str:
    told = f"`{what}` would be lost: the chat template does not write it"
    if key == "content":  # without it, no message would say anything
        return f"{told}; take a template that writes it, with --chat-template FILE.jinja"
    return f"{told}; --ignore-keys {key} leaves it out"


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value, keys of objects too; not who says a message or what kind a part
    is.
    """
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
        raise RecordError(
            f"messages hold {described(value)}, which a chat template cannot write as text"
        )


# ---- what stops a model that was trained on messages

_WORD = "Certainly"
_DAY = "2026-01-31"
"""Day for templates that write a date: no answer ends with it."""
_ASK: dict[str, Any] = {"role": "user", "content": "Why?"}
_TELL: dict[str, Any] = {"role": "assistant", "content": _WORD}
_CALLED = {"name": "look", "arguments": {"place": _WORD}}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": _CALLED}],
}
_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Where"}},
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks", "parameters": _PARAMETERS},
    }
]
_PROBE = (([_ASK, _TELL], None), ([_ASK, _TELL] * 2, None), ([_ASK, _CALL], _TOOLS))


def answer_ends(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the special tokens that a template has learned behind an answer; none where none is
    known.

    Of a call the last one alone, for others may end its parts. ValueError: the files beside the
    tokenizer's name tokens that it does not have.
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
