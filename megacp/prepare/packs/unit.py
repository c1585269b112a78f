"""Build one unit: turn the records of a few byte ranges into one shard of packs.

The shard depends only on the settings, the unit and the bytes of the input. The number of workers
and their crashes do not change it. Documents are packed in windows, which bounds the memory.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from megacp.prepare.media.reader import MediaReader, unnamed_members
from megacp.prepare.packs.packing import best_fit_decreasing, cut_oversize, two_budgets
from megacp.prepare.packs.settings import BuildSettings
from megacp.prepare.packs.writer import Segment, ShardWriter
from megacp.prepare.records.chat_template import Template, loaded
from megacp.prepare.records.documents import (
    Document,
    DocumentMaker,
    RecordPart,
    SegmentUnit,
    learned_tokens,
)
from megacp.prepare.records.read import Extent, LinesBefore, Unit, read_extent, records_before
from megacp.prepare.records.record import Media, Record, RecordError, Refusal, Sample
from megacp.prepare.records.sample import parse_record
from megacp.training.data.manifest import ShardEntry
from megacp.training.data.tables import FLAG_SPLIT, FLAG_TRUNCATED, padded_lengths

# A batch for the tokenizer ends when it reaches one of these sizes.
_BATCH_CHARACTERS = 1 << 20
BATCH_RECORDS = 4096
# Maximum documents per window. It bounds the memory of tiny documents, which take 500 bytes each in
# addition to their tokens.
WINDOW_DOCUMENTS = 1 << 18


@dataclass(frozen=True)
class UnitResult:
    """Result of building a unit; `entry` is None if the unit has no usable document."""

    unit: int
    entry: ShardEntry | None
    documents: int
    refusals: tuple[Refusal, ...]
    """Invalid records."""
    dropped: tuple[Refusal, ...]
    """Valid records that `--oversize drop` left out."""
    learned_tokens: int = 0
    unlearned: int = 0
    """Number of documents without learned tokens."""
    in_context: int = 0
    """Answers that are not learned, because the chat template leaves out their thoughts."""
    no_end: int = 0
    """Learned answers without a learned end token."""
    before_answers: str | None = None
    """Greatest `Sample.before_answers` of the unit; None in results of an earlier version."""
    empty_thoughts: int = 0
    real_thoughts: int = 0
    no_thoughts: int = 0
    """Number of learned answers of each kind in THOUGHTS."""
    written_by: str | None = None
    """Fingerprint of the messages' template (see `writer_of`); None without messages."""
    forms: dict[str, int] = field(default_factory=dict)
    """Number of records per form of learned answers; the keys are those in ANSWER_FORMS."""


def _way_out(entry: _Entry) -> str:
    """Return advice on --oversize for the document of an entry that is too long."""
    if entry.items or len(entry.parts) > 1:
        return (
            "use --oversize drop to leave it out (split and truncate only cut documents without "
            "branches and images)"
        )
    # a piece of a conversation may begin in the middle of an answer
    if entry.forms:
        return "use --oversize drop to leave it out (split would separate answers and questions)"
    return (
        "use --oversize split to cut it into several documents (drop leaves it out, truncate keeps "
        "its beginning)"
    )


def writer_of(template: Template | None) -> str:
    """Return the fingerprint of the chat template; empty for megacp's own form."""
    return "" if template is None else loaded(template).fingerprint


class _Place(NamedTuple):
    """Position of a record; `line` counts from the first line of the extent."""

    extent: Extent
    line: int
    offset: int
    number: int = 0
    """`Record.number`: position in the extent, if lines do not number the records; otherwise 0."""


class _Entry(NamedTuple):
    """A parsed record that waits for the tokenizer."""

    place: _Place
    parents: tuple[int, ...]
    """`Sample.parents`."""
    parts: tuple[tuple[RecordPart, ...], ...]
    """Parts of the prefix and of each branch."""
    items: tuple[tuple[int, int], ...]
    """Offset and size in the spool of each encoded image and video."""
    forms: frozenset[str]
    """`Sample.forms`."""


class UnitBuilder:
    """Builder of units in one worker process; it loads the tokenizer once."""

    def __init__(self, settings: BuildSettings) -> None:
        self.settings = settings
        if settings.workers > 1 or settings.executor != "local":
            # Each worker has one core, but the tokenizers package uses all cores by default.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = settings.load_tokenizer()
        self.template = settings.load_template(self.tokenizer)
        token_ids = settings.image_rules.token_ids if settings.image_rules else {}
        self.lines_before = LinesBefore()
        self.maker = DocumentMaker(self.tokenizer, settings.append_eod, token_ids, self.template)

    def __call__(self, unit: Unit) -> UnitResult:
        """Write the unit's shard. Raise ValueError for a refused record if on_error is "fail"."""
        # An unnamed file stores the encoded images until their pack is written, so they do not take
        # up memory.
        with tempfile.TemporaryFile(dir=self.settings.output) as spool:
            return UnitRun(self, unit, spool).run()


class UnitRun:
    """State of building one unit."""

    def __init__(self, builder: UnitBuilder, unit: Unit, spool: IO[bytes]) -> None:
        settings = builder.settings
        self._builder = builder
        self._settings = settings
        self._unit = unit
        self._spool = spool
        # Both functions read the file up to the extent, so their results are cached per extent.
        self._lines_before = functools.cache(builder.lines_before)
        self._records_before = functools.cache(records_before)
        self._media = None
        if settings.image_rules is not None:
            limits = {"image": settings.max_image_bytes, "video": settings.max_video_bytes}
            self._media = MediaReader(
                settings.image_rules, settings.image_root, settings.image_urls, limits
            )
        self._refusals: list[Refusal] = []
        self._dropped: list[Refusal] = []
        self._documents = self._unlearned = self._learned_tokens = self._windows = 0
        # Sums of `Sample.answers`, and the greatest `Sample.before_answers`.
        self._answers = Counter[str]()
        self._before_answers = ""
        self._forms = Counter[str]()
        self._written_by: str | None = None
        self._rules = settings.record_rules(builder.tokenizer)

    def run(self) -> UnitResult:
        """Write the shard and return the result."""
        settings = self._settings
        unit = self._unit
        maker = self._builder.maker
        directory = Path(settings.output) / f"shard_{unit.index:05d}"
        window: list[tuple[_Entry, Document]] = []
        tokens = 0
        # If Ray declares a node lost, the node may still be writing the same unit. The owner in the
        # temporary name keeps the two apart.
        owner = f"{platform.node()}-{os.getpid()}"
        shard_writer = ShardWriter(
            directory,
            maker.num_token_ids,
            settings.seq_length,
            settings.pad_multiple,
            settings.cp_degrees,
            owner,
        )
        with shard_writer as writer:
            for documents in self.documents():
                for entry, document in documents:
                    if self._is_kept(entry, document):
                        window.append((entry, document))
                        self._forms.update(entry.forms)
                        tokens += len(document.tokens)
                if tokens >= settings.window_tokens or len(window) >= WINDOW_DOCUMENTS:
                    self._flush(window, writer)
                    window = []
                    tokens = 0
            self._flush(window, writer)
            entry_of_shard = writer.commit() if writer.num_packs else None
        answers: dict[str, Any] = dict(self._answers)
        return UnitResult(
            unit=unit.index,
            entry=entry_of_shard,
            documents=self._documents,
            refusals=tuple(self._refusals),
            dropped=tuple(self._dropped),
            learned_tokens=self._learned_tokens,
            unlearned=self._unlearned,
            **answers,  # in_context, no_end and the kinds of THOUGHTS
            before_answers=self._before_answers,
            written_by=self._written_by,
            forms=dict(self._forms),
        )

    def documents(self) -> Iterator[list[tuple[_Entry, Document]]]:
        """Yield the documents of the unit in batches, in the order of the input."""
        for batch in self._batches():
            parts = [entry.parts for entry in batch]
            parents = [entry.parents for entry in batch]
            documents = self._builder.maker.encode(parts, parents)
            yield list(zip(batch, documents, strict=True))

    def _refusal(self, place: _Place, reason: str) -> Refusal:
        """Return a refusal with the record's line in the whole file.

        It has the record's number in the file as well, if lines do not number the records.
        """
        number = place.number + self._records_before(place.extent) if place.number else 0
        line = self._lines_before(place.extent) + place.line
        return Refusal(place.extent.path, line, place.offset, reason, number)

    def _refuse(self, place: _Place, reason: str) -> None:
        """Enter a refused record. Raise ValueError if on_error is "fail"."""
        refusal = self._refusal(place, reason)
        if self._settings.on_error == "fail":
            raise ValueError(str(refusal))
        self._refusals.append(refusal)

    def _batches(self) -> Iterator[list[_Entry]]:
        """Yield batches of parsed records, in the order of the input."""
        settings = self._settings
        batch: list[_Entry] = []
        characters = 0
        for extent in self._unit.extents:
            for item in read_extent(extent, settings.max_record_bytes, self._media is not None):
                # The training and the validation build read the same input; each keeps its share.
                is_valid = False
                if settings.valid_share and not isinstance(item, Refusal):
                    is_valid = self._draws_validation(item)
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
                    batch = []
                    characters = 0
        if batch:
            yield batch

    def _draws_validation(self, record: Record) -> bool:
        """Return whether a record belongs to the validation dataset of --valid-share.

        A hash of the whole content decides, so copies of a record go to the same dataset.
        """
        content = repr((record.value, record.members)).encode(errors="surrogatepass")
        digest = hashlib.blake2b(content, digest_size=8).digest()
        drawn = int.from_bytes(digest)  # uniform in 0 .. 2**64 - 1
        return drawn < self._settings.valid_share * 2**64

    def _expanded(
        self, sample: Sample, members: dict[str, bytes]
    ) -> tuple[tuple[tuple[RecordPart, ...], ...], tuple[tuple[int, int], ...]]:
        """Expand the images of a sample to units, and append their bytes to the spool.

        Return the parts of prefix and branches, and the offset and size of each item in the spool.
        """
        texts = sample.prefix, *sample.branches
        if self._media is None:
            return texts, ()
        lost = unnamed_members(itertools.chain.from_iterable(texts), members)
        if lost:
            raise RecordError(
                f"the record does not name its member {lost[0]!r}; images are never paired by "
                "order: name each image in the record"
            )
        # All texts of a sample share these two, so an image in several branches is stored once.
        items: list[bytes] = []
        seen: dict[Media, list[RecordPart]] = {}
        parts = tuple(self._media.expand(text, members, items, seen) for text in texts)
        stored = []
        for data in items:
            offset = self._spool.seek(0, os.SEEK_END)
            stored.append((offset, len(data)))
            self._spool.write(data)
        return parts, tuple(stored)

    def _is_kept(self, entry: _Entry, document: Document) -> bool:
        """Return whether a document is packed. If not, enter its record as refused or dropped."""
        settings = self._settings
        place = entry.place
        crops = document.num_crops
        tokens, weights, starts, leaves, units, problem = document
        # Documents with branches or images cannot be cut into pieces.
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
            return False
        if excess is not None and settings.oversize == "drop":
            self._dropped.append(self._refusal(place, f"{excess}, dropped by --oversize drop"))
            return False
        if excess is not None:
            self._refuse(place, f"a document of {excess}: raise this limit, or {_way_out(entry)}")
            return False
        self._documents += 1
        # Truncation can remove all learned tokens of a document.
        kept = settings.longest_piece if settings.oversize == "truncate" else len(tokens)
        if weights is not None:
            weights = weights[:kept]
        if not learned_tokens(tokens[:kept], weights, starts, leaves):
            self._unlearned += 1
        return True

    def _flush(self, window: list[tuple[_Entry, Document]], writer: ShardWriter) -> None:
        """Pack the documents of a window, and write the packs."""
        settings = self._settings
        if not window:
            return
        if settings.seed is not None:
            # The order depends on the unit and the window, not on the worker.
            generator = np.random.default_rng((settings.seed, self._unit.index, self._windows))
            window = [window[i] for i in generator.permutation(len(window))]
        self._windows += 1
        lengths = np.array([len(document.tokens) for _, document in window])
        is_truncated = settings.oversize == "truncate"
        pieces = cut_oversize(lengths, settings.longest_piece, is_truncated)
        places = pieces.tolist()  # n rows: document, start, stop
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
            for segment in segments:
                self._learned_tokens += learned_tokens(
                    segment.tokens, segment.weights, segment.branch_starts, segment.branch_leaves
                )
        # Batches never span two windows, so all images in the spool are written by now.
        self._spool.truncate(0)

    def _segment(self, packed: tuple[_Entry, Document], start: int, stop: int) -> Segment:
        """Return tokens `start` to `stop` of a document as a segment.

        A document with branches or images is never cut.
        """
        entry, document = packed
        place = entry.place.extent.source, entry.place.offset, start
        if start > 0 or stop < len(document.tokens):
            weights = None if document.weights is None else document.weights[start:stop]
            flag = FLAG_TRUNCATED if self._settings.oversize == "truncate" else FLAG_SPLIT
            return Segment(document.tokens[start:stop], weights, *place, (), flag)

        tokens, weights, starts, leaves, units, _ = document
        # An image, or the first frame of a video, begins an item; later frames belong to the same
        # item. A file that is named twice is stored twice, so the items are numbered again.
        items: list[Callable[[], bytes]] = []
        numbered: list[SegmentUnit] = []
        for unit in units:
            if unit.frame <= 0:
                items.append(functools.partial(self._read_back, *entry.items[unit.item]))
            numbered.append(replace(unit, item=len(items) - 1))
        return Segment(tokens, weights, *place, starts, 0, tuple(numbered), tuple(items), leaves)

    def _read_back(self, offset: int, size: int) -> bytes:
        """Return an encoded image or video from the spool."""
        self._spool.seek(offset)
        return self._spool.read(size)
