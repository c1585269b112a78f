"""Tensors of a checkpoint: one safetensors file per rank, and an index of the boxes in these files.

A rank writes its own boxes and reads the bytes that it needs, without communication. The index
determines the header of every file and the positions of the boxes. Files are not memory-mapped,
because the process would be killed if a mapped file were truncated.
"""

from __future__ import annotations

import functools
import itertools
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
"""Dtypes in checkpoints, by their names in the safetensors format."""
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_PART = 64 << 20
"""Bytes per write, so that a memory-mapped tensor is never completely in memory."""
_SECONDS = 10.0
"""Seconds to wait for a folder that another machine has just created: on network file systems, it
may appear late.
"""


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file with these tensors (name, dtype, shape).

    The values follow in the same order. Tensors with the widest dtypes should come first: the
    format does not allow gaps, and this order keeps every tensor aligned.
    """
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pad, so that the values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_values(stream: BinaryIO, tensor: torch.Tensor) -> None:
    """Append the values of a tensor, which may be on any device."""
    values = as_bytes(tensor.detach().cpu().contiguous())
    # the system can drop each part of a memory-mapped tensor from memory after it is written
    for begin in range(0, len(values), _PART):
        stream.write(values[begin : begin + _PART])


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class GlobalTensor(NamedTuple):
    """Shape and dtype of a tensor that ranks may have divided into boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredBox(NamedTuple):
    """A stored part of a global tensor."""

    name: str
    offsets: tuple[int, ...]
    extents: tuple[int, ...]


class Position(NamedTuple):
    """A stored box, its file, and the offset of its first byte after the file's header."""

    file: str
    begin: int
    box: StoredBox


@dataclass(frozen=True)
class Index:
    """Tensors by name, and the boxes in each file, in stored order."""

    tensors: Mapping[str, GlobalTensor]
    files: Mapping[str, Sequence[StoredBox]]

    def header(self, file: str) -> bytes:
        """Return the header that `file` must have.

        In the header, a box that covers its tensor has the tensor's name. The name of any other box
        also includes its ranges, as in `name[0:4, 8:16]`.
        """
        entries = []
        for box in self.files[file]:
            shape, dtype = self.tensors[box.name]
            name = box.name
            if box.extents != shape:
                ranges = []
                for begin, extent in zip(box.offsets, box.extents, strict=True):
                    ranges.append(f"{begin}:{begin + extent}")
                name += f"[{', '.join(ranges)}]"
            entries.append((name, dtype, box.extents))
        return header(entries)

    def positions(self) -> Iterator[Position]:
        """Yield the position of every box in every file."""
        for file, boxes in self.files.items():
            begin = 0  # boxes are stored without gaps
            for box in boxes:
                yield Position(file, begin, box)
                begin += math.prod(box.extents) * self.tensors[box.name].dtype.itemsize

    def to_json(self) -> bytes:
        """Return the contents of the index file."""
        tensors = {}
        for name, (shape, dtype) in self.tensors.items():
            tensors[name] = {"dtype": _NAMES[dtype], "shape": shape}
        content = {"tensors": tensors, "files": self.files}
        return json.dumps(content, separators=(",", ":")).encode()


Stored = list[tuple[StoredBox, GlobalTensor]]
"""Boxes of one file in stored order, each with its global tensor."""


def write_boxes(folder: Place, rank: int, boxes: Sequence[TensorBox]) -> tuple[FileRecord, Stored]:
    """Write a rank's file to a folder shared by all ranks, without communication.

    Return the file's size and hash, and the boxes in it.
    """
    # `header` needs the widest dtypes first; empty boxes are not stored
    filled = [box for box in boxes if box.tensor.numel()]
    filled.sort(key=lambda box: -box.tensor.dtype.itemsize)
    stored: Stored = []
    for box in filled:
        part = StoredBox(box.name, box.offsets, tuple(box.tensor.shape))
        stored.append((part, GlobalTensor(box.global_shape, box.tensor.dtype)))

    def fill(stream: BinaryIO) -> None:
        # create the header with an index of only this file
        tensors = {part.name: tensor for part, tensor in stored}
        own = Index(tensors, {"": [part for part, _ in stored]})
        stream.write(own.header(""))
        for box in filled:
            write_values(stream, box.tensor)

    return FileRecord(*write_stream(folder / rank_file(rank), fill, _SECONDS)), stored


def index_of(of_ranks: Sequence[Stored]) -> Index:
    """Return the index for the files of all ranks.

    Raise ValueError unless every tensor's boxes together contain each of its elements once. An
    error in the choice of boxes would store a copy twice, or not store a parameter at all.
    """
    tensors: dict[str, GlobalTensor] = {}
    boxes: Counter[StoredBox] = Counter()
    held: Counter[str] = Counter()  # number of elements found, by tensor
    for box, tensor in itertools.chain.from_iterable(of_ranks):
        if tensors.setdefault(box.name, tensor) != tensor:
            raise ValueError(f"two boxes disagree on shape or dtype of the tensor {box.name}")
        boxes[box] += 1
        held[box.name] += math.prod(box.extents)
    # counting elements reveals missing parts, and counting boxes reveals copies
    wrong = {name for name, (shape, _) in tensors.items() if held[name] != math.prod(shape)}
    wrong |= {box.name for box, count in boxes.items() if count > 1}
    if wrong:
        names = listed(sorted(wrong), 20)
        raise ValueError(f"the boxes of {names} do not contain each element exactly once")
    files = {}
    for rank, stored in enumerate(of_ranks):
        files[rank_file(rank)] = [box for box, _ in stored]
    return Index(tensors, files)


class Payload:
    """Tensors of a checkpoint, opened for reading.

    `files` are the records in the manifest; the files have already been verified. The constructor
    raises ValueError if the index is damaged or refers to a file that is not in `files`.
    """

    def __init__(self, folder: Place, files: Mapping[str, FileRecord]) -> None:
        self._folder = folder
        self._records = files
        # hash only the index; the other files may be large, and have already been hashed
        wrong = damage(folder, files, [INDEX_FILE])
        if wrong:
            raise ValueError(wrong[0])
        try:
            content = json.loads(read_content(folder / INDEX_FILE, files[INDEX_FILE].size))
            tensors = {}
            for name, value in content["tensors"].items():
                dtype = STORED_DTYPES[value["dtype"]]
                tensors[name] = GlobalTensor(tuple(value["shape"]), dtype)
            boxes = {}
            for file, of_file in content["files"].items():
                boxes[file] = [
                    StoredBox(name, tuple(offsets), tuple(extents))
                    for name, offsets, extents in of_file
                ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{folder / INDEX_FILE} is damaged: it is not a checkpoint index: {error}"
            ) from error
        unknown = set(boxes) - set(files)
        if unknown:
            raise ValueError(
                f"{folder / INDEX_FILE} refers to files that are not in the manifest: "
                f"{sorted(unknown)[:3]}"
            )
        self._index = Index(tensors, boxes)
        # cache headers, because the converter reads one tensor at a time
        self._header = functools.cache(self._index.header)
        self._positions: dict[str, list[Position]] = defaultdict(list)
        for position in self._index.positions():
            self._positions[position.box.name].append(position)

    @property
    def tensors(self) -> Mapping[str, GlobalTensor]:
        """Global shape and dtype of every stored tensor, by name."""
        return self._index.tensors

    def problems(self, boxes: Iterable[TensorBox]) -> list[str]:
        """Return why these boxes cannot be read.

        There is one line per tensor that is missing, or that has a different shape or dtype.
        """
        found: dict[str, str] = {}
        for box in boxes:
            stored = self.tensors.get(box.name)
            shape = tuple(box.global_shape)
            dtype = box.tensor.dtype
            if stored is None:
                found[box.name] = f"{box.name} is not in the checkpoint"
            elif stored != (shape, dtype):
                was = f"{stored.dtype} {stored.shape}"
                found[box.name] = (
                    f"{box.name} is {was} in the checkpoint, but {dtype} {shape} in this run"
                )
        return list(found.values())

    def read(self, boxes: Iterable[TensorBox]) -> None:
        """Fill the boxes' tensors from all files that contain parts of them.

        `problems` must have returned an empty list. Raise ValueError if a file does not match the
        index, and OSError if it cannot be opened.
        """
        # Collect the reads first, so that each file is opened once and read from start to end.
        reads: dict[str, list[_Read]] = defaultdict(list)
        for box in boxes:
            if not box.tensor.numel():
                continue
            found = 0
            for position in self._positions[box.name]:
                read = _overlap(position, box)
                if read is not None:
                    reads[position.file].append(read)
                    found += math.prod(read.extents)
            if found != box.tensor.numel():
                raise ValueError(
                    f"the checkpoint index does not cover {box.name}: found {found} of its elements"
                )
        for file, of_file in sorted(reads.items()):
            path = self._folder / file
            expected = self._header(file)
            with open_stream(path, self._records[file].size) as stream:
                # a matching header ensures that the file has these tensors in this order
                if stream.read(len(expected)) != expected:
                    raise ValueError(f"{path} does not contain the tensors listed in {INDEX_FILE}")
                for read in sorted(of_file, key=lambda read: read.position.begin):
                    _fill(stream, len(expected), read, path)

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        shape, dtype = self.tensors[name]
        # one box at offset 0 that covers the tensor
        tensor = torch.empty(shape, dtype=dtype)
        self.read([TensorBox(name, shape, (0,) * len(shape), tensor)])
        return tensor


class _Read(NamedTuple):
    """The elements that a stored box and a wanted box share."""

    position: Position
    wanted: TensorBox
    offsets: tuple[int, ...]
    """Coordinates of the first shared element in the global tensor."""
    extents: tuple[int, ...]


def _overlap(position: Position, wanted: TensorBox) -> _Read | None:
    """Return the elements that a stored box and a wanted box share; None if there are none."""
    stored = position.box
    offsets = tuple(map(max, stored.offsets, wanted.offsets))
    extents = []
    for begin, stored_begin, stored_extent, wanted_begin, wanted_extent in zip(
        offsets, stored.offsets, stored.extents, wanted.offsets, wanted.tensor.shape, strict=True
    ):
        end = min(stored_begin + stored_extent, wanted_begin + wanted_extent)
        extents.append(end - begin)
    if any(extent <= 0 for extent in extents):
        return None
    return _Read(position, wanted, offsets, tuple(extents))


def _fill(stream: BufferedReader, begin: int, read: _Read, path: Place) -> None:
    """Copy the shared elements from a file to the wanted tensor.

    The file's values begin at byte `begin`. All bytes from the first to the last shared element are
    read at once.
    """
    _, start, stored = read.position
    wanted = read.wanted
    target = wanted.tensor.detach()
    for dim, extent in enumerate(read.extents):
        target = target.narrow(dim, read.offsets[dim] - wanted.offsets[dim], extent)
    # In row-major order, the shared elements are within [first, first + count) of the stored box.
    strides = [math.prod(stored.extents[dim + 1 :]) for dim in range(len(stored.extents))]
    first = 0
    count = 1
    for dim, stride in enumerate(strides):
        first += (read.offsets[dim] - stored.offsets[dim]) * stride
        count += (read.extents[dim] - 1) * stride
    # If the file has no other elements in between, read directly into the target.
    direct = count == target.numel() and target.is_contiguous() and target.device.type == "cpu"
    # otherwise read into a buffer of [count] elements
    values = target if direct else torch.empty(count, dtype=target.dtype)
    stream.seek(begin + start + first * target.dtype.itemsize)
    if stream.readinto(as_bytes(values)) != count * target.dtype.itemsize:
        raise ValueError(f"{path} was truncated while it was read")
    if not direct:  # skip other elements in between
        target.copy_(values.as_strided(read.extents, strides))
