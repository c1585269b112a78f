"""The index of a payload: which global tensors there are, and which box of which tensor lies in which file.

Key property: a file's header and every position in it follow from the index, so nothing that a file says of itself is
trusted. An index that passes describes tensors that its boxes tile and that are no larger than the files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megacp.core.checkpoint.tensor_file import DTYPES, NAMES, header
from megacp.core.storage.files import parse_json
from megacp.core.storage.json_fields import Fields
from megacp.core.storage.wording import listed

_MOST_ELEMENTS, _MOST_DIMS, _MOST_NAME = 1 << 62, 16, 1000
_MOST_CORNERS = 20_000_000
"""Of boxes of one tensor: two for each box and, beyond that, twice as many for each dim that a grid cuts."""


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
    """A stored box and the bytes of its values."""

    file: str
    begin: int
    """The first byte, counted from the end of the file's header."""
    box: StoredBox


@dataclass(frozen=True)
class Index:
    """The tensors by name, and the boxes of each file in the order of their values."""

    tensors: Mapping[str, GlobalTensor]
    files: Mapping[str, Sequence[StoredBox]]

    def header(self, file: str) -> bytes:
        """The bytes that this file must begin with."""
        return header((self._key(box), self.tensors[box.name].dtype, box.extents) for box in self.files[file])

    def _key(self, box: StoredBox) -> str:
        """A box's name in its file: the tensor's, followed by the ranges unless it is whole."""
        if box.extents == self.tensors[box.name].shape:
            return box.name
        ranges = (f"{begin}:{begin + extent}" for begin, extent in zip(box.offsets, box.extents, strict=True))
        return f"{box.name}[{', '.join(ranges)}]"

    def num_bytes(self, box: StoredBox) -> int:
        """Bytes of a box's values."""
        return math.prod(box.extents) * self.tensors[box.name].dtype.itemsize

    def positions(self) -> Iterator[Position]:
        """Every box of every file."""
        for file, boxes in self.files.items():
            begin = 0
            for box in boxes:
                yield Position(file, begin, box)
                begin += self.num_bytes(box)

    def to_json(self) -> bytes:
        """The index as text."""
        tensors = {name: {"dtype": NAMES[dtype], "shape": shape} for name, (shape, dtype) in self.tensors.items()}
        return json.dumps({"tensors": tensors, "files": self.files}, separators=(",", ":")).encode()

    def check(self) -> None:
        """ValueError unless the boxes of every tensor tile it."""
        boxes: dict[str, list[StoredBox]] = {name: [] for name in self.tensors}
        for of_file in self.files.values():
            for box in of_file:
                boxes[box.name].append(box)
        problems = [problem for name, (shape, _) in self.tensors.items() for problem in _gaps(name, shape, boxes[name])]
        if problems:
            raise ValueError(listed(problems, 20, "; "))


def read_index(content: bytes, sizes: Mapping[str, int]) -> Index:
    """The index in this text, of a payload whose files have `sizes` in bytes by name.

    Raises ValueError, without a path, unless every box lies in a tensor and a file, and the boxes tile their tensors.
    """
    try:
        fields = Fields(parse_json(content))
    except ValueError as error:
        raise ValueError(f"it is no index: {error}") from error
    stored: dict[str, list[StoredBox]] = {}
    tensors = fields.object("tensors")
    index = Index({name: _tensor(name, tensors) for name in tensors.values}, stored)
    for file, boxes in fields.object("files").values.items():
        if file not in sizes:
            raise ValueError(f"it refers to files that the manifest does not list: {file[:100]!r}")
        if type(boxes) is not list:
            raise ValueError(f"its boxes of {file} are no list")
        stored[file] = [_box(value, index.tensors, file) for value in boxes]
        needed = sum(map(index.num_bytes, stored[file]))
        if needed > sizes[file]:
            raise ValueError(f"the boxes in {file} have {needed} bytes, the file has {sizes[file]}")
    index.check()
    return index


def _tensor(name: str, tensors: Fields) -> GlobalTensor:
    if not name.isprintable() or len(name) > _MOST_NAME:
        raise ValueError("it has a tensor without a name")
    fields = tensors.object(name)
    dtype: str = fields.text("dtype")
    shape: Any = fields.values.get("shape")
    if dtype not in DTYPES or not _is_shape(shape):
        raise ValueError(f"{name} has no dtype or no shape that a checkpoint has")
    return GlobalTensor(tuple(shape), DTYPES[dtype])


def _is_shape(value: Any) -> bool:
    if type(value) is not list or len(value) > _MOST_DIMS:
        return False
    return all(type(n) is int and 0 <= n <= _MOST_ELEMENTS for n in value) and math.prod(value) <= _MOST_ELEMENTS


def _box(value: Any, tensors: Mapping[str, GlobalTensor], file: str) -> StoredBox:
    if type(value) is not list or [type(part) for part in value] != [str, list, list] or value[0] not in tensors:
        raise ValueError(f"it has a box of no tensor in {file}")
    name, offsets, extents = value
    shape = tensors[name].shape
    if not (_is_shape(offsets) and _is_shape(extents) and len(offsets) == len(extents) == len(shape)):
        raise ValueError(f"{name} has a box without offsets or extents in {file}")
    if any(begin + extent > size for begin, extent, size in zip(offsets, extents, shape, strict=True)):
        raise ValueError(f"{name} has a box in {file} that lies outside of it")
    return StoredBox(name, tuple(offsets), tuple(extents))


def _gaps(name: str, shape: tuple[int, ...], boxes: Sequence[StoredBox]) -> list[str]:
    """Reasons why the boxes of a tensor are no exact tiling of it."""
    held = sum(math.prod(box.extents) for box in boxes)
    if held != math.prod(shape):
        return [f"the boxes of {name} together have {held} elements, the tensor has {math.prod(shape)}"]
    return [] if held == 0 or _tile(shape, boxes) else [f"two boxes of {name} overlap"]


def _tile(shape: tuple[int, ...], boxes: Sequence[StoredBox]) -> bool:
    """Whether the boxes hold each element of a tensor once, from their corners alone.

    How often an element is held is a step function. Its steps along all dims lie at corners of boxes: `+1` at a box's
    first corner, times `-1` for each side on which a corner is at the end. A tiling leaves the tensor's own corners.
    """
    cut = [dim for dim, size in enumerate(shape) if any(box.extents[dim] != size for box in boxes)]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        raise ValueError(f"a tensor has {len(boxes)} boxes cut along {len(cut)} dims, too many to compare")
    steps: Counter[tuple[int, ...]] = Counter()
    whole = StoredBox("", (0,) * len(shape), shape)
    for box, sign in [(whole, -1), *((box, 1) for box in boxes)]:
        corners: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for dim in cut:  # a dim that no box cuts has the same two sides in all of them
            begin, end = box.offsets[dim], box.offsets[dim] + box.extents[dim]
            corners = [((*at, side), s) for at, step in corners for side, s in ((begin, step), (end, -step))]
        for at, step in corners:
            steps[at] += step
    return not any(steps.values())
