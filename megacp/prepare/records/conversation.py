"""Render a record's messages with a chat template and find the loss weight of every character.

If a template has `{% generation %}` blocks, their text is learned. Otherwise an answer is the text
that its message adds to the prompt: the rendering of all earlier messages with the generation
prompt. Both the prompt and the answer must reappear unchanged in the rendering of the whole
conversation. The token that ends an answer is learned with it, even if the template writes that
token only at the beginning of the next turn, or omits it after the last answer. Every value of a
record must appear in the text, and no text may contain a special token.

Some templates drop the thoughts of earlier answers. Such an answer becomes context without loss,
because its author would not have given it without the thought. If an answer has no thought and the
template writes an empty one, the loss starts at the first word of the answer; otherwise the model
would learn to write empty thoughts.
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
"""Roles whose content every template writes word for word; tool results may be converted to
JSON.
"""
_LONGEST = 60
"""Characters of a quoted text in an error message."""


class WrittenTalk:
    """The messages of one record, rendered by one template. Every method may raise RecordError."""

    def __init__(
        self, talk: Talk, template: ChatTemplate, rules: RecordRules, goes_on: bool = False
    ) -> None:
        """`goes_on`: branches follow, so only the first token of the next turn can end the text."""
        self._goes_on = goes_on
        self._talk = talk
        self._template = template
        self._rules = rules
        self._media: list[tuple[int, int, Media]] = []  # (message, content part, media)
        self._weights: list[float] = []  # loss weight of each message
        # as the fields of `Sample` with the same names
        self.answers = Counter[str]()
        self.before_answers = ""
        self._messages = [self._given(i) for i in range(len(talk.messages))]

        # a prompt for generation: the last assistant message is the expected answer
        self._expected: str | None = None
        if rules.asks and self._messages[-1]["role"] in LEARNED_ROLES:
            self._expected = message_words(self._messages.pop())
            self._media = [each for each in self._media if each[0] < len(self._messages)]
        if unknown := [name for name in talk.variables if name not in template.text]:
            raise RecordError(
                f"`chat_template_kwargs.{unknown[0]}`: the chat template does not use this variable"
            )
        values = (
            *zip(talk.paths, self._messages, strict=not rules.asks),
            ("tools", talk.tools),
            ("variables", talk.variables),
        )
        # a special token in a text would end a turn or begin a new one
        for path, value in values:
            matches = map(template.forgeable.search, _texts(value))
            found = next(filter(None, matches), None)
            if found:
                raise RecordError(
                    f"a text of `{path}` contains the special token {found[0]!r}, which only the "
                    "chat template may write"
                )
        self._renderings = Renderings(
            template, self._messages, talk.tools, talk.variables, rules.asks
        )
        self._closing = ""
        """Token that ends the last answer, if the template writes none."""
        if not self._renderings.text:
            raise RecordError("the chat template renders this record as an empty text")
        self.learned: list[tuple[int, int, float]] = []
        """Ranges of characters (start, stop) with their loss weight, in order."""
        if not rules.asks:
            self._refuse_lost()
            self.learned = (
                self._generated() if GENERATION_BLOCK.search(template.text) else self._answers()
            )
        self._places = self._find_places()

    @property
    def text(self) -> str:
        """The rendering, with the token that ends the last answer."""
        return self._renderings.text + self._closing

    def pieces(
        self, shared: WrittenTalk | None = None, weight: float = 1.0
    ) -> tuple[SamplePart, ...]:
        """Return the rendering and its media as parts of a sample.

        `shared` is the beginning that this branch continues; only the text after it is multiplied
        by `weight`. For a prompt, the expected answer follows as a separate part.
        """
        # the branch must repeat the shared text exactly: both are stored as one tree of tokens
        start = 0 if shared is None else len(shared.text)
        if shared is not None:
            same_learned = [span for span in self.learned if span[0] < start] == shared.learned
            same_places = [place for place in self._places if place[0] < start] == shared._places
            if not (self.text.startswith(shared.text) and same_learned and same_places):
                raise RecordError(
                    "the chat template renders the shared messages differently once a branch "
                    "follows; make each branch a separate record"
                )
        learned = tuple((a, b, w if b <= start else w * weight) for a, b, w in self.learned)
        rendered = Rendered(self.text, 0.0, None, learned, tuple(self._places))
        media_parts = [SamplePart(None, 0.0, media) for *_, media in self._media]
        expected = [SamplePart(self._expected, 1.0)] if self._expected else []
        return (rendered, *media_parts, *expected)

    def _given(self, i: int) -> dict[str, Any]:
        """Return message i in the form that the template gets; record its weight and its media."""
        message = self._talk.messages[i]
        where = self._talk.paths[i]
        ignored = self._rules.ignore_keys
        _, weight = role_and_weight(message, where, self._rules)
        self._weights.append(weight)
        given = {
            k: v for k, v in message.items() if v is not None and k != "weight" and k not in ignored
        }
        if "tool_calls" in given:
            calls = objects_at(given["tool_calls"], f"{where}.tool_calls")
            takes = self._template.takes_objects
            given["tool_calls"] = [
                with_object(call, "arguments") if takes else call for call in calls
            ]
        if all(given[key] in ([], {}) for key in given.keys() - {*LINK_KEYS}):
            raise RecordError(f"`{where}` is empty: it has no `content`")
        # "developer" is OpenAI's newer name for the system role; most templates do not support it
        if given["role"] == "developer" and "developer" not in self._template.text:
            given["role"] = "system"
        content = given.get("content", "")
        if isinstance(content, list) and content:
            given["content"] = [self._part(i, j, part) for j, part in enumerate(content)]
            # if the template does not support lists, join the texts
            if not self._template.takes_parts:
                if any("text" not in part for part in given["content"]):
                    raise RecordError(
                        f"`{where}.content` is a list with images, but this chat template accepts "
                        "only text: use a template with image support, or --chat-template ignore"
                    )
                given["content"] = "".join(part["text"] for part in given["content"])
        elif not isinstance(content, str):
            raise RecordError(
                f"`{where}.content` is {described(content)}, but it must be a string or a list of "
                "parts"
            )
        return given

    def _part(self, i: int, j: int, part: Any) -> dict[str, Any]:
        """Return part j of message i's content for the template; record its image or video."""
        where = f"{self._talk.paths[i]}.content[{j}]"
        kind = kind_of(part, where)
        if kind == "text":
            return {"type": "text", "text": text_of(part, where, self._rules)}
        # a template needs only the kind: the image itself is encoded separately
        self._media.append((i, j, media_at(part, kind, where, self._rules)))
        return {"type": kind, kind: kind}

    def _refuse_lost(self) -> None:
        """Raise RecordError if the template omits a value of a message, or the tools.

        If a template supports thoughts but omits the thought of an answer, that answer becomes
        context.
        """
        left_out = self._left_out
        # first decide which answers become context, then check every value of the message
        for i, where in enumerate(self._talk.paths):
            if i in left_out:
                # templates may drop thoughts of earlier answers, but not the last one
                if i + 1 == len(self._messages):
                    key = next((key for key in REASONING if key in self._messages[i]), "content")
                    raise RecordError(
                        f"`{where}.{key}`: the chat template omits the last thought; use a "
                        "template that writes it, with --chat-template FILE.jinja"
                    )
                self._leave_as_context(i)
            elif i in self._renderings.unwritten_contents:
                self._leave_as_context(i)
            elif self._is_taken_for_words(i):
                raise RecordError(
                    f"`{where}.content`: the chat template does not recognise the thought in this "
                    f"text; move it to `{REASONING[0]}`"
                )
            for key in self._messages[i]:
                if key not in LINK_KEYS:
                    self._refuse_lost_key(i, key)
        # a template may write tools anywhere, so the test is whether they change the text
        if self._talk.tools and self._renderings.without_tools() == self._renderings.text:
            raise RecordError(_would_be_lost("tools", "tools"))

    def _leave_as_context(self, i: int) -> None:
        """Set the loss weight of answer i to 0, because the template omits a part of it."""
        if self._weights[i]:
            self.answers["in_context"] += 1
        self._weights[i] = 0.0

    def _refuse_lost_key(self, i: int, key: str) -> None:
        """Raise RecordError if the template omits the value at a key of message i."""
        message = self._messages[i]
        where = f"{self._talk.paths[i]}.{key}"
        writes_thoughts = self._template.writes_thoughts
        if key == "content" and message["role"] in _WRITTEN_AS_THEY_ARE:
            self._refuse_unwritten_words(i)
            return
        if key in REASONING and not (is_blank(message[key]) or writes_thoughts):
            raise RecordError(
                f"`{where}`: the chat template does not write thoughts; use one that does, such as "
                "--chat-template qwen3"
            )
        # thoughts of context may be omitted; a tool result needs no name after the call itself
        if key in REASONING and writes_thoughts and not self._weights[i]:
            return
        if key == "name" and message["role"] == "tool":
            return
        # _answers checks the words of a learned answer; _refuse_lost has handled omitted contents
        if key == "content":
            if self._weights[i] > 0 or i in self._renderings.unwritten_contents:
                return
        place = (i, THOUGHT_WORDS if key in REASONING else key)
        if is_blank(message[key]) or place in self._renderings.begins:
            return
        # The mark of the value is not in the text. It may still be written in another form, so the
        # test is whether the text changes without it.
        without = {name: value for name, value in message.items() if name != key}
        if self._renderings.with_message(i, without) == self._renderings.text:
            raise RecordError(_would_be_lost(where, key))

    @cached_property
    def _left_out(self) -> set[int]:
        """Learned answers whose thought the template omits, if it supports thoughts."""
        if not self._template.writes_thoughts:
            return set()
        # candidates: learned answers with a thought, each without its thought
        thoughtless = {}
        for i in self._learned_messages():
            thought, without = thought_apart(self._messages[i])
            if thought:
                thoughtless[i] = without
        return self._renderings.unwritten_thoughts(thoughtless) if thoughtless else set()

    def _is_taken_for_words(self, i: int) -> bool:
        """Return whether the template treats a thought in the content of answer i as ordinary
        words.
        """
        variants = self._thoughts_inside.get(i)
        return variants is not None and not self._all_are_read and not self._are_read({i: variants})

    @cached_property
    def _thoughts_inside(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Learned answers whose content begins with a thought, each in three variants.

        The variants have the thought under a separate key, no thought, and the thought in the
        content.
        """
        inside: dict[int, tuple[dict[str, Any], ...]] = {}
        if not self._template.writes_thoughts:
            return inside
        for i in self._learned_messages():
            message = self._messages[i]
            words = message_words(message)
            # PLACE makes an empty thought visible, so the variants differ in it
            in_content = {**message, "content": words.replace(THOUGHT_END, PLACE + THOUGHT_END, 1)}
            thought, thoughtless = thought_apart(in_content)
            if THOUGHT_END in words and thought and i not in self._left_out:
                by_key = {**thoughtless, REASONING[0]: thought}
                inside[i] = (by_key, thoughtless, in_content)
        return inside

    @cached_property
    def _all_are_read(self) -> bool:
        """Whether the template recognises the thoughts inside all contents, tested all at once."""
        return self._are_read(self._thoughts_inside)

    def _are_read(self, inside: dict[int, tuple[dict[str, Any], ...]]) -> bool:
        """Return whether thoughts inside contents are rendered like thoughts under a separate key.

        Also return True if the template omits thoughts under a separate key, or refuses that key.
        """
        texts = []
        for variant in range(3):
            messages = {i: each[variant] for i, each in inside.items()}
            texts.append(solid(self._renderings.with_messages(messages)))
        read, bare, written = texts
        return read in ("", bare, written)

    def _learned_messages(self) -> list[int]:
        """Return the numbers of the messages with a loss."""
        return [i for i, weight in enumerate(self._weights) if weight > 0]

    # ---- the learned text

    def _answers(self) -> list[tuple[int, int, float]]:
        """Return the ranges of the learned answers, each with the token that ends it."""
        learned = []
        for i, answer in self._found(has_blocks=False).items():
            start = answer.start
            stop = answer.stop
            assert start is not None and stop is not None
            # the thought's opening tag may be part of the prompt, but the record's words include it
            written = self.text[self._before_thought(start) : stop]
            for key in ("content", *REASONING):
                self._refuse_unsaid(i, key, written)
            stop = self._with_end(i, stop)
            if start < stop:
                learned.append((start, stop, self._weights[i]))
            # count answers without an end: no special token follows, not even one of the next turn
            if self._has_end(stop):
                continue
            if not self._template.forgeable.match(self.text, self._after_blanks(stop)):
                self.answers["no_end"] += 1
        return learned

    def _found(self, has_blocks: bool) -> dict[int, LocatedAnswer]:
        """Locate the learned answers and count their thoughts. `has_blocks` is passed to
        `AnswerFinder`.
        """
        # the finder renders as little as possible; see answers.py
        finder = AnswerFinder(self._renderings, self._talk.paths, has_blocks)
        found = finder.find(self._learned_messages())
        for answer in found.values():
            if answer.thought:
                self.answers[answer.thought] += 1
            if answer.before_answers and (answer.opens_thought or not self.before_answers):
                self.before_answers = answer.before_answers
        return found

    def _generated(self) -> list[tuple[int, int, float]]:
        """Return the ranges of generation blocks with their messages' weights."""
        blocks = self._renderings.whole.generated
        answering = [
            i for i, message in enumerate(self._messages) if message["role"] in LEARNED_ROLES
        ]
        weights = [self._weights[i] for i in answering]

        # every learned answer must be inside the blocks, in order
        written = "".join(self.text[self._before_thought(a) : b] for a, b in blocks)
        end = 0
        for i in answering:
            if self._weights[i]:
                end = self._refuse_unsaid(i, "content", written, end)

        # An answer may have several blocks, such as one for its end token. With equal weights it
        # does not matter which block belongs to which answer.
        different = len(set(weights)) > 1
        has_too_few = len(blocks) < len(weights) - weights.count(0)
        if has_too_few or (different and len(blocks) != len(weights)):
            raise RecordError(
                f"the chat template writes {len(blocks)} generation blocks for {len(weights)} "
                "answers, so the blocks cannot be assigned to the answers; use a template with one "
                "block per answer"
            )
        each = weights if different else weights[:1] * len(blocks)

        # an empty thought at the beginning of a block is not learned: start after it
        found = self._found(has_blocks=True).values()
        begins = sorted(answer.start for answer in found if answer.start is not None)
        learned = []
        for (start, stop), weight in zip(blocks, each, strict=True):
            first = bisect.bisect_right(begins, start)
            if first < len(begins) and begins[first] <= stop:
                start = begins[first]
            if weight and start < stop:
                learned.append((start, stop, weight))
        # a block with only the end token counts, so compare totals instead of single blocks
        ended = sum(self._has_end(stop) for _, stop, _ in learned)
        if ended < len(self._learned_messages()):
            self.answers["no_end"] += len(self._learned_messages()) - ended
        return learned

    def _with_end(self, i: int, stop: int) -> int:
        """Return the end of answer i, including the token that ends it.

        If the template writes no such token after the last answer, choose one as `_closing`.
        """
        if self._has_end(stop):
            return stop
        # the next turn may begin with the token that ends the answer (GLM)
        after = self._after_blanks(stop)
        for token in self._template.ends:
            if self.text.startswith(token, after):
                return after + len(token)
        if i + 1 == len(self._messages) and stop == len(self.text):
            calls = "tool_calls" in self._messages[i]
            self._closing = self._template.end_after(calls, self._goes_on)
        return stop + len(self._closing)

    def _has_end(self, stop: int) -> bool:
        """Return whether a special token, optionally followed by white space, precedes `stop`."""
        while stop and self.text[stop - 1].isspace():
            stop -= 1
        return self.text.endswith((*self._template.special_texts, *self._template.ends), 0, stop)

    def _after_blanks(self, at: int) -> int:
        """Return the position of the first character at or after `at` that is not white space."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at

    def _before_thought(self, at: int) -> int:
        """Skip white space before `at`, then an opening thought tag; return the position."""
        while at and self.text[at - 1].isspace():
            at -= 1
        return at - len(THOUGHT) if self.text.endswith(THOUGHT, 0, at) else at

    def _refuse_unwritten_words(self, i: int) -> None:
        """Raise RecordError unless the text contains the words of message i's content, after its
        mark or anywhere.
        """
        # the same words may occur earlier, so search after the mark first
        begin = self._renderings.begin_of(i)
        if begin is not None:
            with contextlib.suppress(RecordError):
                self._refuse_unsaid(i, "content", self.text, begin)
                return
        self._refuse_unsaid(i, "content", self.text)

    def _refuse_unsaid(self, i: int, key: str, text: str, start: int = 0) -> int:
        """Return the position after the last word of a value in `text[start:]`.

        Raise RecordError unless the text contains the words of the value in order.
        """
        words = message_words(self._messages[i], key, " ")
        # templates may put white space around the tags of a thought, so they are separate words
        words = re.sub(f"({THOUGHT}|{THOUGHT_END})", r" \1 ", words)
        # an empty thought of a learned answer may be omitted
        if self._weights[i]:
            words = EMPTY_THOUGHT.sub("", words)
        for word in words.split():
            found = text.find(word, start)
            if found < 0:
                raise RecordError(
                    f"`{self._talk.paths[i]}.{key}`: {word[:_LONGEST]!r} would be lost, because "
                    "the chat template does not write it here"
                )
            start = found + len(word)
        return start

    # ---- images

    def _find_places(self) -> list[tuple[int, int]]:
        """Return the character range of each image or video placeholder.

        A placeholder is found by rendering the messages with a text in its place.
        """
        # one rendering for all placeholders pays off if there are at least two
        if len(self._media) < 2:
            return [self._place(*media) for media in self._media]
        return self._places_at_once() or [self._place(*media) for media in self._media]

    def _places_at_once(self) -> list[tuple[int, int]]:
        """Find all placeholders with one rendering that has a text in place of each of them.

        Return [] if not all placeholders of a kind are written like the first one.
        """
        text = self._renderings.text
        # kind -> (text of the part, start and stop of the placeholder in that text)
        written: dict[str, tuple[str, int, int]] = {}
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
        # walk through both texts: each PLACE must correspond to the text of a part
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
        """Return the character range of one placeholder. Raise RecordError unless it consists of
        special tokens.
        """
        text = self._renderings.text
        start, stop = self._replaced(i, j)
        written = text[start:stop].strip()
        if not self._template.is_added(written):
            raise RecordError(
                f"`{media.key}`: the chat template writes {written[:_LONGEST]!r} for it, but "
                f"{media.kind} placeholders must consist of special tokens; use a template that "
                "writes such tokens, or --chat-template ignore"
            )
        start = text.index(written, start)
        return start, start + len(written)

    def _replaced(self, i: int, j: int) -> tuple[int, int]:
        """Return the character range that part j of message i adds to the text.

        Return (0, 0) if replacing the part changes other characters.
        """
        text = self._renderings.text
        messages = [*self._messages[:i], _with_text(self._messages[i], j), *self._messages[i + 1 :]]
        replaced = self._renderings.render(messages, self._rules.asks).text
        before, _, after = replaced.partition(PLACE)
        start = len(before)
        stop = len(text) - len(after)
        if start <= stop and text.startswith(before) and text.endswith(after):
            return start, stop
        return 0, 0


def _with_text(message: dict[str, Any], j: int) -> dict[str, Any]:
    """Return a message with PLACE as part j of its content."""
    parts = list(message["content"])
    parts[j] = {"type": "text", "text": PLACE}
    return {**message, "content": parts}


def _would_be_lost(what: str, key: str) -> str:
    """Return the error message for a value that the template omits."""
    problem = f"`{what}` would be lost, because the chat template does not write it"
    # without its content a message is empty, so ignoring the key would not help
    if key == "content":
        return f"{problem}; use a template that writes it, with --chat-template FILE.jinja"
    return f"{problem}; use --ignore-keys {key} to leave it out"


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, including keys, but not roles and types."""
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
    elif not (value is None or isinstance(value, int | float)):  # such as a date from a table
        raise RecordError(
            f"a message contains {described(value)}, which a chat template cannot write as text"
        )


# ---- tokens at which a model trained on messages stops

_WORD = "Certainly"
_DAY = "2026-01-31"
"""Date for templates that write one; it is never part of an answer's end."""
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
# conversations with their tools: one answer, two answers, a tool call
_PROBE = (([_ASK, _TELL], None), ([_ASK, _TELL] * 2, None), ([_ASK, _CALL], _TOOLS))


def answer_ends(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the special tokens that end a learned answer; () if none is known.

    For a tool call, only the last special token counts, because earlier ones may end parts of it.
    Raise ValueError if the files next to the tokenizer define tokens that it does not have.
    """
    template = template_of(text, tokenizer, _DAY)
    found = list[str]()
    for messages, tools in _PROBE:
        talk = Talk(messages, tuple(f"messages[{i}]" for i in range(len(messages))), tools)
        try:
            written = WrittenTalk(talk, template, RecordRules())
        except RecordError:  # training data cannot have such a conversation either
            continue
        for start, stop, _ in written.learned:
            _, word, after = written.text[start:stop].rpartition(_WORD)
            tokens = template.forgeable.findall(after) if word else []
            found += tokens[-1:] if tools else tokens
    ids = [tokenizer.token_id(token) for token in dict.fromkeys(found)]
    return tuple(i for i in ids if i is not None)
