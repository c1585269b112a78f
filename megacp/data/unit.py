"""One unit of work: the records of a few byte ranges become one shard of packs.

Key property: a pure function of (settings, unit, the input's bytes), so that any number of workers, killed any number
of times, write the same shards. Documents are packed window by window within the unit, which bounds memory. Rejected:
one packer behind all workers, which makes packs depend on who finished first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megacp.data.indexed import token_dtype
from megacp.data.jsonl import DEFAULT_MAX_LINE_BYTES, Extent, Record, Refusal, Unit, is_plain, line_number, read_extent
from megacp.data.manifest import ShardEntry
from megacp.data.packing import best_fit_decreasing, cut_oversize, padded_lengths
from megacp.data.sample import Piece, RecordError, Sample, parse_record
from megacp.data.store import Segment, ShardWriter
from megacp.data.tables import FLAG_SPLIT, FLAG_TRUNCATED
from megacp.data.tokenizer import Tokenizer, load_tokenizer

DEFAULT_WINDOW_TOKENS = 1 << 24
IDENTITY_DTYPE = np.dtype([("digest", "S16"), ("source", "<i4"), ("offset", "<i8"), ("line", "<i8")])
_CHUNK_CHARACTERS = 1 << 20
_CHUNK_RECORDS = 4096
_AUDIT_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class BuildSettings:
    """Everything a build depends on; the names are those of the flags."""

    input: tuple[str, ...]
    output: str
    tokenizer: str
    seq_length: int
    oversize: str = "error"
    pad_multiple: int = 1
    append_eod: bool = True
    seed: int | None = None
    """Shuffles documents inside each window; None keeps the input's order."""
    text_key: str = "text"
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
    on_error: str = "fail"
    max_errors: int | None = None
    workers: int = 1
    unit_bytes: int = 0
    """0: chosen from seq_length, so that a unit fills some hundred packs."""
    window_tokens: int = DEFAULT_WINDOW_TOKENS
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokenizer_engine: str = "auto"
    eod_token: str | None = None

    @property
    def bytes_per_unit(self) -> int:
        """unit_bytes, or at least 8 MiB and 256 packs of 4-byte tokens."""
        return self.unit_bytes or max(8 << 20, 1024 * self.seq_length)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer these settings name."""
        return load_tokenizer(self.tokenizer, self.tokenizer_engine, self.eod_token)


@dataclass(frozen=True)
class UnitTask:
    """A unit, and the records in it whose `id` an earlier unit holds already: digest -> why it is refused."""

    unit: Unit
    duplicates: dict[bytes, str] = field(default_factory=dict)


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
    has_ids: bool


class BadRecord(ValueError):
    """A refused record under `--on-error fail`."""


def shard_name(unit: int) -> str:
    """Directory name of a unit's shard."""
    return f"shard_{unit:05d}"


def identity_file(output: str | Path, unit: int) -> Path:
    """Where the digests of a unit's record ids are kept while the build runs."""
    return Path(output) / ".ids" / f"{unit:05d}.npy"


def digest(identity: str) -> bytes:
    """A 16-byte digest of a record's id, as numpy gives it back (no zero bytes at the end)."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest().rstrip(b"\0")


def where(extent: Extent, line: int, offset: int) -> tuple[str, int]:
    """File and true line of a record whose `line` counts from its extent's beginning."""
    return extent.path, line_number(extent.path, offset) if is_plain(extent.path) else line


@dataclass(frozen=True)
class _Entry:
    """A parsed record on its way to the tokenizer."""

    extent: Extent
    line: int
    offset: int
    sample: Sample

    def refusal(self, reason: str) -> Refusal:
        path, line = where(self.extent, self.line, self.offset)
        return Refusal(path, line, self.offset, reason)


@dataclass(frozen=True)
class _Document:
    source: int
    offset: int
    tokens: np.ndarray
    weights: np.ndarray | None
    branch_starts: tuple[int, ...]


class UnitBuilder:
    """Builds units one after another; lives in a worker, keeps the tokenizer loaded."""

    def __init__(self, settings: BuildSettings) -> None:
        self._settings = settings
        self._tokenizer = settings.load_tokenizer()
        self._eod = None
        if settings.append_eod:
            assert self._tokenizer.eos_id is not None, "checked before any worker starts"
            self._eod = np.array([self._tokenizer.eos_id], dtype=np.int32)

    def __call__(self, task: UnitTask, position: MutableSequence[int]) -> UnitResult:
        """Write the unit's shard and identity file. `position` is set to [extent, byte offset] of the record at hand.

        BadRecord: the first refused record under on_error "fail". ValueError: the tokenizer's engines disagree.
        """
        return _UnitRun(self._settings, self._tokenizer, self._eod, task).run(position)


class _UnitRun:
    """The state of one unit's build."""

    def __init__(self, settings: BuildSettings, tokenizer: Tokenizer, eod: np.ndarray | None, task: UnitTask) -> None:
        self._settings, self._tokenizer, self._eod, self._task = settings, tokenizer, eod, task
        self._refusals: list[Refusal] = []
        self._dropped: list[Refusal] = []
        self._seen: dict[bytes, tuple[Extent, int, int]] = {}
        self._documents = 0
        self._windows = 0

    def run(self, position: MutableSequence[int]) -> UnitResult:
        settings, unit = self._settings, self._task.unit
        directory = Path(settings.output) / shard_name(unit.index)
        window: list[_Document] = []
        tokens = 0
        with ShardWriter(directory, self._tokenizer.vocab_size, settings.seq_length, settings.pad_multiple) as writer:
            for number, chunk in enumerate(self._chunks(position)):
                if number == 0:
                    self._audit(chunk)
                for document in self._documents_of(chunk):
                    window.append(document)
                    tokens += len(document.tokens)
                if tokens >= settings.window_tokens:
                    self._flush(window, writer)
                    window, tokens = [], 0
            self._flush(window, writer)
            entry = writer.commit(replace=True) if writer.num_packs else None
        self._write_identities()
        return UnitResult(
            unit.index, entry, self._documents, tuple(self._refusals), tuple(self._dropped), bool(self._seen)
        )

    def _refuse(self, refusal: Refusal) -> None:
        if self._settings.on_error == "fail":
            raise BadRecord(str(refusal))
        self._refusals.append(refusal)

    def _chunks(self, position: MutableSequence[int]) -> Iterator[list[_Entry]]:
        """Parsed records in the input's order, some at a time."""
        chunk: list[_Entry] = []
        characters = 0
        for i, extent in enumerate(self._task.unit.extents):
            position[0], position[1] = i, extent.start
            for item in read_extent(extent, self._settings.max_line_bytes):
                if isinstance(item, Refusal):
                    self._refuse(item)
                    continue
                position[1] = item.offset
                entry = self._parse(extent, item)
                if entry is None:
                    continue
                chunk.append(entry)
                characters += item.size
                if characters >= _CHUNK_CHARACTERS or len(chunk) >= _CHUNK_RECORDS:
                    yield chunk
                    chunk, characters = [], 0
        if chunk:
            yield chunk

    def _parse(self, extent: Extent, record: Record) -> _Entry | None:
        try:
            sample = parse_record(record.value, self._settings.text_key)
            if sample.identity is not None:
                self._check_identity(sample.identity, extent, record)
        except RecordError as error:
            path, line = where(extent, record.line, record.offset)
            self._refuse(Refusal(path, line, record.offset, str(error)))
            return None
        return _Entry(extent, record.line, record.offset, sample)

    def _check_identity(self, identity: str, extent: Extent, record: Record) -> None:
        key = digest(identity)
        elsewhere = self._task.duplicates.get(key)
        if key in self._seen:
            first, line, offset = self._seen[key]
            elsewhere = "{}:{}".format(*where(first, line, offset))
        if elsewhere is not None:
            raise RecordError(f"duplicate id {identity!r}, the first is at {elsewhere}")
        self._seen[key] = (extent, record.line, record.offset)

    def _audit(self, chunk: list[_Entry]) -> None:
        """Compare the engines on the beginning of the unit's text."""
        if self._tokenizer.engine == "reference":
            return
        left = _AUDIT_CHARACTERS
        for entry in chunk:
            for piece in entry.sample.prefix:
                text = (piece.text or "")[:left]
                if text and self._tokenizer.disagreement([text]) is not None:
                    path, line = where(entry.extent, entry.line, entry.offset)
                    raise ValueError(
                        f"{path}:{line}: {self._tokenizer.engine} gives other ids than the reference for this text; "
                        "nothing is wrong with the text: run again with --tokenizer-engine reference --overwrite"
                    )
                left -= len(text)
            if left <= 0:
                return

    def _documents_of(self, chunk: list[_Entry]) -> Iterator[_Document]:
        pieces = (p for e in chunk for part in (e.sample.prefix, *e.sample.branches) for p in part)
        encoded = iter(self._tokenizer.encode([piece.text for piece in pieces if piece.text is not None]))
        longest = self._settings.seq_length
        for entry in chunk:
            # every text's ids are taken before anything can be refused: the next record's come after them
            parts = [self._part(part, encoded) for part in (entry.sample.prefix, *entry.sample.branches)]
            lengths = [sum(len(ids) for ids, _ in part) for part in parts]
            total = sum(lengths)
            if 0 in lengths:
                self._refuse(entry.refusal("the tokenizer makes no token of a text of this record"))
            elif total > longest and self._settings.oversize == "drop":
                reason = f"{total} tokens, more than --seq-length {longest}, dropped by --oversize drop"
                self._dropped.append(entry.refusal(reason))
            elif total > longest and (self._settings.oversize == "error" or entry.sample.branches):
                ways = "drop" if entry.sample.branches else "drop, split or truncate"
                what = "tokens with all branches" if entry.sample.branches else "tokens"
                self._refuse(
                    entry.refusal(
                        f"a document of {total} {what}, more than --seq-length {longest}: "
                        f"raise it or choose --oversize {ways}"
                    )
                )
            else:
                self._documents += 1
                yield self._document(entry, parts, lengths)

    def _part(self, part: tuple[Piece, ...], encoded: Iterator[np.ndarray]) -> list[tuple[np.ndarray, float]]:
        result = []
        for piece in part:
            if piece.text is not None:
                result.append((next(encoded), piece.weight))
            elif self._eod is not None:
                result.append((self._eod, piece.weight))
        return result

    def _document(self, entry: _Entry, parts: list[list[tuple[np.ndarray, float]]], lengths: list[int]) -> _Document:
        pairs = [pair for part in parts for pair in part]
        weight = entry.sample.weight
        weights = None
        if weight != 1.0 or any(w != 1.0 for _, w in pairs):
            each = np.array([w * weight for _, w in pairs], dtype=np.float32)
            weights = np.repeat(each, [len(ids) for ids, _ in pairs])
        tokens = np.concatenate(
            [ids for ids, _ in pairs], dtype=token_dtype(self._tokenizer.vocab_size), casting="unsafe"
        )
        starts = tuple(np.cumsum(lengths)[:-1].tolist()) if len(parts) > 1 else ()
        return _Document(entry.extent.source, entry.offset, tokens, weights, starts)

    def _flush(self, window: list[_Document], writer: ShardWriter) -> None:
        """Pack the documents of one window."""
        settings = self._settings
        if not window:
            return
        if settings.seed is not None:
            generator = np.random.default_rng((settings.seed, self._task.unit.index, self._windows))
            window = [window[i] for i in generator.permutation(len(window))]
        self._windows += 1
        rule = settings.oversize if settings.oversize != "drop" else "error"  # what to drop is gone by now
        lengths = np.array([len(document.tokens) for document in window])
        pieces = cut_oversize(lengths, settings.seq_length, settings.pad_multiple, rule)
        cut_flag = FLAG_TRUNCATED if rule == "truncate" else FLAG_SPLIT
        segments = [
            _segment(window[d], start, stop, cut_flag)
            for d, start, stop in zip(
                pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True
            )
        ]
        packing = best_fit_decreasing(padded_lengths(pieces.lengths, settings.pad_multiple), settings.seq_length)
        for p in range(len(packing)):
            writer.add_pack([segments[i] for i in packing.pack(p).tolist()])

    def _write_identities(self) -> None:
        path = identity_file(self._settings.output, self._task.unit.index)
        path.unlink(missing_ok=True)
        if self._seen:
            path.parent.mkdir(exist_ok=True)
            rows = [(key, extent.source, offset, line) for key, (extent, line, offset) in self._seen.items()]
            np.save(path, np.array(rows, dtype=IDENTITY_DTYPE), allow_pickle=False)


def _segment(document: _Document, start: int, stop: int, cut_flag: int) -> Segment:
    length = len(document.tokens)
    if start == 0 and stop == length:
        return Segment(document.tokens, document.weights, document.source, document.offset, 0, document.branch_starts)
    # a document with branches is never cut
    weights = None if document.weights is None else document.weights[start:stop]
    return Segment(document.tokens[start:stop], weights, document.source, document.offset, start, (), cut_flag)
