"""What a model is asked: a record without its last answer, or texts after images, as tokens with pixels.

Parser, image layout, tokenizer calls, collation and decoder are those of training, so a question has the tokens it had
there. Its answers are branches, as in training: the images of a record are encoded once for all its questions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megacp.core.data.batch import PackedBatch
from megacp.core.data.collate import collate
from megacp.core.data.decoding import RulesDecoder
from megacp.core.data.geometry import ImageRules
from megacp.core.data.images import Pixels, joined
from megacp.core.data.reader import Pack, PackImages
from megacp.core.data.tables import BRANCH_DTYPE, SEGMENT_DTYPE, UNIT_DTYPE
from megacp.prepare.media.reader import MediaReader
from megacp.prepare.records.documents import NO_TOKEN, DocumentMaker, Part, SegmentUnit
from megacp.prepare.records.record import FOR_PROMPTS, Media, RecordError, SamplePart
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class PromptPart:
    """Tokens of the shared beginning, or of one question."""

    tokens: np.ndarray
    """int64 [n]; n may be 0 for a question that is all in the beginning."""
    units: tuple[SegmentUnit, ...] = ()
    """Its images and frames; `start` counts within the part."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One document to be continued: after its beginning, or after each of its questions."""

    prefix: PromptPart
    branches: tuple[PromptPart, ...] = ()
    """The questions; none = the one answer follows the prefix."""
    encoded: tuple[tuple[bytes, int], ...] = ()
    """Of the units of all parts, in order: a file, and the number among its taken frames (-1: it is an image)."""
    questions: tuple[str, ...] = ("",)
    """The texts before each answer, special tokens and images left out."""
    expected: tuple[str | None, ...] = (None,)
    """The record's own answers; None where it has none."""
    images: tuple[str, ...] = ()
    """The files that the record names, in order."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens before each answer: its position."""
        return tuple(len(self.prefix.tokens) + len(b.tokens) for b in self.branches) or (len(self.prefix.tokens),)


class PromptMaker:
    """Makes prompts with one tokenizer and, for images, one set of rules and one directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: ImageRules | None = None,
        image_root: str | None = None,
        by_template: bool = False,
    ) -> None:
        """`by_template`: whether the model learned messages as a chat template writes them."""
        self._by_template = by_template
        self._maker = DocumentMaker(tokenizer, tokenizer.eos_id is not None, rules.token_ids if rules else {})
        self._media = MediaReader(rules, image_root) if rules is not None else None

    def of_record(self, record: Any) -> Prompt:
        """A record as for preprocess_data.py, whose last learned text, if there is text before, is what to answer.

        Where the last message is not an assistant's, the header of an assistant's stands behind it.
        RecordError (a ValueError) says what is wrong with it.
        """
        sample = parse_record(record, FOR_PROMPTS)
        if sample.talks and self._by_template:
            raise RecordError(
                "messages, which the model learned by a chat template and would be asked here in other tokens: export "
                "it (tools/convert_checkpoint.py) and ask it with transformers, or write the prompt as a `text`"
            )
        prefix, branches = list(sample.prefix), [list(branch) for branch in sample.branches]
        cut = [_without_answer(branch) for branch in branches or [prefix]]
        expected = tuple(answer for _, answer in cut)
        if branches:
            branches = [pieces for pieces, _ in cut]
        elif cut[0][0]:
            prefix = cut[0][0]
        else:  # a plain text is to be continued
            prefix, expected = [piece for piece in prefix if not piece.is_end], (None,)
        return self._prompt(prefix, branches, expected)

    def of_texts(self, texts: Sequence[str], media: Sequence[Media] = ()) -> Prompt:
        """Images and videos, then each of `texts` as it is, one question each. RecordError names a bad one's `key`."""
        prefix = [SamplePart(None, 0.0, one) for one in media]
        questions = [[SamplePart(text, 0.0)] for text in texts]
        if len(questions) == 1:
            return self._prompt(prefix + questions[0], [], (None,))
        assert prefix, "without images each text is a prompt of its own"
        return self._prompt(prefix, questions, (None,) * len(questions))

    def _prompt(
        self, prefix: list[SamplePart], branches: list[list[SamplePart]], expected: tuple[str | None, ...]
    ) -> Prompt:
        texts = [prefix, *branches]
        media = [piece.media for pieces in texts for piece in pieces if piece.media is not None]
        items: list[bytes] = []
        parts: list[Sequence[Part]] = [*texts]
        if self._media is not None:
            parts = [self._media.expand(pieces, {}, items) for pieces in texts]
        elif media:
            raise RecordError(f"`{media[0].key}` is of kind {media[0].kind}, and no image rules are known")
        document = next(self._maker.encode([parts]))
        if document.problem not in (None, NO_TOKEN):
            raise RecordError(document.problem)
        if not len(document.tokens):
            raise RecordError("the prompt is empty; give at least one token of text")
        ids, units, made = document.tokens.astype(np.int64), document.units, []
        for begin, end in itertools.pairwise([0, *document.branch_starts, len(ids)]):
            mine = (dataclasses.replace(x, start=x.start - begin) for x in units if begin <= x.start < end)
            made.append(PromptPart(ids[begin:end], tuple(mine)))
        return Prompt(
            made[0],
            tuple(made[1:]),
            encoded=tuple((items[unit.item], unit.frame) for unit in units),
            questions=tuple("".join(x.text or "" for x in (*prefix, *branch)) for branch in branches or [[]]),
            expected=expected,
            images=tuple(str(one.value) for one in media if one.source == "path"),
        )


def _without_answer(pieces: list[SamplePart]) -> tuple[list[SamplePart], str | None]:
    """The pieces before the learned texts at the end, and those texts; None when there are none."""
    rest = list(pieces)
    if rest and rest[-1].is_end:
        rest.pop()
    answer: list[str] = []
    while rest and rest[-1].text is not None and rest[-1].weight > 0:
        answer.insert(0, rest.pop().text or "")
    return rest, "".join(answer) if answer else None


def prompt_pixels(prompts: Sequence[Prompt], rules: ImageRules) -> Pixels:
    """All pixels of a row of these prompts, in the order in which its batch counts them."""
    decoder, found = RulesDecoder(rules), []
    units = [unit for prompt in prompts for unit in prompt.encoded]
    begins = [number for number, (_, frame) in enumerate(units) if frame <= 0]  # of images and of videos
    for begin, end in itertools.pairwise([*begins, len(units)]):
        data, first = units[begin]
        frames = [frame for _, frame in units[begin:end]]
        found.append(decoder.image(data) if first < 0 else decoder.video(data, frames))
    return joined(found, decoder.patch_shape)


def prompt_row(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Sequence[int]]],
    image_attention: str,
    token_ids: Mapping[str, int],
) -> tuple[PackedBatch, np.ndarray]:
    """The row of `prompts`, with `answers[prompt][question]` so far, without pixels; `token_ids`: of the image rules.

    Each prompt is a document, each question with its answer a branch of it. Also int64 [answers]: the places of the
    tokens after which each answer goes on.
    """
    with_images = any(prompt.encoded for prompt in prompts)
    packs, last, length = [], [], 0
    for number, (prompt, given) in enumerate(zip(prompts, answers, strict=True)):
        parts = [prompt.prefix.tokens, *(branch.tokens for branch in prompt.branches)]
        first = 1 if prompt.branches else 0  # the first part that an answer follows
        for i, answer in enumerate(given, first):
            parts[i] = np.concatenate((parts[i], np.array(answer, np.int64)))
        stops = np.cumsum([len(part) for part in parts])  # [parts] within the document
        # an answer to nothing but the beginning goes on after the beginning
        last += [length + int(stops[i] if len(parts[i]) else stops[0]) - 1 for i in range(first, len(parts))]
        packs.append(_pack(number, prompt, parts, token_ids["image_patch"] if with_images else None))
        length += int(stops[-1])
    return collate(packs, image_attention=image_attention), np.array(last, np.int64)


def _pack(number: int, prompt: Prompt, parts: Sequence[np.ndarray], image_patch: int | None) -> Pack:
    """A prompt as a pack of one document: its beginning, then each of its questions, with their answers so far."""
    lengths = [len(part) for part in parts]
    starts = (np.cumsum(lengths) - lengths).tolist()
    pairs = zip(starts[1:], lengths[1:], strict=True)
    branches = np.array([(start, length) for start, length in pairs if length], BRANCH_DTYPE)
    segment = np.zeros(1, SEGMENT_DTYPE)
    segment["true_length"] = segment["padded_length"] = sum(lengths)
    segment["prefix_length"], segment["num_branches"] = lengths[0], len(branches)
    images = None
    if image_patch is not None:
        placed = zip(starts, (prompt.prefix, *prompt.branches), strict=True)
        found = [(start + unit.start, unit) for start, part in placed for unit in part.units]
        units = np.zeros(len(found), UNIT_DTYPE)
        units["item"] = np.arange(len(found))
        units["start"] = [start for start, _ in found]
        units["num_tokens"] = [unit.num_tokens for _, unit in found]
        units["image_stop"] = np.cumsum([unit.num_crops for _, unit in found])
        units["pooled_stop"] = np.cumsum([unit.num_pooled for _, unit in found])
        units["frame"] = [unit.frame for _, unit in found]
        images = PackImages(units, {}, lambda number: prompt.encoded[number][0], image_patch)
    return Pack(number, np.concatenate(parts), None, segment, branches if len(branches) else None, images)
