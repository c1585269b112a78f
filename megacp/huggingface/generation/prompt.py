"""Builds prompts as tokens and pixels: a record without its last answer, or a text after images.

The parser, image layout, tokenizer calls, collation and decoder are those of training, so a
question has the same tokens as in training. If it is one of several branches of its record, it
becomes the only branch of its document and attends to the same tokens as before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megacp.engine.rows.batch import PackedBatch
from megacp.prepare.media.reader import MediaReader
from megacp.prepare.records.chat_template import ChatTemplate
from megacp.prepare.records.documents import NO_TOKEN, DocumentMaker, RecordPart, SegmentUnit
from megacp.prepare.records.forms import turn_header
from megacp.prepare.records.record import (
    AS_MESSAGES,
    FOR_PROMPTS,
    LEARNED_ROLES,
    Media,
    RecordError,
    SamplePart,
)
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.training.data.collate import collate
from megacp.training.data.images import joined
from megacp.training.data.manifest import FEATURE_TOKENS
from megacp.training.data.reader import Pack, PackImages
from megacp.training.data.tables import BRANCH_DTYPE, SEGMENT_DTYPE, UNIT_DTYPE
from megacp.training.data.vision.decoding import RulesDecoder
from megacp.training.data.vision.rules import Pixels, VisionRules


@dataclass(frozen=True, eq=False)
class Prompt:
    """One document to continue."""

    tokens: np.ndarray
    """int64 [n], n >= 1."""
    branch_start: int | None = None
    """Index of the token at which the question begins, as a branch of the tokens before it; None if
    the document has no branch.
    """
    units: tuple[SegmentUnit, ...] = ()
    """The document's images and frames."""
    encoded: tuple[tuple[bytes, int], ...] = ()
    """The file of each unit, in order, and the frame's index among the sampled frames of its video
    (-1 for an image).
    """
    question: str = ""
    """The text before the answer, as it is tokenized; images and special tokens without text are
    left out.
    """
    expected: str | None = None
    """The record's answer; None if it has none."""
    images: tuple[str, ...] = ()
    """The paths of images and videos in the record, in order."""


class PromptMaker:
    """Builds prompts with one tokenizer and, for images, one set of rules and one directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: VisionRules | None = None,
        image_root: str | None = None,
        template: ChatTemplate | None = None,
        as_messages: bool = False,
    ) -> None:
        """Build prompts with `template`, the chat template of training; None for megacp's own
        format.

        `as_messages`: whether Alpaca records are written in megacp's own format, too.
        """
        self._template = template
        # Without a template, Alpaca records get the format that answers had in training.
        self._rules = replace(FOR_PROMPTS, form=AS_MESSAGES if as_messages else "")
        self._maker = DocumentMaker(
            tokenizer, tokenizer.eos_id is not None, rules.token_ids if rules else {}, template
        )
        self._media = MediaReader(rules, image_root) if rules is not None else None

    def of_record(self, record: Any) -> list[Prompt]:
        """Return the prompts of a record for preprocess_data.py: one per branch, or one in total.

        The prompt ends before the record's last learned text, if there is text before it. If the
        last message is not from the assistant, the header of an assistant message is added. Raise
        RecordError (a ValueError) for an invalid record.
        """
        sample = parse_record(record, self._rules, self._template)
        if sample.branches:
            return [
                self._prompt(sample.prefix, *_without_answer(branch)) for branch in sample.branches
            ]
        # Remove the learned text at the end, which is the expected answer.
        rest, answer = _without_answer(sample.prefix)
        if not rest:
            # All of the text is learned: a plain text, which the model continues.
            rest = [piece for piece in sample.prefix if not piece.is_end]
            answer = None
        return [self._prompt(rest, None, answer)]

    def of_text(self, text: str, media: Sequence[Media] = ()) -> Prompt:
        """Return a prompt of images and videos, followed by the unchanged `text`.

        Raise RecordError with the `key` of an invalid image or video.
        """
        pieces = [SamplePart(None, 0.0, one) for one in media]
        pieces.append(SamplePart(text, 0.0))
        return self._prompt(pieces, None, None)

    def of_question(self, text: str, media: Sequence[Media] = ()) -> Prompt:
        """Return a prompt with a user message in megacp's format: images and videos, then `text`.

        Raise RecordError with the `key` of an invalid image or video.
        """
        pieces = [turn_header("user", first=True)]
        pieces += [SamplePart(None, 0.0, one) for one in media]
        pieces.append(SamplePart(text, 0.0))
        pieces.append(turn_header(LEARNED_ROLES[0], first=False))
        return self._prompt(pieces, None, None)

    def _prompt(
        self,
        prefix: Sequence[SamplePart],
        branch: Sequence[SamplePart] | None,
        expected: str | None,
    ) -> Prompt:
        """Tokenize a document of a prefix and at most one branch."""
        texts = [pieces for pieces in (prefix, branch) if pieces]
        whole = list(itertools.chain.from_iterable(texts))
        media = [piece.media for piece in whole if piece.media is not None]
        items: list[bytes] = []  # the encoded files
        # Images and videos become units with their tokens, as in a build.
        parts: list[Sequence[RecordPart]] = [*texts]
        if self._media is not None:
            parts = [self._media.expand(pieces, {}, items) for pieces in texts]
        elif media:
            raise RecordError(
                f"`{media[0].key}` has kind {media[0].kind}, but the checkpoint cannot process "
                "images: it has no image rules"
            )
        document = next(self._maker.encode([parts]))
        # A text without tokens is an error only if the whole prompt is empty.
        if document.problem not in (None, NO_TOKEN):
            raise RecordError(document.problem)
        if not len(document.tokens):
            raise RecordError("the prompt is empty; give at least one token of text")
        # A branch without tokens leaves a document of only its prefix.
        start = next(iter(document.branch_starts), len(document.tokens))
        branch_start = start if start < len(document.tokens) else None
        return Prompt(
            document.tokens.astype(np.int64),
            branch_start,
            document.units,
            encoded=tuple((items[unit.item], unit.frame) for unit in document.units),
            question="".join(piece.text or "" for piece in whole),
            expected=expected,
            images=tuple(str(one.value) for one in media if one.source == "path"),
        )


def _without_answer(pieces: Sequence[SamplePart]) -> tuple[list[SamplePart], str | None]:
    """Split off the learned text at the end: return the pieces before it, and the text (None if
    there is none).
    """
    # Walk back over the end token and the learned texts.
    rest = list(pieces)
    if rest and rest[-1].is_end:
        rest.pop()
    answer: list[str] = []
    while rest and rest[-1].text is not None and rest[-1].weight > 0:
        answer.insert(0, rest.pop().text or "")
    return rest, "".join(answer) if answer else None


def prompt_pixels(prompts: Sequence[Prompt], rules: VisionRules) -> Pixels:
    """Return all pixels of a row with these prompts, in batch order."""
    decoder = RulesDecoder(rules)
    found = []
    units = list(itertools.chain.from_iterable(prompt.encoded for prompt in prompts))
    # An image has frame -1, and frame 0 starts a video, whose frames are decoded together.
    begins = [number for number, (_, frame) in enumerate(units) if frame <= 0]
    for begin, end in itertools.pairwise([*begins, len(units)]):
        data, first = units[begin]
        frames = [frame for _, frame in units[begin:end]]
        found.append(decoder.image(data) if first < 0 else decoder.video(data, frames))
    return joined(found, decoder.patch_shape)


def prompt_grids(prompts: Sequence[Prompt]) -> np.ndarray | None:
    """Return int64 `[units, 2]`: rows and columns of each unit's pooled tokens.

    Return None for a vision family without such grids.
    """
    units = itertools.chain.from_iterable(prompt.units for prompt in prompts)
    grids = [unit.grid for unit in units]
    if not grids or grids[0] is None:
        return None
    return np.array(grids, np.int64)


def prompt_row(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    image_attention: str,
    token_ids: Mapping[str, int],
) -> tuple[PackedBatch, np.ndarray]:
    """Return a row, without pixels, in which each prompt and its answer so far are one document.

    `token_ids` are the image rules' ids. Also return int64 [prompts]: the index of each document's
    last token, which predicts the next token of its answer.
    """
    feature_ids: tuple[int, ...] = ()
    if any(prompt.units for prompt in prompts):
        feature_ids = tuple(token_ids[name] for name in FEATURE_TOKENS if name in token_ids)
    # Each prompt is a pack of one document; the row is collated as in training.
    packs = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = np.concatenate((prompt.tokens, np.array(answer, np.int64)))
        packs.append(_pack(number, prompt, tokens, feature_ids))
    # Documents are in order in the row, so the last token of each follows from the lengths.
    ends = np.cumsum([len(pack.tokens) for pack in packs]) - 1
    return collate(packs, image_attention=image_attention), ends


def _pack(number: int, prompt: Prompt, tokens: np.ndarray, feature_ids: tuple[int, ...]) -> Pack:
    """Return a prompt with its answer so far as a pack of one document."""
    start = len(tokens) if prompt.branch_start is None else prompt.branch_start
    # The answer continues the branch, if there is one, else the prefix.
    branches = np.array([], BRANCH_DTYPE)
    if start < len(tokens):
        branches = np.array([(start, len(tokens) - start, len(tokens))], BRANCH_DTYPE)
    # The tables of a stored pack with one document.
    segment = np.zeros(1, SEGMENT_DTYPE)
    segment["true_length"] = segment["padded_length"] = len(tokens)
    segment["prefix_length"] = start
    segment["num_branches"] = len(branches)
    images = None
    if feature_ids:
        # One entry per image or frame, with offsets into crops and pooled tokens.
        units = np.zeros(len(prompt.units), UNIT_DTYPE)
        units["item"] = np.arange(len(units))
        for name in ("start", "num_tokens", "frame"):
            units[name] = [getattr(unit, name) for unit in prompt.units]
        units["image_stop"] = np.cumsum([unit.num_crops for unit in prompt.units])
        units["pooled_stop"] = np.cumsum([unit.num_pooled for unit in prompt.units])
        grids = prompt_grids([prompt])
        images = PackImages(units, {}, lambda item: prompt.encoded[item][0], feature_ids, grids)
    return Pack(number, tokens, None, segment, branches if len(branches) else None, images)
