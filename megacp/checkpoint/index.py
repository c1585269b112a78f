"""The index of a payload: a pickle of DCP, read by a decoder that knows only what DCP writes into it.

Key property: no bytes run code, take more memory than they have themselves times a constant, or end in anything but a
ValueError. Each opcode, class, key and argument is one that a megacp index has, and each tensor is as large as its
files can hold. Rejected: `pickle.Unpickler` with a `find_class` of ours: its memo grows to whatever index a pickle
names, and hashing or showing nested tuples takes for ever or ends the process.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

_CLASSES = {
    cls: {field.name for field in fields(cls)}
    for cls in (Metadata, MetadataIndex, TensorStorageMetadata, ChunkStorageMetadata, StorageMeta, _StorageInfo)
}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_GLOBALS: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): cls for cls in (*_CLASSES, TensorProperties, _MEM_FORMAT_ENCODING)},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("builtins", "getattr"): getattr,
}
"""Everything the index of a megacp checkpoint refers to."""
_OPCODES = (
    *("PROTO", "FRAME", "MARK", "STOP", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS"),
    *("SETITEM", "SETITEMS", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINUNICODE", "SHORT_BINUNICODE", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
)
_MOST_ELEMENTS, _MOST_DIMS = 1 << 62, 16
_MOST_COMPARISONS = 20_000_000
"""Of boxes of one tensor: a grid needs as many as it has boxes, times its tensor-parallel ranks."""


class _Decoder(pickle._Unpickler):  # type: ignore[name-defined, misc] # the one in Python, whose steps can be taken over
    dispatch: dict[int, Callable[[Any], None]] = {
        ord(getattr(pickle, name)): pickle._Unpickler.dispatch[ord(getattr(pickle, name))]  # type: ignore[attr-defined]
        for name in _OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise ValueError(f"it refers to {module[:60]}.{name[:60]}, which no megacp checkpoint does")
        return _GLOBALS[module, name]

    def load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if not isinstance(cls, type) or not (cls in _CLASSES or cls is TensorProperties) or arguments != ():
            raise ValueError("it makes an object that no megacp checkpoint has")
        self.append(cls.__new__(cls))

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(_called(function, arguments))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is TensorProperties:
            _set_properties(target, state)
        elif type(target) in _CLASSES and type(state) is dict and set(state) <= _CLASSES[type(target)]:
            target.__dict__.update(state)
        else:
            raise ValueError("it gives an object a state that no megacp checkpoint has")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    dispatch |= {
        pickle.NEWOBJ[0]: load_newobj,
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n <= _MOST_ELEMENTS for n in value)


def _called(function: Any, arguments: Any) -> Any:
    """The few calls of an index, with arguments that cost nothing to look at."""
    if type(arguments) is tuple:
        if function is torch.Size and len(arguments) == 1 and _is_shape(arguments[0]):
            return torch.Size(arguments[0])
        if function is _MEM_FORMAT_ENCODING and len(arguments) == 1 and type(arguments[0]) is int:
            return _MEM_FORMAT_ENCODING(arguments[0])
        if function is _get_layout and len(arguments) == 1 and type(arguments[0]) is str:
            return _get_layout(arguments[0])
        # what Python before 3.11.4 writes for a member of an enumeration
        if function is getattr and len(arguments) == 2 and arguments[0] is _MEM_FORMAT_ENCODING:
            if type(arguments[1]) is str and arguments[1] in _MEM_FORMAT_ENCODING.__members__:
                return _MEM_FORMAT_ENCODING[arguments[1]]
            raise ValueError("it looks up what is no member of an enumeration, which no megacp checkpoint does")
    raise ValueError("it calls what no megacp checkpoint calls")


def _set_properties(target: TensorProperties, state: Any) -> None:
    types = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or [type(value) for value in state] != list(types):
        raise ValueError("it describes a tensor as no megacp checkpoint does")
    target.__setstate__(state)


def _set_items(target: Any, items: list[Any]) -> None:
    """Keys are text and places of boxes: hashing anything else could take for ever."""
    if type(target) is not dict or len(items) % 2:
        raise ValueError("it gives entries to what has none")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not (type(key) is str or (type(key) is MetadataIndex and _is_place(key))):
            raise ValueError("it has a key that no megacp checkpoint has")
        target[key] = value


def _is_place(key: MetadataIndex) -> bool:
    return type(key.fqn) is str and type(key.offset) is torch.Size


def read_index(content: bytes, sizes: Mapping[str, int]) -> Metadata:
    """The index in these bytes, of a payload whose files have `sizes` in bytes by name.

    Every tensor in it is tiled by its boxes, and every box lies in one of the files, which is large enough for it.
    Raises ValueError, without a path, for anything else.
    """
    try:
        metadata = _Decoder(io.BytesIO(content)).load()
        if type(metadata) is not Metadata:
            raise ValueError("it is no index")
        _check(metadata, sizes)
    except ValueError:
        raise
    except Exception as error:  # whatever broken bytes make of themselves
        raise ValueError(f"it is no index: {type(error).__name__}") from error
    return metadata


def _check(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if type(entries) is not dict or type(places) is not dict:
        raise ValueError("it has no table of tensors or of boxes")
    expected = 0
    for name, entry in entries.items():
        if type(name) is not str or not name.isprintable() or len(name) > 1000:
            raise ValueError("it has a tensor without a name")
        _check_entry(name, entry)
        expected += len(entry.chunks)
        for chunk in entry.chunks:
            info = places.get(MetadataIndex(name, chunk.offsets))
            _check_place(name, info, math.prod(chunk.sizes) * entry.properties.dtype.itemsize, sizes)
    if len(places) != expected:
        raise ValueError(f"it has {len(places)} boxes in files and {expected} in tensors")


def _check_entry(name: str, entry: Any) -> None:
    if type(entry) is not TensorStorageMetadata or type(entry.properties) is not TensorProperties:
        raise ValueError(f"{name} is no tensor")
    if entry.properties.dtype not in _DTYPES or type(entry.chunks) is not list or not _is_size(entry.size):
        raise ValueError(f"{name} has no dtype, no shape or no boxes")
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata or not (_is_size(chunk.offsets) and _is_size(chunk.sizes)):
            raise ValueError(f"{name} has a box without offsets or sizes")
        inside = zip(chunk.offsets, chunk.sizes, entry.size, strict=False)
        ranks = {len(chunk.offsets), len(chunk.sizes), len(entry.size)}
        if len(ranks) > 1 or any(a + n > m for a, n, m in inside):
            raise ValueError(f"{name} has a box that lies outside of it")
    problems = coverage(name, entry)
    if problems:
        raise ValueError(problems[0])


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size and len(value) <= _MOST_DIMS and math.prod(value) <= _MOST_ELEMENTS


def _check_place(name: str, info: Any, least: int, sizes: Mapping[str, int]) -> None:
    if type(info) is not _StorageInfo or type(info.relative_path) is not str:
        raise ValueError(f"a box of {name} is in no file")
    if info.relative_path not in sizes:
        raise ValueError(f"it refers to files that the manifest does not list: {info.relative_path[:100]!r}")
    if type(info.offset) is not int or type(info.length) is not int or info.offset < 0 or info.transform_descriptors:
        raise ValueError(f"a box of {name} has no place in {info.relative_path}")
    size = sizes[info.relative_path]
    if not least <= info.length <= size - info.offset:
        raise ValueError(
            f"a box of {name} has {least} bytes, its place in {info.relative_path} is {_shown(info.length)} bytes from "
            f"{_shown(info.offset)} on, the file has {size}"
        )


def _shown(number: int) -> str:
    return str(number) if abs(number) <= sys.maxsize else "too many"


def coverage(name: str, entry: TensorStorageMetadata) -> list[str]:
    """Reasons why the boxes of a tensor are no exact tiling of it."""
    held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if held != math.prod(entry.size):
        return [f"the boxes of {name} together have {held} elements, the tensor has {math.prod(entry.size)}"]
    return [f"two boxes of {name} overlap"] if _overlap(entry.chunks) else []


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two boxes share an element: a sweep along dim 0, in which few boxes are open at a time."""
    opened: list[ChunkStorageMetadata] = []
    comparisons = 0
    for chunk in sorted(chunks, key=lambda chunk: tuple(chunk.offsets)):
        comparisons += len(opened)
        if comparisons > _MOST_COMPARISONS:
            raise ValueError(f"a tensor has {len(chunks)} boxes side by side, too many to compare")
        opened = [o for o in opened if not o.sizes or o.offsets[0] + o.sizes[0] > chunk.offsets[0]]
        for other in opened:
            sides = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                return True
        opened.append(chunk)
    return False
