"""The index of a payload: which global tensors there are, and which box of which tensor lies in which file.

A file's header and every position in it follow from the index. Its hash is in the manifest; what is checked of its
content is what a bug of ours could break: the boxes of a tensor hold as many elements as the tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megacp.core.checkpoint.tensor_file import DTYPES, NAMES, header
from megacp.core.storage.wording import listed


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
        """ValueError unless the boxes of every tensor differ and together have as many elements as it."""
        boxes = [box for of_file in self.files.values() for box in of_file]
        held: Counter[str] = Counter()
        for box in boxes:
            held[box.name] += math.prod(box.extents)
        problems = [
            f"the boxes of {name} together have {held[name]} elements, the tensor has {math.prod(shape)}"
            for name, (shape, _) in self.tensors.items()
            if held[name] != math.prod(shape)
        ]
        problems += [f"two boxes of {box.name} overlap" for box, count in Counter(boxes).items() if count > 1]
        if problems:
            raise ValueError(listed(problems, 20, "; "))


def read_index(content: bytes) -> Index:
    """The index in this text. Raises ValueError, without a path, when it is none."""
    try:
        stored = json.loads(content)
        tensors = {
            name: GlobalTensor(tuple(value["shape"]), DTYPES[value["dtype"]])
            for name, value in stored["tensors"].items()
        }
        files = {
            file: [StoredBox(name, tuple(offsets), tuple(extents)) for name, offsets, extents in boxes]
            for file, boxes in stored["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no index: {error}") from error
    return Index(tensors, files)
