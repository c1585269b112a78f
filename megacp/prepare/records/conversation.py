"""A record's messages as a chat template writes them, with the loss weight of every character.

Key property: nothing is lost or learned in silence. Where a template has `{% generation %}` blocks, these are learned.
Elsewhere an answer is what its message adds to the rendering of all before it with the generation prompt. Both
renderings must begin the whole one. What a record says must be in the text, and no text may spell a special token.

A value is followed through the template by a mark behind it, in one rendering for all values. Only those whose mark
does not come out are tried alone: a value that changes nothing would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megacp.prepare.records.chat_template import REASONING, RESERVED, ChatTemplate, Rendering, mark
from megacp.prepare.records.messages import Talk, message_weight, role_of
from megacp.prepare.records.parts import MEDIA_TYPES, Media, Rendered, SamplePart, media_at
from megacp.prepare.records.record import RecordError, described, text_at
from megacp.prepare.records.record_keys import LEARNED_ROLES, RecordRules

_LINKS = ("role", "type", "id", "index", "tool_call_id")
"""Keys that say what stands there or what belongs together: a template need not write them."""
_WRITTEN_AS_THEY_ARE = ("system", "developer", "user")
"""Roles whose contents a template writes word by word; it may put what a tool says into JSON."""
_LONGEST = 60
"""Characters of a text that a message shows."""


@dataclass(frozen=True)
class _Leaf:
    """A value that a template is given, and the message that it stands in; None for those of tools."""

    path: str
    message: int | None


class WrittenTalk:
    """The messages of one record for one template. RecordError, from any method, says what is wrong with them."""

    def __init__(self, talk: Talk, template: ChatTemplate, rules: RecordRules) -> None:
        self._talk, self._template, self._rules = talk, template, rules
        self._media: list[tuple[int, int, Media]] = []  # message, part
        self._weights: list[float] = []
        self._messages = [self._given(i) for i in range(len(talk.messages))]
        if unknown := sorted(talk.variables.keys() - template.variables(talk.tools)):
            raise RecordError(f"`chat_template_kwargs.{unknown[0]}`: the chat template reads no such variable")
        self._refuse_forged()
        self._whole = self._render(self._messages)
        if not self.text:
            raise RecordError("the chat template writes nothing for this record")
        self._refuse_python()
        self._leaves, self._marked = self._followed()
        self._refuse_lost()
        for i, message in enumerate(self._messages):
            if message["role"] in _WRITTEN_AS_THEY_ARE:
                self._refuse_unsaid(i, "content", self.text)
        self._learned = self._generated() if template.has_generation(talk.tools) else self._answers()
        self._places = [self._place(i, j, media) for i, j, media in self._media]

    @property
    def text(self) -> str:
        """All of it."""
        return self._whole.text

    def pieces(self, shared: WrittenTalk | None = None, weight: float = 1.0) -> tuple[SamplePart, ...]:
        """The rendering and its images. With `shared`, which it goes on: with what it adds, and its weight."""
        start = 0 if shared is None else len(shared.text)
        learned = [(a, b, w if b <= start else w * weight) for a, b, w in self._learned]
        if shared is not None:
            before = [span for span in learned if span[0] < start]
            places = [place for place in self._places if place[0] < start]
            same = self.text.startswith(shared.text) and before == shared._learned and places == shared._places
            if not same:
                raise RecordError(
                    "the chat template writes the shared messages otherwise once a branch follows; make a record of "
                    "each branch"
                )
        own = [i for i, place in enumerate(self._places) if place[0] >= start]
        rendered = Rendered(self.text, 0.0, None, tuple(learned), tuple(self._places[i] for i in own), start)
        return (rendered, *(SamplePart(None, 0.0, self._media[i][2]) for i in own))

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False, tools: Any = None) -> Rendering:
        talk = self._talk
        return self._template.render(messages, tools or talk.tools, talk.variables, prompt)

    def _given(self, i: int) -> dict[str, Any]:
        """Message i as the template gets it; its weight and its images are entered."""
        message, where, ignored = self._talk.messages[i], self._talk.paths[i], self._rules.accepted.ignore_keys
        role = role_of(message, where, self._rules)
        self._weights.append(message_weight(message, role, where, self._rules))
        given = {k: v for k, v in message.items() if v is not None and k != "weight" and k not in ignored}
        if not any(given[key] not in ([], {}) for key in given.keys() - {*_LINKS}):
            raise RecordError(f"`{where}` says nothing: it has no `content`")
        content = given.get("content", "")
        if isinstance(content, list) and content:
            given["content"] = [self._part(i, j, part) for j, part in enumerate(content)]
        elif not isinstance(content, str):
            raise RecordError(f"`{where}.content` is {described(content)}, it must be a string or a list of parts")
        return given

    def _part(self, i: int, j: int, part: Any) -> dict[str, Any]:
        where = f"{self._talk.paths[i]}.content[{j}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA_TYPES:
            media = media_at(part, kind, where, self._rules)
            if kind == "video":
                raise RecordError(
                    f"`{where}`: a video has no one place in a chat template, as times stand between its frames; give "
                    "frames as images, or build without --chat-template"
                )
            self._media.append((i, j, media))
            return {"type": kind, kind: kind}
        if kind != "text":
            allowed = f"text (or {', '.join(MEDIA_TYPES)})"
            raise RecordError(f"`{where}` must be an object with `type` {allowed}, found {described(part)}")
        self._rules.refuse_lost(part, ("type", "text"), f"`{where}`")
        return {"type": "text", "text": text_at(part.get("text"), f"{where}.text")}

    def _refuse_forged(self) -> None:
        """A special token in a text would end a turn or begin one."""
        forgeable = self._template.forgeable
        values = zip(self._talk.paths, self._messages, strict=True)
        for path, value in (*values, ("tools", self._talk.tools), ("chat_template_kwargs", self._talk.variables)):
            for text in _texts(value):
                if found := forgeable.search(text):
                    raise RecordError(
                        f"a text of `{path}` spells the special token {found[0]!r}, which only the template may write"
                    )
                if any(character in text for character in RESERVED):
                    raise RecordError(f"a text of `{path}` holds one of U+FDD0 to U+FDD3, which are no characters")

    def _refuse_python(self) -> None:
        """A template for strings writes a list of parts as Python shows it."""
        for message, where in zip(self._messages, self._talk.paths, strict=True):
            content = message.get("content")
            if isinstance(content, list) and str(content) in self.text:
                raise RecordError(
                    f"`{where}.content` is a list of parts, which this chat template does not read: give a string"
                )

    def _with_marks(self, only: int | None = None) -> tuple[list[_Leaf], list[dict[str, Any]], Any]:
        """The values that are followed; messages and tools with a mark behind each, or behind one."""
        leaves: list[_Leaf] = []
        ignored = {*_LINKS, *self._rules.accepted.ignore_keys}

        def marked(value: Any, path: str, message: int | None) -> Any:
            if isinstance(value, dict):
                return {k: v if k in ignored else marked(v, f"{path}.{k}", message) for k, v in value.items()}
            if isinstance(value, list):
                return [marked(each, f"{path}[{i}]", message) for i, each in enumerate(value)]
            if value is None or (isinstance(value, str) and not value.strip()):
                return value
            leaves.append(_Leaf(path, message))
            if only not in (None, len(leaves) - 1):
                return value
            return (value if isinstance(value, str) else "") + mark(len(leaves) - 1)

        places = {(i, j) for i, j, _ in self._media}
        messages = []
        for i, (message, where) in enumerate(zip(self._messages, self._talk.paths, strict=True)):
            new = marked({key: value for key, value in message.items() if key != "content"}, where, i)
            content = message.get("content")
            if isinstance(content, list):
                new["content"] = [
                    part if (i, j) in places else marked(part, f"{where}.content[{j}]", i)
                    for j, part in enumerate(content)
                ]
            elif content is not None:
                new["content"] = marked(content, f"{where}.content", i)
            messages.append({key: new[key] for key in message})
        return leaves, messages, marked(self._talk.tools, "tools", None)

    def _followed(self) -> tuple[list[_Leaf], Rendering]:
        """The values, and the rendering with a mark behind each; an empty one where the template cannot have them."""
        leaves, messages, tools = self._with_marks()
        try:
            return leaves, self._render(messages, tools=tools)
        except RecordError:
            return leaves, Rendering("")

    def _refuse_lost(self) -> None:
        for number, leaf in enumerate(self._leaves):
            if mark(number) in self._marked.text or self._is_left_out_by_rule(leaf):
                continue
            _, messages, tools = self._with_marks(number)
            try:
                alone = self._render(messages, tools=tools)
            except RecordError:  # it is read
                continue
            if alone.text == self.text:
                key = re.split(r"[.\[]", leaf.path.removeprefix(self._path_of(leaf)).lstrip(".["))[0]
                also = "" if key == "content" else f"; --ignore-keys {key or leaf.path.split('.')[-1]} leaves it out"
                raise RecordError(f"`{leaf.path}` would be lost: the chat template does not write it{also}")

    def _path_of(self, leaf: _Leaf) -> str:
        return "tools" if leaf.message is None else self._talk.paths[leaf.message]

    def _is_left_out_by_rule(self, leaf: _Leaf) -> bool:
        """Whether it is what was thought before an answer that is not learned, by a template that knows thoughts."""
        key = leaf.path.removeprefix(self._path_of(leaf)).lstrip(".")
        if leaf.message is None or self._weights[leaf.message] or key not in REASONING:
            return False
        return any(name in self._template.text_for(self._talk.tools) for name in REASONING)

    def _answering(self) -> list[int]:
        """The messages of an assistant."""
        return [i for i, message in enumerate(self._messages) if message["role"] in LEARNED_ROLES]

    def _answers(self) -> list[tuple[int, int, float]]:
        """What each learned message adds to the rendering of those before it."""
        learned = []
        for i in self._answering():
            if not self._weights[i]:
                continue
            where = self._talk.paths[i]
            try:
                before = self._render(self._messages[:i], prompt=True).text
            except RecordError as error:
                raise RecordError(f"`{where}`: what stands before it cannot be asked alone: {error}") from error
            until = self.text if i + 1 == len(self._messages) else self._render(self._messages[: i + 1]).text
            if not self.text.startswith(until):  # some templates end a whole conversation with a token of its own
                until = self._template.without_last_tokens(until)
            if not self.text.startswith(before) or not self.text.startswith(until):
                raise RecordError(
                    f"`{where}`: the chat template writes it, or what stands before it, otherwise once more follows; "
                    "give earlier answers a `weight` of 0, make a record of each, or take a template with generation "
                    "blocks"
                )
            said = self.text[len(before) : len(until)]
            if not said:
                raise RecordError(f"`{where}`: the chat template adds nothing for it that could be learned")
            for key in ("content", *REASONING):
                self._refuse_unsaid(i, key, said)
            learned.append((len(before), len(until), self._weights[i]))
        return learned

    def _generated(self) -> list[tuple[int, int, float]]:
        """The generation blocks, with the weights of their messages."""
        blocks, answering = self._whole.generated, self._answering()
        inside = "".join(self._marked.text[a:b] for a, b in self._marked.generated)
        learned = {leaf.message for n, leaf in enumerate(self._leaves) if mark(n) in inside}
        if foreign := [i for i in learned if i not in answering]:
            path = "tools" if foreign[0] is None else self._talk.paths[foreign[0]]
            raise RecordError(f"`{path}` stands in a generation block of the chat template, and no assistant says it")
        place = 0
        said = "".join(self.text[a:b] for a, b in blocks)
        for i in answering:
            where = self._talk.paths[i]
            if self._weights[i] and i not in learned and any(leaf.message == i for leaf in self._leaves):
                raise RecordError(f"`{where}` stands in no generation block of the chat template: it is not learned")
            if self._weights[i]:
                place = self._refuse_unsaid(i, "content", said, place)
        weights = [self._weights[i] for i in answering]
        if len({*weights}) > 1 and len(blocks) != len(weights):
            raise RecordError(
                f"messages have different weights, and {len(weights)} answers have {len(blocks)} generation blocks: "
                "which belong together cannot be told"
            )
        weights = weights if len(blocks) == len(weights) else weights[:1] * len(blocks)
        return [(a, b, w) for (a, b), w in zip(blocks, weights, strict=True) if w]

    def _refuse_unsaid(self, i: int, key: str, said: str, place: int = 0) -> int:
        """RecordError unless the words of a value stand in `said`, in order from `place` on; where they end."""
        value = self._messages[i].get(key)
        parts = value if isinstance(value, list) else [{"text": value}]
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        for word in " ".join(texts).split():
            found = said.find(word, place)
            if found < 0:
                shown = word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
                raise RecordError(
                    f"`{self._talk.paths[i]}.{key}`: {shown!r} would be lost: the chat template does not write it here"
                )
            place = found + len(word)
        return place

    def _place(self, i: int, j: int, media: Media) -> tuple[int, int]:
        """The characters that stand for an image: what a text in its place takes the place of."""
        message = self._messages[i]
        parts = [*message["content"][:j], {"type": "text", "text": mark(0)}, *message["content"][j + 1 :]]
        other = self._render([*self._messages[:i], {**message, "content": parts}, *self._messages[i + 1 :]]).text
        before, found, after = other.partition(mark(0))
        start, stop = len(before), len(self.text) - len(after)
        if not (found and start <= stop and self.text.startswith(before) and self.text.endswith(after)):
            raise RecordError(f"`{media.key}`: what the chat template writes for it cannot be told from the rest")
        written = self.text[start:stop]
        if not self._template.is_added(written.strip()):
            raise RecordError(
                f"`{media.key}`: the chat template writes {written[:_LONGEST]!r} for it, and an image needs a place "
                "of special tokens alone; take a template that writes one, or build without --chat-template"
            )
        start += len(written) - len(written.lstrip())
        return start, start + len(written.strip())


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
