"""One unit of work: the records of a few byte ranges become one shard of packs.

A pure function of settings, unit and the input's bytes, so that any number of workers, killed any
number of times, write the same shards. Documents are packed window by window, which bounds memory.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from megacp.prepare.media.reader import MediaReader, unnamed_members
from megacp.prepare.packs.packing import best_fit_decreasing, cut_oversize, two_budgets
from megacp.prepare.packs.settings import BuildSettings
from megacp.prepare.packs.writer import Segment, ShardWriter
from megacp.prepare.records.chat_template import Template, loaded
from megacp.prepare.records.documents import Document, DocumentMaker, RecordPart, learned_tokens
from megacp.prepare.records.read import Extent, LinesBefore, Unit, read_extent, records_before
from megacp.prepare.records.record import Media, RecordError, Refusal, Sample
from megacp.prepare.records.sample import parse_record
from megacp.training.data.manifest import ShardEntry
from megacp.training.data.tables import FLAG_SPLIT, FLAG_TRUNCATED, padded_lengths

_BATCH_CHARACTERS = 1 << 20
BATCH_RECORDS = 4096
WINDOW_DOCUMENTS = 1 << 18
"""Most documents packed at a time: tiny ones take 500 bytes each, whatever their tokens."""


@dataclass(frozen=True)
class UnitResult:
    """What became of a unit; `entry` is None when no document was left."""

    unit: int
    entry: ShardEntry | None
    documents: int
    refusals: tuple[Refusal, ...]
    """Bad records."""
    dropped: tuple[Refusal, ...]
    """Good records that `--oversize drop` left out."""
    learned_tokens: int = 0
    unlearned: int = 0
    """Documents of which nothing is learned."""
    in_context: int = 0
    """Answers of which nothing is learned, as a chat template leaves out their thoughts."""
    no_end: int = 0
    """Learned answers after which no token is learned that ends them."""
    before_answers: str | None = None
    """`Sample.before_answers`."""
    empty_thoughts: int = 0
    real_thoughts: int = 0
    no_thoughts: int = 0
    """Learned answers, as of THOUGHTS."""
    written_by: str | None = None
    """What wrote its messages, as of `writer_of`; None without messages."""
    forms: dict[str, int] = field(default_factory=dict)
    """Records by the form in which their answers are learned, as of ANSWER_FORMS."""


def writer_of(template: Template | None) -> str:
    """The fingerprint of what writes messages; empty for the house's own form."""
    return "" if template is None else loaded(template).fingerprint


class _Place(NamedTuple):
    """Where a record stands; `line` counts from the line in which its extent begins."""

    extent: Extent
    line: int
    offset: int
    number: int = 0
    """Number as of a Record."""


class _Entry(NamedTuple):
    """A parsed record on its way to the tokenizer."""

    place: _Place
    parents: tuple[int, ...]
    """Parents of its sample, whose prefix and branches the parts are."""
    parts: tuple[tuple[RecordPart, ...], ...]
    items: tuple[tuple[int, int], ...]
    """Offset and size of its encoded images and videos in the spool."""
    forms: frozenset[str]
    """Forms of its sample."""


class UnitBuilder:
    """Builds units one after another; lives in a worker, keeps the tokenizer loaded."""

    def __init__(self, settings: BuildSettings) -> None:
        self.settings = settings
        if settings.workers > 1 or settings.executor != "local":
            # workers have a core each, and the tokenizers package takes all unless this says
            # otherwise
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = settings.load_tokenizer()
        self.template = settings.load_template(self.tokenizer)
        token_ids = settings.image_rules.token_ids if settings.image_rules else {}
        self.lines_before = LinesBefore()
        self.maker = DocumentMaker(self.tokenizer, settings.append_eod, token_ids, self.template)

    def __call__(self, unit: Unit) -> UnitResult:
        """Write the unit's shard. ValueError: the first refused record under on_error "fail"."""
        # a file without a name, of encoded images from their reading until their pack is written
        with tempfile.TemporaryFile(dir=self.settings.output) as spool:
            return _UnitRun(self, unit, spool).run()


class _UnitRun:
    """The state of one unit's build."""

    def __init__(self, builder: UnitBuilder, unit: Unit, spool: IO[bytes]) -> None:
        settings = builder.settings
        self._builder, self._settings, self._unit, self._spool = builder, settings, unit, spool
        self._media, self._lines_before = None, functools.cache(builder.lines_before)
        self._records_before = functools.cache(records_before)
        if settings.image_rules is not None:
            limits = {"image": settings.max_image_bytes, "video": settings.max_video_bytes}
            self._media = MediaReader(
                settings.image_rules, settings.image_root, settings.image_urls, limits
            )
        self._refusals: list[Refusal] = []
        self._dropped: list[Refusal] = []
        self._documents = self._unlearned = self._learned_tokens = self._windows = 0
        self._answers, self._before_answers = Counter[str](), ""  # as of a Sample
        self._forms = Counter[str]()
        self._written_by: str | None = None
        self._rules = settings.record_rules(builder.tokenizer)

    def run(self) -> UnitResult:
        settings, unit, maker = self._settings, self._unit, self._builder.maker
        directory = Path(settings.output) / f"shard_{unit.index:05d}"
        window: list[tuple[_Entry, Document]] = []
        tokens = 0
        sizes = maker.num_token_ids, settings.seq_length, settings.pad_multiple
        # a node that was given up may still write the same unit
        owner = f"{platform.node()}-{os.getpid()}"
        with ShardWriter(directory, *sizes, settings.cp_degrees, owner) as writer:
            for batch in self._batches():
                made = maker.encode(
                    [entry.parts for entry in batch], [entry.parents for entry in batch]
                )
                for entry, document in zip(batch, made, strict=True):
                    if self._is_kept(entry.place, document):
                        window.append((entry, document))
                        self._forms.update(entry.forms)
                        tokens += len(document.tokens)
                if tokens >= settings.window_tokens or len(window) >= WINDOW_DOCUMENTS:
                    self._flush(window, writer)
                    window, tokens = [], 0
            self._flush(window, writer)
            entry_of_shard = writer.commit() if writer.num_packs else None
        counts = (
            self._documents,
            tuple(self._refusals),
            tuple(self._dropped),
            self._learned_tokens,
            self._unlearned,
        )
        answers: dict[str, Any] = {**self._answers, "before_answers": self._before_answers}
        return UnitResult(
            unit.index,
            entry_of_shard,
            *counts,
            **answers,
            written_by=self._written_by,
            forms=dict(self._forms),
        )

    def _refusal(self, place: _Place, reason: str) -> Refusal:
        """A record refused, at its true line of the file, and with its number where lines do not
        number records.
        """
        number = place.number + self._records_before(place.extent) if place.number else 0
        line = self._lines_before(place.extent) + place.line
        return Refusal(place.extent.path, line, place.offset, reason, number)

    def _refuse(self, place: _Place, reason: str) -> None:
        refusal = self._refusal(place, reason)
        if self._settings.on_error == "fail":
            raise ValueError(str(refusal))
        self._refusals.append(refusal)

    def _batches(self) -> Iterator[list[_Entry]]:
        """Parsed records in the input's order, some at a time."""
        settings, batch, characters = self._settings, list[_Entry](), 0
        for extent in self._unit.extents:
            for item in read_extent(extent, settings.max_record_bytes, self._media is not None):
                is_valid = False
                if settings.valid_share and not isinstance(
                    item, Refusal
                ):  # by all it says: copies stay together
                    said = repr((item.value, item.members)).encode(errors="surrogatepass")
                    drawn = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest())
                    is_valid = drawn < settings.valid_share * 2**64
                if is_valid != settings.is_valid:
                    continue
                place = _Place(extent, item.line, item.offset, item.number)
                if isinstance(item, Refusal):
                    self._refuse(place, item.reason)
                    continue
                try:
                    sample = parse_record(item.value, self._rules, self._builder.template)
                    if sample.talks and self._written_by is None:
                        self._written_by = writer_of(self._builder.template)
                    expanded = self._expanded(sample, item.members or {})
                    batch.append(_Entry(place, sample.parents, *expanded, sample.forms))
                    self._answers.update(sample.answers)
                    self._before_answers = max(self._before_answers, sample.before_answers)
                except RecordError as error:
                    self._refuse(place, str(error))
                    continue
                characters += item.size
                if characters >= _BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
                    yield batch
                    batch, characters = [], 0
        if batch:
            yield batch

    def _expanded(
        self, sample: Sample, members: dict[str, bytes]
    ) -> tuple[tuple[tuple[RecordPart, ...], ...], tuple[tuple[int, int], ...]]:
        """Prefix and branches with their images as units, and offset and size of the bytes of those
        in the spool.
        """
        texts = sample.prefix, *sample.branches
        if self._media is None:
            return texts, ()
        if lost := unnamed_members((piece for text in texts for piece in text), members):
            raise RecordError(
                f"the record does not name its member {lost[0]!r}; images are never paired by order"
            )
        items, seen = list[bytes](), dict[Media, list[RecordPart]]()
        parts = tuple(self._media.expand(text, members, items, seen) for text in texts)
        stored = []
        for data in items:
            stored.append((self._spool.seek(0, os.SEEK_END), len(data)))
            self._spool.write(data)
        return parts, tuple(stored)

    def _is_kept(self, place: _Place, document: Document) -> bool:
        """Whether a document is packed; one that is not is entered with its reason."""
        settings, crops = self._settings, document.num_crops
        tokens, weights, starts, leaves, units, problem = document
        is_cut = settings.oversize in ("split", "truncate") and not starts and not units
        excess = None
        if settings.max_crops_per_pack is not None and crops > settings.max_crops_per_pack:
            excess = (
                f"{crops} image crops, more than --max-crops-per-pack {settings.max_crops_per_pack}"
            )
        elif len(tokens) > settings.seq_length and not is_cut:
            what = "tokens with all branches" if starts else "tokens"
            excess = f"{len(tokens)} {what}, more than --seq-length {settings.seq_length}"
        if problem is not None:
            self._refuse(place, problem)
        elif excess is not None and settings.oversize == "drop":
            self._dropped.append(self._refusal(place, f"{excess}, dropped by --oversize drop"))
        elif excess is not None:
            ways = "--oversize drop (split and truncate cut plain documents alone)"
            self._refuse(place, f"a document of {excess}: raise it or choose {ways}")
        else:
            kept = settings.longest_piece if settings.oversize == "truncate" else len(tokens)
            self._documents += 1
            weights = None if weights is None else weights[:kept]
            self._unlearned += not learned_tokens(tokens[:kept], weights, starts, leaves)
            return True
        return False

    def _flush(self, window: list[tuple[_Entry, Document]], writer: ShardWriter) -> None:
        """Pack the documents of one window."""
        settings = self._settings
        if not window:
            return
        if settings.seed is not None:
            generator = np.random.default_rng((settings.seed, self._unit.index, self._windows))
            window = [window[i] for i in generator.permutation(len(window))]
        self._windows += 1
        lengths = np.array([len(document.tokens) for _, document in window])
        pieces = cut_oversize(
            lengths, settings.longest_piece, settings.oversize == "truncate"
        )  # [n, 3]
        places = pieces.tolist()
        padded = padded_lengths(pieces[:, 2] - pieces[:, 1], settings.pad_multiple)
        if settings.max_crops_per_pack is None:
            packing = best_fit_decreasing(padded, settings.seq_length)
        else:
            crops = np.array([window[d][1].num_crops for d, _, _ in places], np.int64)
            packing = two_budgets(padded, crops, settings.seq_length, settings.max_crops_per_pack)
        for p in range(len(packing)):
            members = [places[i] for i in packing.pack(p).tolist()]
            segments = [self._segment(window[d], start, stop) for d, start, stop in members]
            writer.add_pack(segments)
            learned = [
                learned_tokens(s.tokens, s.weights, s.branch_starts, s.branch_leaves)
                for s in segments
            ]
            self._learned_tokens += sum(learned)
        self._spool.truncate(0)

    def _segment(self, packed: tuple[_Entry, Document], start: int, stop: int) -> Segment:
        """Tokens start..stop of a document as a segment; one with branches or images is never
        cut.
        """
        entry, document = packed
        place = entry.place.extent.source, entry.place.offset, start
        if start == 0 and stop == len(document.tokens):
            tokens, weights, starts, leaves, units, _ = document
            begins = [
                unit.item for unit in units if unit.frame <= 0
            ]  # a file that is named twice is stored twice
            items = tuple(functools.partial(self._read_back, *entry.items[item]) for item in begins)
            numbers = itertools.accumulate((unit.frame <= 0 for unit in units), initial=-1)
            units = tuple(
                replace(unit, item=item) for unit, item in zip(units, [*numbers][1:], strict=True)
            )
            return Segment(tokens, weights, *place, starts, 0, units, items, leaves)
        weights = None if document.weights is None else document.weights[start:stop]
        flag = FLAG_TRUNCATED if self._settings.oversize == "truncate" else FLAG_SPLIT
        return Segment(document.tokens[start:stop], weights, *place, (), flag)

    def _read_back(self, offset: int, size: int) -> bytes:
        """An encoded image from the spool."""
        self._spool.seek(offset)
        return self._spool.read(size)
