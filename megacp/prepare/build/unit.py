"""One unit of work: the records of a few byte ranges become one shard of packs.

A pure function of settings, unit and the input's bytes, so that any number of workers, killed any number of times,
write the same shards. Documents are packed window by window, which bounds memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from megacp.core.data.manifest import ShardEntry
from megacp.core.data.tables import FLAG_SPLIT, FLAG_TRUNCATED, padded_lengths
from megacp.core.storage.url import is_url
from megacp.prepare.build.faults import storage_faults
from megacp.prepare.build.packing import best_fit_decreasing, cut_oversize, two_budgets
from megacp.prepare.build.settings import BuildSettings
from megacp.prepare.build.writer import Segment, ShardWriter
from megacp.prepare.media.fetch import ImageFetcher
from megacp.prepare.media.reader import LARGEST_ITEM, MediaReader, unnamed_members
from megacp.prepare.records.chat_template import ChatTemplate
from megacp.prepare.records.documents import Document, DocumentMaker, Encoded, Origin, Part, learned_tokens
from megacp.prepare.records.parts import Sample, SamplePart
from megacp.prepare.records.read import Extent, Unit, ahead, is_plain, line_number, read_extent
from megacp.prepare.records.record import Accepted, Record, RecordError, Refusal
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.threads import one_thread
from megacp.prepare.tokenize.tokenizer import Tokenizer

IMAGES_DIRECTORY = ".images"
"""Of images that were fetched, while the build runs."""
RECORDS_AHEAD = 64
"""Records whose images are fetched ahead."""
_CHUNK_CHARACTERS = 1 << 20
CHUNK_RECORDS = 4096
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
    """Tokens that some token before them predicts with a loss weight."""
    unlearned: int = 0
    """Documents of which nothing is learned."""


class BadRecord(ValueError):
    """A refused record under `--on-error fail`."""


def shard_name(unit: int) -> str:
    """Directory name of a unit's shard."""
    return f"shard_{unit:05d}"


def where(extent: Extent, line: int, offset: int) -> tuple[str, int]:
    """File and true line of a record whose `line` counts from its extent's beginning."""
    return extent.path, line_number(extent.path, offset) if is_plain(extent.path) else line


class _Entry(NamedTuple):
    """A parsed record on its way to the tokenizer."""

    extent: Extent
    line: int
    offset: int
    parts: tuple[tuple[Part, ...], ...]
    """Prefix, then branches."""
    weight: float
    items: tuple[tuple[int, int], ...]
    """Offset and size of its encoded images in the spool."""

    def refusal(self, reason: str) -> Refusal:
        path, line = where(self.extent, self.line, self.offset)
        return Refusal(path, line, self.offset, reason)


class UnitBuilder:
    """Builds units one after another; lives in a worker, keeps the tokenizer loaded."""

    def __init__(self, settings: BuildSettings) -> None:
        self._settings = settings
        if settings.workers > 1 or settings.executor != "local":
            one_thread()  # workers have a core each
        self._tokenizer = settings.load_tokenizer()
        self._template = settings.load_template(self._tokenizer)
        token_ids = settings.image_rules.token_ids if settings.image_rules else {}
        self._maker = DocumentMaker(self._tokenizer, settings.append_eod, token_ids, self._template)

    def __call__(self, unit: Unit) -> UnitResult:
        """Write the unit's shard.

        BadRecord: the first refused record under on_error "fail". StorageFault: the disk is full, a file is not read.
        """
        settings = self._settings
        with contextlib.ExitStack() as held:
            held.enter_context(storage_faults(Path(settings.output)))
            media = spool = fetcher = None
            if settings.image_rules is not None:
                if settings.fetches_images:
                    folder = Path(settings.image_cache or Path(settings.output) / IMAGES_DIRECTORY)
                    root = settings.image_root if is_url(settings.image_root) else None
                    fetcher = ImageFetcher(folder, settings.image_urls, LARGEST_ITEM, root)
                    held.callback(fetcher.close)
                media = MediaReader(settings.image_rules, settings.image_root, fetcher)
                # of encoded images, from their reading until their pack is written; a file without a name
                spool = held.enter_context(tempfile.TemporaryFile(dir=settings.output))
            ahead_of = RECORDS_AHEAD if fetcher is not None else 0
            run = _UnitRun(settings, self._tokenizer, self._template, self._maker, unit, media, spool, ahead_of)
            result = run.run()
            if result.entry is not None and settings.upload is not None:
                settings.upload.shard(result.entry)
            return result


class _UnitRun:
    """The state of one unit's build."""

    def __init__(
        self,
        settings: BuildSettings,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        maker: DocumentMaker,
        unit: Unit,
        media: MediaReader | None,
        spool: IO[bytes] | None,
        ahead_of: int,
    ) -> None:
        self._settings, self._maker, self._unit = settings, maker, unit
        self._tokenizer, self._template = tokenizer, template
        self._media, self._spool, self._ahead = media, spool, ahead_of
        self._refusals: list[Refusal] = []
        self._dropped: list[Refusal] = []
        self._documents = self._unlearned = self._learned_tokens = 0
        self._accepted = Accepted(settings.ignore_keys, settings.context_roles)
        self._windows = 0

    def run(self) -> UnitResult:
        settings, unit = self._settings, self._unit
        directory = Path(settings.output) / shard_name(unit.index)
        window: list[Document] = []
        tokens = 0
        sizes = self._maker.num_token_ids, settings.seq_length, settings.pad_multiple
        owner = f"{platform.node()}-{os.getpid()}"  # a node that was given up may still write the same unit
        with ShardWriter(directory, *sizes, settings.cp_degrees, owner) as writer:
            for chunk in self._chunks():
                for document in self._documents_of(chunk):
                    window.append(document)
                    tokens += len(document.tokens)
                if tokens >= settings.window_tokens or len(window) >= WINDOW_DOCUMENTS:
                    self._flush(window, writer)
                    window, tokens = [], 0
            self._flush(window, writer)
            entry = writer.commit(replace=True) if writer.num_packs else None
        return UnitResult(
            unit.index,
            entry,
            self._documents,
            tuple(self._refusals),
            tuple(self._dropped),
            self._learned_tokens,
            self._unlearned,
        )

    def _refuse(self, refusal: Refusal) -> None:
        if self._settings.on_error == "fail":
            raise BadRecord(str(refusal))
        self._refusals.append(refusal)

    def _chunks(self) -> Iterator[list[_Entry]]:
        """Parsed records in the input's order, some at a time."""
        chunk: list[_Entry] = []
        characters = 0
        for extent in self._unit.extents:
            items = read_extent(extent, self._settings.max_record_bytes, self._media is not None)
            for item, parsed in ahead(items, self._parsed, self._ahead):
                if isinstance(item, Refusal):
                    self._refuse(item)
                    continue
                entry = self._entry(extent, item, parsed)
                if entry is None:
                    continue
                chunk.append(entry)
                characters += item.size
                if characters >= _CHUNK_CHARACTERS or len(chunk) >= CHUNK_RECORDS:
                    yield chunk
                    chunk, characters = [], 0
        if chunk:
            yield chunk

    def _parsed(self, record: Record | Refusal) -> Sample | RecordError | None:
        """A record as a sample, whose images are being fetched from now on; what is wrong is told in its turn."""
        if isinstance(record, Refusal):
            return None
        try:
            has_media = self._media is not None
            sample = parse_record(record.value, self._settings.text_key, has_media, self._accepted, self._template)
        except RecordError as error:
            return error
        if self._media is not None:
            self._media.want(piece for text in (sample.prefix, *sample.branches) for piece in text)
        return sample

    def _entry(self, extent: Extent, record: Record, sample: Sample | RecordError | None) -> _Entry | None:
        try:
            if not isinstance(sample, Sample):
                raise sample or RecordError("it was not parsed")
            self._check_template(sample, extent, record)
            parts, items = self._expanded((sample.prefix, *sample.branches), record.members or {})
        except RecordError as error:
            path, line = where(extent, record.line, record.offset)
            self._refuse(Refusal(path, line, record.offset, str(error), error.url))
            return None
        return _Entry(extent, record.line, record.offset, parts, sample.weight, items)

    def _check_template(self, sample: Sample, extent: Extent, record: Record) -> None:
        """ValueError for messages that a server would write by the tokenizer's template."""
        template = self._tokenizer.chat_template
        if template is None or self._settings.chat_template != "refuse" or not sample.talks:
            return
        path, line = where(extent, record.line, record.offset)
        raise ValueError(
            f"{path}:{line}: a record with messages, and {template} has a chat template, which is not applied: "
            "messages are written as <|ROLE|> newline CONTENT, so a model that is served by the template is asked in "
            "other tokens than it learns here; give --chat-template auto to apply it, or ignore if you want that"
        )

    def _expanded(
        self, texts: tuple[tuple[SamplePart, ...], ...], members: dict[str, bytes]
    ) -> tuple[tuple[tuple[Part, ...], ...], tuple[tuple[int, int], ...]]:
        """Prefix and branches with their images as units, and offset and size of the bytes of those in the spool."""
        if self._media is None or self._spool is None:
            return texts, ()
        if lost := unnamed_members((piece for text in texts for piece in text), members):
            raise RecordError(f"the record does not name its member {lost[0]!r}; images are never paired by order")
        items: list[bytes] = []
        parts = tuple(self._media.expand(text, members, items) for text in texts)
        stored = []
        for data in items:
            stored.append((self._spool.seek(0, os.SEEK_END), len(data)))
            self._spool.write(data)
        return parts, tuple(stored)

    def _documents_of(self, chunk: list[_Entry]) -> Iterator[Document]:
        for entry, encoded in zip(chunk, self._maker.encode([entry.parts for entry in chunk]), strict=True):
            if encoded.problem is not None:
                self._refuse(entry.refusal(encoded.problem))
            elif 0 in encoded.lengths:
                self._refuse(entry.refusal("the tokenizer makes no token of a text of this record"))
            elif (name := self._maker.spelled_special_token(encoded)) is not None:
                self._refuse(entry.refusal(f"a text of this record spells the special token {name}"))
            elif encoded.is_guesswork:
                what = "branches begin with learned text after a prefix of a single token, and nothing could predict it"
                self._refuse(entry.refusal(f"the record's {what}: let more stand before it"))
            elif (excess := self._excess(encoded)) is not None and self._settings.oversize == "drop":
                self._dropped.append(entry.refusal(f"{excess[0]}, dropped by --oversize drop"))
            elif excess is not None and (self._settings.oversize == "error" or not excess[1]):
                ways = "drop, split or truncate" if excess[1] else "drop"
                self._refuse(entry.refusal(f"a document of {excess[0]}: raise it or choose --oversize {ways}"))
            else:
                origin = Origin(entry.extent.source, entry.offset, entry.weight, entry.items)
                document = self._maker.document(encoded, origin)
                kept = self._settings.longest_piece if self._settings.oversize == "truncate" else len(document.tokens)
                self._documents += 1
                self._unlearned += not document.teaches(kept)
                yield document

    def _excess(self, encoded: Encoded) -> tuple[str, bool] | None:
        """What a record has too much of for any pack, and whether cutting it is allowed; None when it fits."""
        settings, total, crops = self._settings, sum(encoded.lengths), encoded.num_crops
        if crops and settings.max_crops_per_pack is not None and crops > settings.max_crops_per_pack:
            return f"{crops} image crops, more than --max-crops-per-pack {settings.max_crops_per_pack}", False
        if total <= settings.seq_length:
            return None
        branched = len(encoded.lengths) > 1
        whole = settings.oversize != "drop" and branched  # the words of a drop have no more to explain
        what = "tokens with all branches" if whole else "tokens"
        return f"{total} {what}, more than --seq-length {settings.seq_length}", not branched and not crops

    def _flush(self, window: list[Document], writer: ShardWriter) -> None:
        """Pack the documents of one window."""
        settings = self._settings
        if not window:
            return
        if settings.seed is not None:
            generator = np.random.default_rng((settings.seed, self._unit.index, self._windows))
            window = [window[i] for i in generator.permutation(len(window))]
        self._windows += 1
        lengths = np.array([len(document.tokens) for document in window])
        truncate = settings.oversize == "truncate"
        pieces = cut_oversize(lengths, settings.longest_piece, truncate)  # what is dropped or refused is gone by now
        cut_flag = FLAG_TRUNCATED if truncate else FLAG_SPLIT
        places = list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True))
        crops = np.array([window[d].num_crops for d, _, _ in places], np.int64)
        padded = padded_lengths(pieces.lengths, settings.pad_multiple)
        if settings.max_crops_per_pack is None:
            packing = best_fit_decreasing(padded, settings.seq_length)
        else:
            packing = two_budgets(padded, crops, settings.seq_length, settings.max_crops_per_pack)
        for p in range(len(packing)):
            members = [places[i] for i in packing.pack(p).tolist()]
            segments = [self._segment(window[d], start, stop, cut_flag) for d, start, stop in members]
            writer.add_pack(segments)
            self._learned_tokens += sum([learned_tokens(s.tokens, s.weights, s.branch_starts) for s in segments])
        if self._spool is not None:
            self._spool.truncate(0)

    def _segment(self, document: Document, start: int, stop: int, cut_flag: int) -> Segment:
        """Tokens start..stop of a document as a segment; one with branches or images is never cut."""
        origin = document.origin
        if start == 0 and stop == len(document.tokens):
            items = tuple(functools.partial(self._read_back, *item) for item in origin.items)
            place = origin.source, origin.offset, 0
            return Segment(document.tokens, document.weights, *place, document.branch_starts, 0, document.units, items)
        weights = None if document.weights is None else document.weights[start:stop]
        return Segment(document.tokens[start:stop], weights, origin.source, origin.offset, start, (), cut_flag)

    def _read_back(self, offset: int, size: int) -> bytes:
        """An encoded image from the spool."""
        assert self._spool is not None
        self._spool.seek(offset)
        return self._spool.read(size)
