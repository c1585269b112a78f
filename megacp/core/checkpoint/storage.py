"""The payload of a checkpoint: one safetensors file a rank, and an index of the boxes in all of them.

A rank writes its own boxes and reads the bytes it needs, and talks to no other rank in between. Files are read, not
mapped: a mapped file that is cut ends the process.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader
from typing import BinaryIO, NamedTuple

import torch

from megacp.core.checkpoint.agree import on_rank_0
from megacp.core.checkpoint.index import GlobalTensor, Index, Position, StoredBox, read_index
from megacp.core.checkpoint.manifest import FileRecord
from megacp.core.checkpoint.names import TensorBox
from megacp.core.checkpoint.tensor_file import as_bytes, write_values
from megacp.core.distributed.collectives import gather_to_first
from megacp.core.distributed.grid import Axis
from megacp.core.storage.place import Place, open_stream, write_content, write_stream

INDEX_FILE = "index.json"
_SECONDS = 10.0
"""For which a folder that another machine has just made is waited for: network file systems show it late."""


class PayloadError(RuntimeError):
    """Writing the payload failed on some rank; the message names rank and reason, the same on all ranks."""


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


_Stored = tuple[StoredBox, GlobalTensor]
"""A box that this rank writes, and the tensor it is of."""


class PayloadWriter:
    """One payload on its way into a folder: made by all ranks together, written by each alone.

    The boxes' values are read by `write`, the only part that may run on another thread; it talks to no other rank.
    Raises PayloadError on all ranks when the boxes do not make up their tensors.
    """

    def __init__(self, boxes: Sequence[TensorBox], world: Axis) -> None:
        self._rank = world.rank
        filled = (box for box in boxes if box.tensor.numel())
        self._boxes = sorted(filled, key=lambda box: -box.tensor.dtype.itemsize)  # stable, see `tensor_file.header`
        self._stored: list[_Stored] = [
            (
                StoredBox(box.name, box.offsets, tuple(box.tensor.shape)),
                GlobalTensor(box.global_shape, box.tensor.dtype),
            )
            for box in self._boxes
        ]
        self._index = b""
        of_ranks = gather_to_first(self._stored, world)
        on_rank_0(world, lambda: self._make_index(of_ranks), PayloadError)

    def _make_index(self, of_ranks: list[list[_Stored]] | None) -> None:
        assert of_ranks is not None
        tensors: dict[str, GlobalTensor] = {}
        for box, tensor in (stored for of_rank in of_ranks for stored in of_rank):
            if tensors.setdefault(box.name, tensor) != tensor:
                raise ValueError(f"two boxes disagree on shape or dtype of {box.name}")
        index = Index(tensors, {rank_file(rank): [box for box, _ in stored] for rank, stored in enumerate(of_ranks)})
        index.check()
        self._index = index.to_json()

    def write(self, folder: Place) -> dict[str, FileRecord]:
        """Write this rank's boxes, and on rank 0 the index, into a folder that all ranks share; what was written."""
        name = rank_file(self._rank)
        records = {name: FileRecord(*write_stream(folder / name, self._fill, _SECONDS))}
        if self._rank == 0:
            write_content(folder / INDEX_FILE, self._index)
            records[INDEX_FILE] = FileRecord(len(self._index), hashlib.sha256(self._index).hexdigest())
        return records

    def _fill(self, stream: BinaryIO) -> None:
        name = rank_file(self._rank)
        own = Index({box.name: tensor for box, tensor in self._stored}, {name: [box for box, _ in self._stored]})
        stream.write(own.header(name))
        for box in self._boxes:
            write_values(stream, box.tensor)


class Payload:
    """A written payload, opened for reading; `files` are its files as the manifest states them, already hashed.

    Raises ValueError when the index is damaged or refers to a file that `files` does not name.
    """

    def __init__(self, folder: Place, files: Mapping[str, FileRecord]) -> None:
        self._folder, self._records = folder, files
        path = folder / INDEX_FILE
        stated = files[INDEX_FILE]
        with open_stream(path, stated.size) as stream:
            content = stream.read()
        if hashlib.sha256(content).hexdigest() != stated.sha256:
            raise ValueError(f"{path} is damaged: its sha256 is not the one in the manifest")
        try:
            self._index = read_index(content)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if unknown := set(self._index.files) - set(files):
            raise ValueError(f"{path} refers to files that the manifest does not list: {sorted(unknown)[:3]}")
        self._positions: dict[str, list[Position]] = defaultdict(list)
        for position in self._index.positions():
            self._positions[position.box.name].append(position)

    @property
    def tensors(self) -> Mapping[str, GlobalTensor]:
        """Global shape and dtype of every stored tensor by name."""
        return self._index.tensors

    def problems(self, boxes: Iterable[TensorBox]) -> list[str]:
        """Why these boxes cannot be read, one line per tensor: missing, another shape, another dtype."""
        found: dict[str, str] = {}
        for box in boxes:
            stored, asked = self.tensors.get(box.name), (tuple(box.global_shape), box.tensor.dtype)
            if stored is None:
                found[box.name] = f"{box.name} is not in the checkpoint"
            elif stored != asked:
                found[box.name] = f"{box.name} is {stored.dtype} {stored.shape} in the checkpoint, " + (
                    f"{asked[1]} {asked[0]} here"
                )
        return list(found.values())

    def read(self, boxes: Iterable[TensorBox]) -> None:
        """Fill the boxes' tensors from the files that hold a part of them. `problems` must be empty.

        Raises ValueError when a file does not hold what the index says, OSError when it cannot be opened.
        """
        reads: dict[str, list[_Read]] = defaultdict(list)
        for box in boxes:
            found = 0
            for position in self._positions[box.name] if box.tensor.numel() else []:
                shared = _shared(position, box)
                if shared is not None:
                    reads[position.file].append(shared)
                    found += math.prod(shared.extents)
            if found != box.tensor.numel():
                raise ValueError(f"the checkpoint index does not cover {box.name}: {found} elements found")
        for file, of_file in sorted(reads.items()):
            path, expected = self._folder / file, self._index.header(file)
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
    """In the global tensor."""
    extents: tuple[int, ...]


def _shared(position: Position, wanted: TensorBox) -> _Read | None:
    stored = position.box
    low = tuple(map(max, stored.offsets, wanted.offsets))
    ends = zip(stored.offsets, stored.extents, wanted.offsets, wanted.tensor.shape, strict=True)
    extents = tuple(min(a + n, b + m) - begin for (a, n, b, m), begin in zip(ends, low, strict=True))
    return _Read(position, wanted, low, extents) if all(extent > 0 for extent in extents) else None


def _fill(stream: BufferedReader, begin: int, read: _Read, path: Place) -> None:
    """Read the bytes from the first shared element to the last, and copy those elements to where they are wanted."""
    (_, start, stored), wanted = read.position, read.wanted
    target = wanted.tensor.detach()
    for dim, (offset, low, extent) in enumerate(zip(wanted.offsets, read.offsets, read.extents, strict=True)):
        target = target.narrow(dim, low - offset, extent)
    # row-major strides of the stored box; the shared elements lie in [first, first + count) of it
    strides = [math.prod(stored.extents[dim + 1 :]) for dim in range(len(stored.extents))]
    first = sum((low - offset) * s for low, offset, s in zip(read.offsets, stored.offsets, strides, strict=True))
    count = 1 + sum((extent - 1) * s for extent, s in zip(read.extents, strides, strict=True))
    # without gaps between them in the file, the values need no memory of their own
    direct = count == target.numel() and target.is_contiguous() and target.device.type == "cpu"
    values = target if direct else torch.empty(count, dtype=target.dtype)
    stream.seek(begin + start + first * target.dtype.itemsize)
    if stream.readinto(as_bytes(values)) != count * target.dtype.itemsize:
        raise ValueError(f"{path} was cut while it was read")
    if not direct:
        target.copy_(values.as_strided(read.extents, strides))
