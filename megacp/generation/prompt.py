"""What a model is asked: a record without its last answer, or texts after images, as tokens with pixels; rows of these.

Key property: parser, image layout, tokenizer calls and decoder are those of a build, piece by piece, so a question has
the tokens that it had in training, and its answers are branches there as here: the images of a record are encoded once
for all its questions. Rejected: a chat template of its own, which would be a second truth beside `sample`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megacp.batch import PackedBatch
from megacp.data.build.document import DocumentMaker
from megacp.data.images import Pixels, joined
from megacp.data.media.decoding import RulesDecoder
from megacp.data.media.geometry import ImageRules
from megacp.data.media.reader import MediaReader, Part
from megacp.data.packed.writer import SegmentUnit
from megacp.data.records.record_keys import FOR_PROMPTS
from megacp.data.records.sample import Media, Piece, RecordError, parse_record
from megacp.data.row_images import RowUnits, spans, vision_inputs
from megacp.data.tokenize.tokenizer import Tokenizer

_KINDS = {"image": "an image", "video": "a video"}


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
    def num_answers(self) -> int:
        """Answers that are asked for."""
        return max(1, len(self.branches))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens before each answer: its position."""
        return tuple(len(self.prefix.tokens) + len(b.tokens) for b in self.branches) or (len(self.prefix.tokens),)


class PromptMaker:
    """Makes prompts with one tokenizer and, for images, one set of rules and one directory."""

    def __init__(self, tokenizer: Tokenizer, rules: ImageRules | None = None, image_root: str | None = None) -> None:
        self.rules = rules
        self._maker = DocumentMaker(tokenizer, tokenizer.eos_id is not None, rules.token_ids if rules else {})
        self._media = MediaReader(rules, image_root) if rules is not None else None

    def of_record(self, record: Any) -> Prompt:
        """A record as for preprocess_data.py, whose last learned text, if there is text before, is what to answer.

        RecordError (a ValueError) says what is wrong with it.
        """
        sample = parse_record(record, media=True, accepted=FOR_PROMPTS)
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
        prefix = [Piece(None, 0.0, one) for one in media]
        questions = [[Piece(text, 0.0)] for text in texts]
        if len(questions) == 1 or not prefix:
            assert len(questions) == 1, "without images each text is a prompt of its own"
            return self._prompt(prefix + questions[0], [], (None,))
        return self._prompt(prefix, questions, (None,) * len(questions))

    def _prompt(self, prefix: list[Piece], branches: list[list[Piece]], expected: tuple[str | None, ...]) -> Prompt:
        texts = [prefix, *branches]
        media = [piece.media for pieces in texts for piece in pieces if piece.media is not None]
        if media and self._media is None:
            raise RecordError(f"`{media[0].key}` is {_KINDS[media[0].kind]}, and no image rules are known")
        items: list[bytes] = []
        parts: list[tuple[Part, ...]] = [
            tuple(self._media.expand(pieces, {}, items)) if self._media is not None else tuple(pieces)
            for pieces in texts
        ]
        encoded = next(self._maker.encode([parts]))
        if (name := self._maker.forged(encoded)) is not None:
            raise RecordError(f"a text spells the special token {name}")
        if sum(encoded.lengths) == 0:
            raise RecordError("the prompt is empty; give at least one token of text")
        ids = np.concatenate([np.asarray(stretch.ids, np.int64) for stretch in encoded.stretches])
        split = np.split(ids, np.cumsum(encoded.lengths)[:-1])
        units = encoded.units()
        ends = np.cumsum(encoded.lengths).tolist()
        made = []
        for tokens, end in zip(split, ends, strict=True):
            begin = end - len(tokens)
            mine = [unit for unit in units if begin <= unit.start < end]
            made.append(PromptPart(tokens, tuple(dataclasses.replace(u, start=u.start - begin) for u in mine)))
        questions = tuple(_shown(prefix + branch) for branch in branches or [[]])
        named = tuple(str(one.value) for one in media if one.source == "path")
        encoded_units = tuple((items[unit.item], unit.frame) for unit in units)
        return Prompt(made[0], tuple(made[1:]), encoded_units, questions, expected, named)


def _without_answer(pieces: list[Piece]) -> tuple[list[Piece], str | None]:
    """The pieces before the learned texts at the end, and those texts; None when there are none."""
    rest = list(pieces)
    if rest and rest[-1].is_end:
        rest.pop()
    answer: list[str] = []
    while rest and rest[-1].text is not None and rest[-1].weight > 0:
        answer.insert(0, rest.pop().text or "")
    return rest, "".join(answer) if answer else None


def _shown(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text or "" for piece in pieces)


@dataclass(frozen=True, eq=False)
class PromptRow:
    """Some prompts, with what has been answered so far, as documents of one row."""

    batch: PackedBatch
    """Without pixels."""
    last: np.ndarray
    """int64 [answers]: places of the tokens after which each answer goes on."""


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
    image_attention: str = "example",
    token_ids: Mapping[str, int] | None = None,
) -> PromptRow:
    """The row of `prompts`, with `answers[prompt][question]` so far; `token_ids`: of the image rules.

    Each prompt is a document, each question with its answer a branch of it.
    """
    row = _Row()
    for number, (prompt, given) in enumerate(zip(prompts, answers, strict=True)):
        row.begin.append(row.length)
        first = len(prompt.prefix.tokens)
        row.add(number, 0, 0, prompt.prefix, () if prompt.branches else given[0])
        end_of_prefix = row.length - 1
        if not prompt.branches:
            row.last.append(end_of_prefix)
        for branch, (part, answer) in enumerate(zip(prompt.branches, given if prompt.branches else (), strict=True), 1):
            row.add(number, branch, first, part, answer)
            row.last.append(row.length - 1 if len(part.tokens) + len(answer) else end_of_prefix)
    return PromptRow(row.batch(image_attention, token_ids or {}), np.array(row.last, np.int64))


class _Row:
    """A row while it is put together."""

    def __init__(self) -> None:
        self.length = 0
        self.begin: list[int] = []
        self.last: list[int] = []
        self._columns: dict[str, list[np.ndarray]] = {k: [] for k in ("tokens", "positions", "document", "branch")}
        self._units: list[tuple[int, int, SegmentUnit]] = []  # document, first token in the row, unit

    def add(self, document: int, branch: int, position: int, part: PromptPart, answer: Sequence[int]) -> None:
        tokens = np.concatenate((part.tokens, np.array(answer, np.int64)))
        self._units += [(document, self.length + unit.start, unit) for unit in part.units]
        self._columns["tokens"].append(tokens)
        self._columns["positions"].append(position + np.arange(len(tokens)))
        self._columns["document"].append(np.full(len(tokens), document, np.int32))
        self._columns["branch"].append(np.full(len(tokens), branch, np.int32))
        self.length += len(tokens)

    def batch(self, image_attention: str, token_ids: Mapping[str, int]) -> PackedBatch:
        columns = {name: np.concatenate(values) for name, values in self._columns.items()}
        tokens, zeros = columns["tokens"], np.zeros(self.length, np.int64)
        batch = PackedBatch(
            tokens=tokens,
            labels=zeros,
            loss_weights=zeros.astype(np.float32),
            position_ids=columns["positions"].astype(np.int64),
            document=columns["document"],
            branch=columns["branch"],
            span=zeros.astype(np.int32),
            pack_ids=(),
        )
        if not self._units:
            return batch
        units = self._row_units()
        vision = vision_inputs(units, tokens, token_ids["image_patch"])
        return dataclasses.replace(batch, span=spans(units, self.length, image_attention), vision=vision)

    def _row_units(self) -> RowUnits:
        def column(values: list[int]) -> np.ndarray:
            return np.array(values, np.int64)

        units = [unit for _, _, unit in self._units]
        return RowUnits(
            begin=column(self.begin),
            pack=np.zeros(len(units), np.int64),
            segment=column([document for document, _, _ in self._units]),
            first=column([first for _, first, _ in self._units]),
            num_tokens=column([unit.num_tokens for unit in units]),
            item=column([unit.item for unit in units]),
            frame=column([unit.frame for unit in units]),
            cum_images=np.cumsum(column([unit.num_crops for unit in units])),
            cum_pooled=np.cumsum(column([unit.num_pooled for unit in units])),
        )
