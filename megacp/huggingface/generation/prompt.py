"""What a model is asked: a record without its last answer, or a text after images, as tokens with
pixels.

Parser, image layout, tokenizer calls, collation and decoder are those of training, so a question
has the tokens it had there. A question that was one of several branches is the one branch of its
document, and sees what it saw.
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
    """One document to be continued."""

    tokens: np.ndarray
    """int64 [n], n >= 1."""
    branch_start: int | None = None
    """Where the question begins, as a branch of what stands before it; None = the document has no
    branch.
    """
    units: tuple[SegmentUnit, ...] = ()
    """Its images and frames."""
    encoded: tuple[tuple[bytes, int], ...] = ()
    """Sources of the units, in order: a file, and the index among its taken frames (-1: it is an
    image).
    """
    question: str = ""
    """The texts before the answer as they are tokenized; images and tokens that no text spells are
    left out.
    """
    expected: str | None = None
    """The record's own answer; None where it has none."""
    images: tuple[str, ...] = ()
    """The files that the record names, in order."""


class PromptMaker:
    """Makes prompts with one tokenizer and, for images, one set of rules and one directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: VisionRules | None = None,
        image_root: str | None = None,
        template: ChatTemplate | None = None,
        as_messages: bool = False,
    ) -> None:
        """`template`: what wrote the messages that the model learned; None for the house's own
        form.

        `as_messages`: whether Alpaca's records, too, were written in the house's own form.
        """
        self._template = template
        self._rules = replace(FOR_PROMPTS, form=AS_MESSAGES if as_messages else "")
        self._maker = DocumentMaker(
            tokenizer, tokenizer.eos_id is not None, rules.token_ids if rules else {}, template
        )
        self._media = MediaReader(rules, image_root) if rules is not None else None

    def of_record(self, record: Any) -> list[Prompt]:
        """The questions of a record as for preprocess_data.py: its branches, or itself.

        The last learned text, if there is text before, is what to answer. Where the last message is
        not an assistant's, the header of an assistant's stands behind it. RecordError (a
        ValueError) says what is wrong with it.
        """
        sample = parse_record(record, self._rules, self._template)
        if sample.branches:
            return [
                self._prompt(sample.prefix, *_without_answer(branch)) for branch in sample.branches
            ]
        rest, answer = _without_answer(sample.prefix)
        if not rest:  # a plain text is to be continued
            rest, answer = [piece for piece in sample.prefix if not piece.is_end], None
        return [self._prompt(rest, None, answer)]

    def of_text(self, text: str, media: Sequence[Media] = ()) -> Prompt:
        """Images and videos, then `text` as it is. RecordError names a bad one's `key`."""
        return self._prompt(
            [*(SamplePart(None, 0.0, one) for one in media), SamplePart(text, 0.0)], None, None
        )

    def of_question(self, text: str, media: Sequence[Media] = ()) -> Prompt:
        """Images and videos, then `text`, as a user's message in the house's own form. RecordError
        as of `of_text`.
        """
        said = [*(SamplePart(None, 0.0, one) for one in media), SamplePart(text, 0.0)]
        headers = turn_header("user", first=True), turn_header(LEARNED_ROLES[0], first=False)
        return self._prompt([headers[0], *said, headers[1]], None, None)

    def _prompt(
        self,
        prefix: Sequence[SamplePart],
        branch: Sequence[SamplePart] | None,
        expected: str | None,
    ) -> Prompt:
        texts = [pieces for pieces in (prefix, branch) if pieces]
        media = [piece.media for pieces in texts for piece in pieces if piece.media is not None]
        items: list[bytes] = []
        parts: list[Sequence[RecordPart]] = [*texts]
        if self._media is not None:
            parts = [self._media.expand(pieces, {}, items) for pieces in texts]
        elif media:
            raise RecordError(
                f"`{media[0].key}` is of kind {media[0].kind}, and the checkpoint has no image "
                "rules"
            )
        document = next(self._maker.encode([parts]))
        if document.problem not in (None, NO_TOKEN):
            raise RecordError(document.problem)
        if not len(document.tokens):
            raise RecordError("the prompt is empty; give at least one token of text")
        start = next(iter(document.branch_starts), len(document.tokens))
        return Prompt(
            document.tokens.astype(np.int64),
            start if start < len(document.tokens) else None,  # it may be all in the beginning
            document.units,
            encoded=tuple((items[unit.item], unit.frame) for unit in document.units),
            question="".join(x.text or "" for pieces in texts for x in pieces),
            expected=expected,
            images=tuple(str(one.value) for one in media if one.source == "path"),
        )


def _without_answer(pieces: Sequence[SamplePart]) -> tuple[list[SamplePart], str | None]:
    """The pieces before the learned texts at the end, and those texts; None when there are none."""
    rest = list(pieces)
    if rest and rest[-1].is_end:
        rest.pop()
    answer: list[str] = []
    while rest and rest[-1].text is not None and rest[-1].weight > 0:
        answer.insert(0, rest.pop().text or "")
    return rest, "".join(answer) if answer else None


def prompt_pixels(prompts: Sequence[Prompt], rules: VisionRules) -> Pixels:
    """All pixels of a row of these prompts, in the order in which its batch counts them."""
    decoder, found = RulesDecoder(rules), []
    units = [unit for prompt in prompts for unit in prompt.encoded]
    begins = [
        number for number, (_, frame) in enumerate(units) if frame <= 0
    ]  # of images and of videos
    for begin, end in itertools.pairwise([*begins, len(units)]):
        data, first = units[begin]
        frames = [frame for _, frame in units[begin:end]]
        found.append(decoder.image(data) if first < 0 else decoder.video(data, frames))
    return joined(found, decoder.patch_shape)


def prompt_grids(prompts: Sequence[Prompt]) -> np.ndarray | None:
    """int64 `[units, 2]`, rows and columns of the pooled tokens of each; None where their family
    states none.
    """
    grids = [unit.grid for prompt in prompts for unit in prompt.units]
    return np.array(grids, np.int64) if grids and grids[0] is not None else None


def prompt_row(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    image_attention: str,
    token_ids: Mapping[str, int],
) -> tuple[PackedBatch, np.ndarray]:
    """The row of `prompts`, each a document, with the `answers` so far; `token_ids`: of the image
    rules; no pixels.

    Also int64 [prompts]: the places of the tokens after which each answer goes on.
    """
    with_images = any(prompt.units for prompt in prompts)
    feature_ids = tuple(token_ids[name] for name in FEATURE_TOKENS if name in token_ids)
    packs = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = np.concatenate((prompt.tokens, np.array(answer, np.int64)))
        packs.append(_pack(number, prompt, tokens, feature_ids if with_images else ()))
    ends = np.cumsum([len(pack.tokens) for pack in packs]) - 1
    return collate(packs, image_attention=image_attention), ends


def _pack(number: int, prompt: Prompt, tokens: np.ndarray, feature_ids: tuple[int, ...]) -> Pack:
    """A prompt with its answer so far as a pack of one document."""
    start = len(tokens) if prompt.branch_start is None else prompt.branch_start
    branches = np.array(
        [(start, len(tokens) - start, len(tokens))] if start < len(tokens) else [], BRANCH_DTYPE
    )
    segment = np.zeros(1, SEGMENT_DTYPE)
    segment["true_length"] = segment["padded_length"] = len(tokens)
    segment["prefix_length"], segment["num_branches"] = start, len(branches)
    images = None
    if feature_ids:
        units = np.zeros(len(prompt.units), UNIT_DTYPE)
        units["item"] = np.arange(len(units))
        for name in ("start", "num_tokens", "frame"):
            units[name] = [getattr(unit, name) for unit in prompt.units]
        units["image_stop"] = np.cumsum([unit.num_crops for unit in prompt.units])
        units["pooled_stop"] = np.cumsum([unit.num_pooled for unit in prompt.units])
        grids = prompt_grids([prompt])
        images = PackImages(units, {}, lambda item: prompt.encoded[item][0], feature_ids, grids)
    return Pack(number, tokens, None, segment, branches if len(branches) else None, images)
