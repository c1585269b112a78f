"""Renderings of one conversation: unchanged, with marks, and with changed messages.

The cost of a rendering grows with the length of the conversation, so one rendering per message
would be quadratic. Instead, a single rendering with marks shows where each message was written. The
conversation is rendered again only if the marks do not suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from megacp.prepare.records.chat_template import ChatTemplate, Rendering
from megacp.prepare.records.marks import THOUGHT_WORDS, WORDS, MarkedPlace, Marks
from megacp.prepare.records.record import LEARNED_ROLES, RecordError
from megacp.prepare.records.thoughts import is_blank, marked_message, solid, thought_apart


class Renderings:
    """The renderings of one conversation and its variants."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any],
        asks: bool = False,
    ) -> None:
        """Render the messages; `asks` appends the generation prompt.

        Raise RecordError if the template refuses the messages.
        """
        self.template = template
        self.messages = messages
        self.tools = tools
        self.variables = variables
        # every comparison refers to this rendering
        self.whole = self.render(messages, asks)

    @property
    def text(self) -> str:
        """The rendering of the whole conversation."""
        return self.whole.text

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> Rendering:
        """Render different messages. Raise RecordError if the template refuses them."""
        return self.template.render(messages, self.tools, self.variables, prompt)

    def tried(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Render messages; return "" if the template refuses them, such as for a missing key."""
        try:
            return self.render(messages, prompt).text
        except RecordError:
            return ""

    def with_message(self, i: int, message: dict[str, Any]) -> str:
        """Render the conversation with a different message i; return "" if refused."""
        return self.with_messages({i: message})

    def with_messages(self, others: Mapping[int, dict[str, Any]]) -> str:
        """Render the conversation with different messages by number; return "" if refused."""
        return self.tried([others.get(i, message) for i, message in enumerate(self.messages)])

    def without_tools(self) -> str:
        """Render the conversation without tools; return "" if refused."""
        try:
            return self.template.render(self.messages, None, self.variables).text
        except RecordError:
            return ""

    @cached_property
    def begins(self) -> dict[MarkedPlace, int]:
        """The position at which each message and each value begins, as far as marks show it.

        If marks in values change the text, only the marks of turns are used, which are not part of
        any value. If these marks also change the text, the result is empty.
        """
        marks = Marks()
        marked = [marked_message(message, i, marks) for i, message in enumerate(self.messages)]
        # first with marks in all values and turns, then with marks only in turns
        for messages, own in ((marked, marks), (self.messages, Marks())):
            try:
                text, begins = self.template.render_marked(
                    messages, own, self.tools, self.variables
                )
            except RecordError:
                continue
            # without the marks, the text must be the same as in the unmarked rendering
            if text == self.text:
                return begins
        return {}

    def begin_of(self, i: int) -> int | None:
        """Return where the text of message i begins: its turn, or a value that precedes the turn.

        Return None if no mark shows it.
        """
        candidates = (self.begins.get((i, "")), self.value_of(i))
        return min((at for at in candidates if at is not None), default=None)

    def value_of(self, i: int) -> int | None:
        """Return where the first value of message i begins, or None if unknown."""
        return self._first_values.get(i)

    @cached_property
    def _first_values(self) -> dict[int, int]:
        """The position of the first value of each message."""
        first: dict[int, int] = {}
        # an empty key is the turn itself
        for (i, key), at in self.begins.items():
            if key:
                first[i] = min(at, first.get(i, at))
        return first

    def unwritten_thoughts(self, answers: Mapping[int, dict[str, Any]]) -> set[int]:
        """Return the answers whose thought the template omits.

        `answers` are the candidates by number, each without its thought.
        """
        # if the mark of a thought is in the text, the thought has been written
        silent = {}
        for i, message in answers.items():
            if (i, THOUGHT_WORDS) not in self.begins:
                silent[i] = message
        # first one rendering without all of them; only if its text differs, one rendering for each
        if silent and self._is_written_for(silent):
            return {*silent}
        return {i for i, message in silent.items() if self._is_written_for({i: message})}

    def _is_written_for(self, others: Mapping[int, dict[str, Any]]) -> bool:
        """Return whether the text stays the same with different messages, except white space."""
        return solid(self.with_messages(others)) == solid(self.text)

    @cached_property
    def unwritten_contents(self) -> set[int]:
        """Tool calls whose content the template writes only if no answer follows.

        gpt-oss writes the content of a call as a thought, and drops thoughts of earlier answers.
        """
        calls = {}
        for i, message in enumerate(self.messages):
            is_call = message["role"] in LEARNED_ROLES and not is_blank(message.get("tool_calls"))
            if not is_call or is_blank(message.get("content")):
                continue
            # candidates are contents whose mark is not in the text
            if self.begins and (i, WORDS) not in self.begins:
                calls[i] = {**message, "content": ""}
        if not calls or not self._is_written_for(calls):
            return set()
        # the first one must be written if nothing follows it; otherwise its content is always lost
        i, without = next(iter(calls.items()))
        before = self.messages[:i]
        alone = self.tried([*before, self.messages[i]])
        return {*calls} if alone and alone != self.tried([*before, without]) else set()

    @cached_property
    def as_written(self) -> list[dict[str, Any]]:
        """The messages without the parts that the template omits here: thoughts, and contents of
        tool calls.
        """
        answers = {}
        for i, message in enumerate(self.messages):
            thought, thoughtless = thought_apart(message)
            if thought and message["role"] in LEARNED_ROLES:
                answers[i] = thoughtless
        # apply both kinds of omission to copies of the messages
        silent = self.unwritten_thoughts(answers)
        written = [
            answers[i] if i in silent else message for i, message in enumerate(self.messages)
        ]
        for i in self.unwritten_contents:
            written[i] = {**written[i], "content": ""}
        return written
