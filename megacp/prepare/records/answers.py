"""Locate the learned part of each answer in a conversation rendered by a template.

An answer is the text that its message adds to the prompt: the rendering of all earlier messages
with the generation prompt. Rendering a prompt for every answer takes time quadratic in the length
of the conversation. However, answers of one kind (with the same keys, neighbours and surrounding
text) begin and end in the same way. Only one answer of each kind is therefore located by rendering.
The other answers are located by matching the surrounding text at their marks.

A template may still treat an answer differently, for example depending on its number. The last
matched answer and some earlier ones are therefore located in both ways. If the results differ,
every answer of the conversation is located by rendering.
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
"""An empty thought at the end of a prompt; such a prompt asks for an answer without a thought."""
_ASK: dict[str, Any] = {"role": "user", "content": "Why?"}
_MOST_PATTERNS = 32
"""Maximum number of patterns to keep for one kind, for example for different tool names."""


@dataclass(frozen=True)
class LocatedAnswer:
    """Position of an answer's learned part in the text."""

    start: int | None
    """First character; None to start with the generation block."""
    stop: int | None
    """End; None to stop with the generation block."""
    thought: str = ""
    """Kind of thought, a name in THOUGHTS; "" if the answer is not counted."""
    before_answers: str = ""
    """Empty thought, without loss, between the prompt and the answer; as in `Sample`."""
    opens_thought: bool = False
    """Whether the prompt opens a thought although the template never writes one."""


class _Opening(NamedTuple):
    """Text up to the first learned word of an answer."""

    thought: str
    alone: str | None = None
    """Rendering up to that word if the answer is the last message; None if this is the prompt."""
    here: str | None = None
    """Rendering up to that word in the whole conversation; None if this is the prompt."""
    before_answers: str = ""
    opens_thought: bool = False


class _Pattern(NamedTuple):
    """A located answer with the text between its borders and the marks of the messages."""

    head: int | None
    """Characters from the beginning of the turn to the answer's start; None without a start."""
    head_text: str
    tail: int | None
    """Characters from the beginning of the next turn to the answer's stop, negative if the stop is
    earlier; None without a stop.
    """
    tail_text: str
    answer: LocatedAnswer


class AnswerFinder:
    """Locates the learned parts of the answers in one conversation."""

    def __init__(self, renderings: Renderings, paths: Sequence[str], has_blocks: bool) -> None:
        """`paths` identify messages in errors; `has_blocks`: locate only the starts of answers."""
        self._renderings = renderings
        self._paths = paths
        self._has_blocks = has_blocks
        self._messages = renderings.messages
        self._text = renderings.text

    def find(self, answers: Sequence[int]) -> dict[int, LocatedAnswer]:
        """Locate the answers with these message numbers. Raise RecordError for the first answer
        that cannot be located.
        """
        found: dict[int, LocatedAnswer] = {}
        patterns: dict[Hashable, list[_Pattern]] = defaultdict(list)
        matched: list[int] = []
        for i in answers:
            # first try the patterns of earlier answers of this kind, which needs no rendering
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
        """Return whether renderings locate the chosen answers in the same places."""
        try:
            return all(self._rendered(i) == found[i] for i in chosen)
        except RecordError:
            return False

    # ---- by matching an answer of the same kind

    def _kind(self, i: int) -> Hashable:
        """Return all properties, except its words, that may affect how answer i is written."""
        # the message with both of its neighbours; templates often test the next or previous role
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
        """The shape of each message; see `_shape`."""
        return tuple(map(_shape, self._messages))

    @cached_property
    def _first_question(self) -> int:
        """Number of the first user message, or of all messages if there is none."""
        roles = [message["role"] for message in self._messages]
        return roles.index("user") if "user" in roles else len(roles)

    @cached_property
    def _follows(self) -> list[tuple[bool, bool]]:
        """Whether a question, and whether an answer without a call, follows each message."""
        follows = []
        question = False
        answer = False
        for message in reversed(self._messages):
            follows.append((question, answer))
            question = question or message["role"] == "user"
            answer = answer or (message["role"] in LEARNED_ROLES and not message.get("tool_calls"))
        return follows[::-1]

    def _pattern(self, i: int, answer: LocatedAnswer) -> _Pattern | None:
        """Return the pattern of a located answer; None if no marks enclose it."""
        # positions relative to the marks hold for every answer of this kind
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
        """Locate answer i with a pattern; return None if the surrounding text differs."""
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
        # the words must be inside the range; otherwise the marks are not where the answer is
        if (start is not None and start > words) or (stop is not None and stop < words):
            return None
        return replace(pattern.answer, start=start, stop=stop)

    def _borders(self, i: int) -> tuple[int, int, int] | None:
        """Return the positions of message i, its first value and the next message.

        Return None if a position is unknown or if they are not in this order.
        """
        begin = self._renderings.begin_of(i)
        words = self._renderings.value_of(i)
        end = self._renderings.begin_of(i + 1)
        if begin is None or words is None or end is None or not begin <= words < end:
            return None
        return begin, words, end

    def _text_from(self, at: int, count: int | None) -> str:
        """Return `count` characters that start at a position, or end there if it is negative."""
        if count is None:
            return ""
        return self._text[min(at, at + count) : max(at, at + count)]

    # ---- by rendering all messages before it

    def _rendered(self, i: int) -> LocatedAnswer:
        """Locate answer i by rendering the earlier messages. Raise RecordError if that fails."""
        try:
            return self._rendered_after(i, self._messages)
        except RecordError:
            # Some templates (gpt-oss, Qwen3) write a thought only while no message follows. Retry
            # with the earlier messages in the form that they have in this conversation.
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
        """Locate answer i after `messages[:i]`. Raise RecordError if the renderings disagree."""
        before = messages[:i]
        where = self._paths[i]
        # a generation block ends the answer, so find only its first learned word
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
            raise RecordError(
                f"`{where}`: the chat template cannot render the preceding messages as a prompt: "
                f"{error}; give this answer a `weight` of 0 to use it as context"
            ) from error
        # `until` is the text with the answer as the last message
        until = self._text
        if i + 1 < len(messages):
            until = self._renderings.render([*before, self._messages[i]]).text
        opening = self._opening(i, prompt, before)
        alone = prompt if opening.alone is None else opening.alone
        here = prompt if opening.here is None else opening.here
        # the answer as the last message, with and without the special tokens that end the text
        # (the second form is needed where the template ends only the last turn with them)
        own = until[len(alone) :]
        without_end = re.sub(f"(?:{self._renderings.template.forgeable.pattern})+$", "", own)
        ends = (own, without_end)
        said = next((each for each in ends if self._text.startswith(here + each)), None)
        if not until.startswith(alone) or said is None:
            raise RecordError(
                f"`{where}`: the chat template renders this answer or its context differently in "
                "the prompt, or once later messages follow; give earlier answers a `weight` of 0, "
                "make each answer a separate record, or use a template with generation blocks"
            )
        if not said and here == prompt:
            raise RecordError(
                f"`{where}`: the chat template writes no learnable text for this answer"
            )
        return LocatedAnswer(
            len(here),
            len(here) + len(said),
            opening.thought,
            opening.before_answers,
            opening.opens_thought,
        )

    def _opened(self) -> str:
        """Return the prompt for an answer that is the first message."""
        # no question precedes the answer, so get the generation prompt from another conversation
        render = self._renderings.render
        begin = render([{**self._messages[0], "content": PLACE}]).text.partition(PLACE)[0]
        opening = render([_ASK], True).text.removeprefix(render([_ASK]).text)
        at = begin.rfind(opening) if opening else -1
        return begin if at < 0 else begin[: at + len(opening)]

    def _opening(self, i: int, prompt: str, before: list[dict[str, Any]]) -> _Opening:
        """Return the text up to the first learned word of answer i; `prompt` may be empty."""
        message = self._messages[i]
        if thought_apart(message)[0]:
            return self._opening_of_thought(prompt)
        if self._renderings.template.writes_thoughts or EMPTY_THOUGHT.match(message_words(message)):
            return self._opening_without_thought(i, prompt, before)
        return _Opening("no_thoughts")

    def _opening_of_thought(self, prompt: str) -> _Opening:
        """Return the opening of an answer with a thought.

        It is the prompt, or the text before the thought if the prompt asks for an answer without a
        thought.
        """
        bare = _UNASKED.sub("", prompt) + THOUGHT
        is_asked = prompt in ("", self._text[: len(prompt)]) or self._renderings.variables
        if is_asked or not self._text.startswith(bare):
            return _Opening("real_thoughts")
        # the answer has a thought although the prompt asks for none: the loss starts after its tag
        words = self._text[len(bare) :].lstrip()
        begin = self._text.removesuffix(words)
        return _Opening("real_thoughts", begin, begin)

    def _opening_without_thought(
        self, i: int, prompt: str, before: list[dict[str, Any]]
    ) -> _Opening:
        """Return the opening of an answer without a thought.

        The loss starts at the words if the template writes an empty thought before them. A thought
        is empty if it consists only of the text that the template also writes around a real one.
        """
        wordless, thinking = _without_words(self._messages[i])
        alone = self._last(i, wordless, before).partition(PLACE)[0]
        # if the template writes thoughts, PLACE appears twice: as the thought and as the words
        *around, _ = self._last(i, thinking, before).split(PLACE)
        if len(around) == 1 and solid(prompt) == solid(alone) + THOUGHT:
            # The prompt opens a thought, but the template never writes one (distilled R1 models).
            # Everything that this answer adds before its words is context.
            added = alone.removeprefix(self._renderings.tried(before) or alone)
            return _Opening("empty_thoughts", alone, alone, added, opens_thought=True)
        if len(around) == 2 and solid("".join(around)) == solid(alone):
            return self._opening_after_empty_thought(i, prompt, alone, wordless)
        return _Opening("")

    def _opening_after_empty_thought(
        self, i: int, prompt: str, alone: str, wordless: dict[str, Any]
    ) -> _Opening:
        """Return the opening of an answer for which the template writes an empty thought.

        `alone` is the text up to the words of the answer, including the empty thought, as rendered
        if the answer is the last message.
        """
        # a white-space answer has no words: its end directly follows the thought
        if not self._text.startswith(alone) and self._text.startswith(alone.rstrip()):
            alone = alone.rstrip()
        candidates = (alone, prompt)
        here = next((each for each in candidates if each and self._text.startswith(each)), None)
        # an earlier answer may have no empty thought, or a different one
        if here is None:
            here = self._renderings.with_message(i, wordless).partition(PLACE)[0]
        is_asked = prompt.startswith(here)
        is_after_thought = solid(here) == solid(alone)
        if not (here and self._text.startswith(here) and (is_after_thought or is_asked)):
            return _Opening("")
        # right after another answer, the template may write the empty thought differently, so this
        # place does not show how prompts end
        goes_on = i > 0 and self._messages[i - 1]["role"] in LEARNED_ROLES
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
        """Render `before`, followed by a replacement for message i.

        If the message cannot be the last one, for example before any question, render all messages.
        """
        return self._renderings.tried([*before, message]) or self._renderings.with_message(
            i, message
        )


def _without_words(message: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an answer with PLACE as its words, and the same with PLACE also as its thought.

    The thought is in the same place as the thought of the given answer, if it has one.
    """
    # an empty thought in the content stays there, with PLACE inside it
    empty = EMPTY_THOUGHT.match(message_words(message))
    own = empty[0] if empty else ""
    wordless = {**message, "content": own + PLACE}
    thinking = {key: value for key, value in wordless.items() if key not in REASONING}
    if own:
        thinking["content"] = own.replace(THOUGHT_END, PLACE + THOUGHT_END) + PLACE
    else:
        thinking[REASONING[0]] = PLACE
    return wordless, thinking


def _some_of(answers: Sequence[int]) -> list[int]:
    """Choose answers to confirm: the last one, then repeatedly the last one in the first half.

    Rendering all chosen answers costs about twice as much as rendering the last one.
    """
    # positions halve each time, so the costs form a geometric series
    chosen = []
    left = sorted(answers)
    while left:
        chosen.append(left[-1])
        left = left[: bisect.bisect_right(left, left[-1] // 2)]
    return chosen[::-1]


def _shape(message: dict[str, Any]) -> Hashable:
    """Return the properties of a message, except its words, that a template may test."""
    values = []
    for key, value in sorted(message.items()):
        if key == "role":
            values.append((key, value))
        elif key == "tool_calls" and isinstance(value, list):
            # templates distinguish one call from several
            values.append((key, min(len(value), 2)))
        elif isinstance(value, list):
            types = tuple(part.get("type") if isinstance(part, dict) else "" for part in value)
            values.append((key, types))
        else:
            values.append((key, is_blank(value)))
    # templates strip white space, and look for thoughts in the content
    words = message_words(message)
    edges = (words[:1].isspace(), words[-1:].isspace(), words.lstrip()[:1] == "<")
    thoughts = (bool(EMPTY_THOUGHT.match(words)), THOUGHT in words, THOUGHT_END in words)
    return tuple(values), edges, thoughts
