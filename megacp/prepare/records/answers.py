"""Find the learned part of each answer in a conversation that a template wrote.

An answer is the text that its message adds to the rendering of all messages before it with the
generation prompt. Doing this for every answer takes time that grows with the square of the
conversation's length. But answers of one kind (the same keys, the same neighbours, the same text
around them) begin and end alike. So one answer of each kind is located by renderings of its own,
and the others are located by matching the same text at their own marks.

A template may still treat one answer differently, for example by its number. The last matched
answer, and some before it, are therefore located both ways. If one of them differs, every answer of
the conversation is located by renderings.
"""

from __future__ import annotations

import bisect
import os
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megacp.prepare.records.chat_template import PLACE, REASONING, THOUGHT, THOUGHT_END
from megacp.prepare.records.record import LEARNED_ROLES, RecordError
from megacp.prepare.records.renderings import Renderings
from megacp.prepare.records.thoughts import (
    EMPTY_THOUGHT,
    is_blank,
    message_words,
    solid,
    thought_apart,
)

_UNASKED = re.compile(rf"{THOUGHT}\s*{THOUGHT_END}\s*\Z")
"""An empty thought at the end of a prompt that asks for none."""
_ASK: dict[str, Any] = {"role": "user", "content": "Why?"}
_MOST_PATTERNS = 32
"""Most patterns that are kept for answers of one kind, for example for different names of tools."""


@dataclass(frozen=True)
class LocatedAnswer:
    """The learned part of an answer."""

    start: int | None
    """None: where the generation block begins."""
    stop: int | None
    """None: where the generation block ends."""
    thought: str = ""
    """The counter of THOUGHTS that it belongs to; empty for none."""
    before_answers: str = ""
    """The empty thought, not learned, after its prompt, as of a Sample."""
    opens_thought: bool = False
    """Whether its prompt opens a thought, and the template never writes one."""


class _Opening(NamedTuple):
    """The text before the first learned word of an answer."""

    thought: str
    alone: str | None = None
    """The rendering up to there, where the answer is the last message; None: the prompt."""
    here: str | None = None
    """The rendering up to there in the whole conversation; None: the prompt."""
    before_answers: str = ""
    opens_thought: bool = False


class _Pattern(NamedTuple):
    """An answer by the text between its marks and its borders."""

    head: int | None
    """Characters from the beginning of its turn to its start; None without a start."""
    head_text: str
    tail: int | None
    """Characters from the beginning of the next turn to its stop, negative where it stops before;
    None without one.
    """
    tail_text: str
    answer: LocatedAnswer


class AnswerFinder:
    """Finds the learned parts of the answers in one conversation."""

    def __init__(self, renderings: Renderings, paths: Sequence[str], has_blocks: bool) -> None:
        """`paths`: where each message is in the record; `has_blocks`: only the starts of answers
        are asked for.
        """
        self._renderings = renderings
        self._paths = paths
        self._has_blocks = has_blocks
        self._messages = renderings.messages
        self._text = renderings.text

    def find(self, answers: Sequence[int]) -> dict[int, LocatedAnswer]:
        """Locate some answers. RecordError: the first of them that cannot be located."""
        found: dict[int, LocatedAnswer] = {}
        patterns: dict[Hashable, list[_Pattern]] = defaultdict(list)
        matched: list[int] = []
        for i in answers:
            kind = self._kind(i)
            alike = (self._matched(pattern, i) for pattern in patterns[kind])
            answer = next((each for each in alike if each is not None), None)
            if answer is not None:
                matched.append(i)
            else:
                answer = self._rendered(i)
                pattern = self._pattern(i, answer)
                if pattern is not None and len(patterns[kind]) < _MOST_PATTERNS:
                    patterns[kind].append(pattern)
            found[i] = answer
        if not self._are_confirmed(found, _some_of(matched)):
            return {i: self._rendered(i) for i in answers}
        return found

    def _are_confirmed(self, found: dict[int, LocatedAnswer], chosen: Sequence[int]) -> bool:
        """Whether renderings locate some answers in the same places."""
        try:
            return all(self._rendered(i) == found[i] for i in chosen)
        except RecordError:
            return False

    # ---- by matching an answer of the same kind

    def _kind(self, i: int) -> Hashable:
        """Everything but its words by which a template may write an answer differently."""
        here = self._shapes[i - 1 : i + 2] if i else (None, *self._shapes[:2])
        return (
            i == 0,
            i + 1 == len(self._messages),
            here,
            self._first_question < i,
            *self._follows[i],
        )

    @cached_property
    def _shapes(self) -> tuple[Hashable, ...]:
        return tuple(map(_shape, self._messages))

    @cached_property
    def _first_question(self) -> int:
        roles = [message["role"] for message in self._messages]
        return roles.index("user") if "user" in roles else len(roles)

    @cached_property
    def _follows(self) -> list[tuple[bool, bool]]:
        """Whether a question follows each message, and whether an answer without a call follows
        it.
        """
        follows = []
        question = answer = False
        for message in reversed(self._messages):
            follows.append((question, answer))
            question = question or message["role"] == "user"
            answer = answer or (message["role"] in LEARNED_ROLES and not message.get("tool_calls"))
        return follows[::-1]

    def _pattern(self, i: int, answer: LocatedAnswer) -> _Pattern | None:
        """The text between an answer's marks and its borders; None if no marks enclose it."""
        borders = self._borders(i)
        if borders is None:
            return None
        begin, _, end = borders
        head = None if answer.start is None else answer.start - begin
        tail = None if answer.stop is None else answer.stop - end
        return _Pattern(
            head, self._text_from(begin, head), tail, self._text_from(end, tail), answer
        )

    def _matched(self, pattern: _Pattern, i: int) -> LocatedAnswer | None:
        """Locate answer i by a pattern; None if the text around it is different."""
        borders = self._borders(i)
        if borders is None:
            return None
        begin, words, end = borders
        if self._text_from(begin, pattern.head) != pattern.head_text:
            return None
        if self._text_from(end, pattern.tail) != pattern.tail_text:
            return None
        start = None if pattern.head is None else begin + pattern.head
        stop = None if pattern.tail is None else end + pattern.tail
        if (start is not None and start > words) or (stop is not None and stop < words):
            return None
        return replace(pattern.answer, start=start, stop=stop)

    def _borders(self, i: int) -> tuple[int, int, int] | None:
        """Return where message i, its first value and the next message begin; None unless they are
        in this order.
        """
        begin = self._renderings.begin_of(i)
        words = self._renderings.value_of(i)
        end = self._renderings.begin_of(i + 1)
        if begin is None or words is None or end is None or not begin <= words < end:
            return None
        return begin, words, end

    def _text_from(self, at: int, count: int | None) -> str:
        """Some characters from a place on, or before it where the count is negative."""
        if count is None:
            return ""
        return self._text[min(at, at + count) : max(at, at + count)]

    # ---- by renderings of all messages before it

    def _rendered(self, i: int) -> LocatedAnswer:
        """Locate answer i by renderings of the messages before it. RecordError: it cannot be
        located.
        """
        try:
            return self._rendered_after(i, self._messages)
        except RecordError:
            # The template may write a thought only as long as nothing follows, and drop it here
            # (gpt-oss, Qwen3). The answer is then located after the messages as they are written
            # here.
            written = self._renderings.as_written
            if written[:i] == self._messages[:i]:
                raise
            found = self._rendered_or_none(i, written)
            if found is None:
                raise
            return found

    def _rendered_or_none(self, i: int, messages: list[dict[str, Any]]) -> LocatedAnswer | None:
        try:
            return self._rendered_after(i, messages)
        except RecordError:
            return None

    def _rendered_after(self, i: int, messages: list[dict[str, Any]]) -> LocatedAnswer:
        """LocatedAnswer i after `messages[:i]`."""
        before = messages[:i]
        where = self._paths[i]
        if self._has_blocks:
            prompt = self._renderings.tried(before, True)
            opening = self._opening(i, prompt, before)
            start = None if opening.here is None else len(opening.here)
            return LocatedAnswer(
                start, None, opening.thought, opening.before_answers, opening.opens_thought
            )
        try:
            prompt = self._renderings.render(before, True).text if i else self._opened()
        except RecordError as error:
            told = f"`{where}`: what stands before it cannot be asked alone: {error}"
            raise RecordError(f"{told}; with a `weight` of 0 it is context") from error
        until = self._text
        if i + 1 < len(messages):
            until = self._renderings.render([*before, self._messages[i]]).text
        opening = self._opening(i, prompt, before)
        alone = prompt if opening.alone is None else opening.alone
        here = prompt if opening.here is None else opening.here
        own = until[len(alone) :]
        ends = (
            own,
            re.sub(f"(?:{self._renderings.template.forgeable.pattern})+$", "", own),
        )  # or a whole talk's end
        said = next((each for each in ends if self._text.startswith(here + each)), None)
        if not until.startswith(alone) or said is None:
            raise RecordError(
                f"`{where}`: the chat template writes it, or what stands before it, otherwise than "
                "it asks for it, "
                "or otherwise once more follows; give earlier answers a `weight` of 0, make a record of each, or "
                "take a template with generation blocks"
            )
        if not said and here == prompt:
            raise RecordError(
                f"`{where}`: the chat template adds nothing for it that could be learned"
            )
        return LocatedAnswer(
            len(here),
            len(here) + len(said),
            opening.thought,
            opening.before_answers,
            opening.opens_thought,
        )

    def _opened(self) -> str:
        """The text before an answer that is the first message, up to where a question would have
        asked for it.
        """
        render = self._renderings.render
        begin = render([{**self._messages[0], "content": PLACE}]).text.partition(PLACE)[0]
        opening = render([_ASK], True).text.removeprefix(render([_ASK]).text)
        at = begin.rfind(opening) if opening else -1
        return begin if at < 0 else begin[: at + len(opening)]

    def _opening(self, i: int, prompt: str, before: list[dict[str, Any]]) -> _Opening:
        """The text before the first learned word of answer i; `prompt`: the prompt that asks for
        it, or empty.
        """
        message = self._messages[i]
        if thought_apart(message)[0]:
            return self._opening_of_thought(prompt)
        if self._renderings.template.writes_thoughts or EMPTY_THOUGHT.match(message_words(message)):
            return self._opening_without_thought(i, prompt, before)
        return _Opening("no_thoughts")

    def _opening_of_thought(self, prompt: str) -> _Opening:
        """The prompt; if it asks for no thought and the answer has one all the same, the text
        before the thought.
        """
        bare = _UNASKED.sub("", prompt) + THOUGHT
        is_asked = prompt in ("", self._text[: len(prompt)]) or self._renderings.variables
        if is_asked or not self._text.startswith(bare):
            return _Opening("real_thoughts")
        words = self._text[len(bare) :].lstrip()
        begin = self._text.removesuffix(words)
        return _Opening("real_thoughts", begin, begin)

    def _opening_without_thought(
        self, i: int, prompt: str, before: list[dict[str, Any]]
    ) -> _Opening:
        """The text up to the words of an answer without a thought, if the template writes an empty
        thought there.

        An empty thought is all that the template also writes around a thought, and nothing else.
        """
        wordless, thinking = _without_words(self._messages[i])
        alone = self._last(i, wordless, before).partition(PLACE)[0]
        *around, _ = self._last(i, thinking, before).split(PLACE)
        if len(around) == 1 and solid(prompt) == solid(alone) + THOUGHT:
            # the prompt opens a thought, and the template never writes one (R1's distilled models)
            added = alone.removeprefix(self._renderings.tried(before) or alone)
            return _Opening("empty_thoughts", alone, alone, added, opens_thought=True)
        if len(around) == 2 and solid("".join(around)) == solid(alone):
            return self._opening_after_empty_thought(i, prompt, alone, wordless)
        return _Opening("")

    def _opening_after_empty_thought(
        self, i: int, prompt: str, alone: str, wordless: dict[str, Any]
    ) -> _Opening:
        """The text up to the words of an answer; `alone`: the same, with an empty thought, if
        nothing follows.
        """
        if not self._text.startswith(alone) and self._text.startswith(alone.rstrip()):
            alone = alone.rstrip()  # a blank answer has no words, and its end follows at once
        here = next(
            (each for each in (alone, prompt) if each and self._text.startswith(each)), None
        )
        if here is None:  # an earlier answer has no empty thought, or another one
            here = self._renderings.with_message(i, wordless).partition(PLACE)[0]
        is_asked = prompt.startswith(here)
        is_after_thought = solid(here) == solid(alone)
        if not (here and self._text.startswith(here) and (is_after_thought or is_asked)):
            return _Opening("")
        goes_on = (
            i > 0 and self._messages[i - 1]["role"] in LEARNED_ROLES
        )  # the template may write it differently here
        added = ""
        if prompt and not (is_asked or goes_on):
            added = here[len(os.path.commonprefix((prompt, here))) :]
        return _Opening(
            "empty_thoughts" if is_after_thought or here != prompt else "no_thoughts",
            alone,
            here,
            added,
        )

    def _last(self, i: int, message: dict[str, Any], before: list[dict[str, Any]]) -> str:
        """A rendering that ends with another message i; of all where it cannot be the last, as
        before any question.
        """
        return self._renderings.tried([*before, message]) or self._renderings.with_message(
            i, message
        )


def _without_words(message: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer with PLACE as its words, and the same with PLACE as its thought, written where its
    own would be.
    """
    empty = EMPTY_THOUGHT.match(message_words(message))
    own = empty[0] if empty else ""
    wordless = {**message, "content": own + PLACE}
    thinking = {key: value for key, value in wordless.items() if key not in REASONING}
    if own:
        return wordless, {
            **thinking,
            "content": own.replace(THOUGHT_END, PLACE + THOUGHT_END) + PLACE,
        }
    return wordless, {**thinking, REASONING[0]: PLACE}


def _some_of(answers: Sequence[int]) -> list[int]:
    """Choose the last answer, the last one in the first half before it, in the first quarter, and
    so on.

    The renderings for all of them together are about twice as long as those for the last one.
    """
    chosen = []
    left = sorted(answers)
    while left:
        chosen.append(left[-1])
        left = left[: bisect.bisect_right(left, left[-1] // 2)]
    return chosen[::-1]


def _shape(message: dict[str, Any]) -> Hashable:
    """What a template may ask of a message, but for its words."""
    values = []
    for key, value in sorted(message.items()):
        if key == "role":
            values.append((key, value))
        elif key == "tool_calls" and isinstance(value, list):
            values.append((key, min(len(value), 2)))
        elif isinstance(value, list):
            values.append(
                (key, tuple(part.get("type") if isinstance(part, dict) else "" for part in value))
            )
        else:
            values.append((key, is_blank(value)))
    words = message_words(message)
    edges = words[:1].isspace(), words[-1:].isspace(), words.lstrip()[:1] == "<"
    thoughts = bool(EMPTY_THOUGHT.match(words)), THOUGHT in words, THOUGHT_END in words
    return tuple(values), edges, thoughts
