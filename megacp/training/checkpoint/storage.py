"""The tensors of a checkpoint: one safetensors file a rank, and one index of which box of which
tensor lies where.

A rank writes its own boxes and reads the bytes it needs, and talks to no other rank in between.
Header and positions of every file follow from the index. Files are read, not mapped: a mapped file
that is cut ends the process.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import BinaryIO, NamedTuple

import torch

from megacp.engine.data_parallel.boxes import TensorBox
from megacp.storage.place import Place, open_stream, read_content, write_stream
from megacp.storage.wording import listed
from megacp.training.checkpoint.directory import FileRecord, damage

INDEX_FILE = "index.json"
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}
"""The dtypes of checkpoints by their names in the format."""
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_PART = 64 << 20
"""Bytes that are written at a time: a tensor that is mapped from a file is then never in memory as
a whole.
"""
_SECONDS = 10.0
"""Seconds to wait for a folder that another machine has just made: network file systems show it
late.
"""


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The first bytes of a safetensors file with these tensors (name, dtype, shape); their values
    follow in this order.

    Give the widest dtypes first: the format wants no gaps, and that order keeps every tensor
    aligned.
    """
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_values(stream: BinaryIO, tensor: torch.Tensor) -> None:
    """Append the values of one tensor of any device."""
    values = as_bytes(tensor.detach().cpu().contiguous())
    for begin in range(0, len(values), _PART):
        stream.write(values[begin : begin + _PART])


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class GlobalTensor(NamedTuple):
    """A tensor as the whole run sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredBox(NamedTuple):
    """A part of a global tensor, as it is stored."""

    name: str
    offsets: tuple[int, ...]
    extents: tuple[int, ...]


class Position(NamedTuple):
    """A stored box and its first byte, counted from the end of its file's header."""

    file: str
    begin: int
    box: StoredBox


@dataclass(frozen=True)
class Index:
    """The tensors by name, and the boxes of each file in the order of their values."""

    tensors: Mapping[str, GlobalTensor]
    files: Mapping[str, Sequence[StoredBox]]

    def header(self, file: str) -> bytes:
        """The bytes that this file must begin with: a box has its tensor's name, and its ranges
        unless it is whole.
        """
        entries = []
        for box in self.files[file]:
            shape, dtype = self.tensors[box.name]
            ranges = (
                f"{begin}:{begin + extent}"
                for begin, extent in zip(box.offsets, box.extents, strict=True)
            )
            name = box.name if box.extents == shape else f"{box.name}[{', '.join(ranges)}]"
            entries.append((name, dtype, box.extents))
        return header(entries)

    def positions(self) -> Iterator[Position]:
        """Every box of every file."""
        for file, boxes in self.files.items():
            begin = 0
            for box in boxes:
                yield Position(file, begin, box)
                begin += math.prod(box.extents) * self.tensors[box.name].dtype.itemsize

    def to_json(self) -> bytes:
        """The index as text."""
        tensors = {
            name: {"dtype": _NAMES[dtype], "shape": shape}
            for name, (shape, dtype) in self.tensors.items()
        }
        return json.dumps({"tensors": tensors, "files": self.files}, separators=(",", ":")).encode()


Stored = list[tuple[StoredBox, GlobalTensor]]
"""The boxes of one file, in its order, each with the tensor it is of."""


def write_boxes(folder: Place, rank: int, boxes: Sequence[TensorBox]) -> tuple[FileRecord, Stored]:
    """Write the file of a rank into a folder that all ranks share; what it holds. Talks to no other
    rank.
    """
    filled = sorted(
        (box for box in boxes if box.tensor.numel()), key=lambda box: -box.tensor.dtype.itemsize
    )
    stored: Stored = [
        (
            StoredBox(box.name, box.offsets, tuple(box.tensor.shape)),
            GlobalTensor(box.global_shape, box.tensor.dtype),
        )
        for box in filled
    ]

    def fill(stream: BinaryIO) -> None:
        own = Index({box.name: tensor for box, tensor in stored}, {"": [box for box, _ in stored]})
        stream.write(own.header(""))
        for box in filled:
            write_values(stream, box.tensor)

    return FileRecord(*write_stream(folder / rank_file(rank), fill, _SECONDS)), stored


def index_of(of_ranks: Sequence[Stored]) -> Index:
    """The index of the files of all ranks. ValueError unless the boxes of every tensor make it up,
    each element once.

    A wrong `counted` would write a copy twice, or a parameter on no rank.
    """
    tensors: dict[str, GlobalTensor] = {}
    boxes: Counter[StoredBox] = Counter()
    held: Counter[str] = Counter()
    for box, tensor in (stored for of_rank in of_ranks for stored in of_rank):
        if tensors.setdefault(box.name, tensor) != tensor:
            raise ValueError(f"two boxes disagree on shape or dtype of {box.name}")
        boxes[box] += 1
        held[box.name] += math.prod(box.extents)
    wrong = {name for name, (shape, _) in tensors.items() if held[name] != math.prod(shape)}
    wrong |= {box.name for box, count in boxes.items() if count > 1}
    if wrong:
        raise ValueError(f"the boxes of {listed(sorted(wrong), 20)} are not each element once")
    return Index(
        tensors,
        {rank_file(rank): [box for box, _ in stored] for rank, stored in enumerate(of_ranks)},
    )


class Payload:
    """Written tensors, opened for reading; `files` are their files as the manifest states them,
    already hashed.

    Raises ValueError when the index is damaged or refers to a file that `files` does not name.
    """

    def __init__(self, folder: Place, files: Mapping[str, FileRecord]) -> None:
        self._folder, self._records = folder, files
        if wrong := damage(folder, files, [INDEX_FILE]):
            raise ValueError(wrong[0])
        try:
            content = json.loads(read_content(folder / INDEX_FILE, files[INDEX_FILE].size))
            tensors = {
                name: GlobalTensor(tuple(value["shape"]), STORED_DTYPES[value["dtype"]])
                for name, value in content["tensors"].items()
            }
            boxes = {
                file: [
                    StoredBox(name, tuple(offsets), tuple(extents))
                    for name, offsets, extents in of_file
                ]
                for file, of_file in content["files"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{folder / INDEX_FILE} is damaged: it is no index: {error}"
            ) from error
        if unknown := set(boxes) - set(files):
            raise ValueError(
                f"{folder / INDEX_FILE} refers to files outside the manifest: {sorted(unknown)[:3]}"
            )
        self._index = Index(tensors, boxes)
        self._header = functools.cache(self._index.header)  # the converter reads tensor by tensor
        self._positions: dict[str, list[Position]] = defaultdict(list)
        for position in self._index.positions():
            self._positions[position.box.name].append(position)

    @property
    def tensors(self) -> Mapping[str, GlobalTensor]:
        """Global shape and dtype of every stored tensor by name."""
        return self._index.tensors

    def problems(self, boxes: Iterable[TensorBox]) -> list[str]:
        """Why these boxes cannot be read, one line per tensor: missing, another shape, another
        dtype.
        """
        found: dict[str, str] = {}
        for box in boxes:
            stored, asked = self.tensors.get(box.name), (tuple(box.global_shape), box.tensor.dtype)
            if stored is None:
                found[box.name] = f"{box.name} is not in the checkpoint"
            elif stored != asked:
                was, now = f"{stored.dtype} {stored.shape}", f"{asked[1]} {asked[0]}"
                found[box.name] = f"{box.name} is {was} in the checkpoint, {now} here"
        return list(found.values())

    def read(self, boxes: Iterable[TensorBox]) -> None:
        """Fill the boxes' tensors from the files that hold a part of them. `problems` must be
        empty.

        Raises ValueError when a file does not hold what the index says, OSError when it cannot be
        opened.
        """
        reads: dict[str, list[_Read]] = defaultdict(list)
        for box in boxes:
            found = 0
            for position in self._positions[box.name] if box.tensor.numel() else []:
                stored = position.box
                low = tuple(
                    map(max, stored.offsets, box.offsets)
                )  # the first of the elements that both have
                ends = zip(
                    stored.offsets, stored.extents, box.offsets, box.tensor.shape, strict=True
                )
                extents = tuple(
                    min(a + n, b + m) - begin for (a, n, b, m), begin in zip(ends, low, strict=True)
                )
                if all(extent > 0 for extent in extents):
                    reads[position.file].append(_Read(position, box, low, extents))
                    found += math.prod(extents)
            if found != box.tensor.numel():
                raise ValueError(
                    f"the checkpoint index does not cover {box.name}: {found} elements found"
                )
        for file, of_file in sorted(reads.items()):
            path, expected = self._folder / file, self._header(file)
            with open_stream(path, self._records[file].size) as stream:
                if stream.read(len(expected)) != expected:
                    raise ValueError(f"{path} does not hold the tensors that {INDEX_FILE} lists")
                for read in sorted(of_file, key=lambda read: read.position.begin):
                    _fill(stream, len(expected), read, path)

    def read_whole(self, name: str) -> torch.Tensor:
        """One tensor, whole, on the CPU."""
        shape, dtype = self.tensors[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.read([TensorBox(name, shape, (0,) * len(shape), tensor)])
        return tensor


class _Read(NamedTuple):
    """The elements that a stored box and a wanted one share."""

    position: Position
    wanted: TensorBox
    offsets: tuple[int, ...]
    """Coordinates of its first element in the global tensor."""
    extents: tuple[int, ...]


def _fill(stream: BufferedReader, begin: int, read: _Read, path: Place) -> None:
    """Read the bytes from the first shared element to the last, and copy those elements to where
    they are wanted.
    """
    (_, start, stored), wanted = read.position, read.wanted
    target = wanted.tensor.detach()
    for dim, (offset, low, extent) in enumerate(
        zip(wanted.offsets, read.offsets, read.extents, strict=True)
    ):
        target = target.narrow(dim, low - offset, extent)
    # row-major strides of the stored box; the shared elements lie in [first, first + count) of it
    strides = [math.prod(stored.extents[dim + 1 :]) for dim in range(len(stored.extents))]
    first = sum(
        (low - offset) * s
        for low, offset, s in zip(read.offsets, stored.offsets, strides, strict=True)
    )
    count = 1 + sum((extent - 1) * s for extent, s in zip(read.extents, strides, strict=True))
    # without gaps between them in the file, the values need no memory of their own
    direct = count == target.numel() and target.is_contiguous() and target.device.type == "cpu"
    values = target if direct else torch.empty(count, dtype=target.dtype)
    stream.seek(begin + start + first * target.dtype.itemsize)
    if stream.readinto(as_bytes(values)) != count * target.dtype.itemsize:
        raise ValueError(f"{path} was cut while it was read")
    if not direct:
        target.copy_(values.as_strided(read.extents, strides))
