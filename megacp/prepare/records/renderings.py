"""Renderings of one conversation: as it is, with marks, and with something changed.

A rendering costs as much as the conversation is long. A question about each message is therefore
answered by the marks, which one rendering places for all of them. Only where they do not answer it
is the conversation rendered again.
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
    """Renderings of one conversation and of its variants."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any],
        asks: bool = False,
    ) -> None:
        """`asks`: whether an assistant's header follows. RecordError: the template refuses the
        messages.
        """
        self.template = template
        self.messages = messages
        self.tools = tools
        self.variables = variables
        self.whole = self.render(messages, asks)

    @property
    def text(self) -> str:
        """The whole conversation."""
        return self.whole.text

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> Rendering:
        """Render other messages. RecordError: the template refuses them."""
        return self.template.render(messages, self.tools, self.variables, prompt)

    def tried(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The text of messages; empty where the template refuses them, as where what is missing is
        read.
        """
        try:
            return self.render(messages, prompt).text
        except RecordError:
            return ""

    def with_message(self, i: int, message: dict[str, Any]) -> str:
        """The text with another message i; empty where the template refuses it."""
        return self.with_messages({i: message})

    def with_messages(self, others: Mapping[int, dict[str, Any]]) -> str:
        """The text with other messages, by number; empty where the template refuses them."""
        return self.tried([others.get(i, message) for i, message in enumerate(self.messages)])

    def without_tools(self) -> str:
        """The text without tools; empty where the template refuses that."""
        try:
            return self.template.render(self.messages, None, self.variables).text
        except RecordError:
            return ""

    @cached_property
    def begins(self) -> dict[MarkedPlace, int]:
        """The character at which each message and each of its values begins, as far as marks show
        it.

        If the template writes something else for values with marks, only the marks of turns are
        used, which are not part of any value. If these also change the text, there are none.
        """
        marks = Marks()
        marked = [marked_message(message, i, marks) for i, message in enumerate(self.messages)]
        for messages, own in ((marked, marks), (self.messages, Marks())):
            try:
                text, begins = self.template.render_marked(
                    messages, own, self.tools, self.variables
                )
            except RecordError:
                continue
            if text == self.text:
                return begins
        return {}

    def begin_of(self, i: int) -> int | None:
        """Where the text of message i begins: its turn, or the first of its values that is written
        before that.
        """
        return min(
            (at for at in (self.begins.get((i, "")), self.value_of(i)) if at is not None),
            default=None,
        )

    def value_of(self, i: int) -> int | None:
        """Where the first value of message i begins."""
        return self._first_values.get(i)

    @cached_property
    def _first_values(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for (i, key), at in self.begins.items():
            if key:
                first[i] = min(at, first.get(i, at))
        return first

    def unwritten_thoughts(self, answers: Mapping[int, dict[str, Any]]) -> set[int]:
        """The answers whose thoughts the template leaves out; `answers`: each of some without its
        thought.
        """
        silent = {
            i: message for i, message in answers.items() if (i, THOUGHT_WORDS) not in self.begins
        }
        if silent and self._is_written_for(silent):
            return {*silent}
        return {i for i, message in silent.items() if self._is_written_for({i: message})}

    def _is_written_for(self, others: Mapping[int, dict[str, Any]]) -> bool:
        """Whether other messages have this text, whatever their blanks."""
        return solid(self.with_messages(others)) == solid(self.text)

    @cached_property
    def unwritten_contents(self) -> set[int]:
        """Calls whose contents the template writes only while no answer follows, as gpt-oss' does:
        as a thought.
        """
        calls = {}
        for i, message in enumerate(self.messages):
            is_call = message["role"] in LEARNED_ROLES and not is_blank(message.get("tool_calls"))
            if (
                is_call
                and not is_blank(message.get("content"))
                and self.begins
                and (i, WORDS) not in self.begins
            ):
                calls[i] = {**message, "content": ""}
        if not calls or not self._is_written_for(calls):
            return set()
        i, without = next(iter(calls.items()))
        before = self.messages[:i]
        alone = self.tried([*before, self.messages[i]])
        return {*calls} if alone and alone != self.tried([*before, without]) else set()

    @cached_property
    def as_written(self) -> list[dict[str, Any]]:
        """The messages without what the template leaves out here: thoughts of earlier answers,
        contents of calls.
        """
        answers = {}
        for i, message in enumerate(self.messages):
            thought, thoughtless = thought_apart(message)
            if thought and message["role"] in LEARNED_ROLES:
                answers[i] = thoughtless
        silent = self.unwritten_thoughts(answers)
        written = [
            answers[i] if i in silent else message for i, message in enumerate(self.messages)
        ]
        for i in self.unwritten_contents:
            written[i] = {**written[i], "content": ""}
        return written
