"""A safetensors file, written one tensor after the other: 8 bytes of length, a JSON header, then the values.

`safetensors.torch.save_file` would copy all tensors to the CPU first and turn a full disk into text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}
"""The dtypes of checkpoints by their names in the format."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PART = 64 << 20
"""Bytes that are written at a time: a tensor that is mapped from a file is then never in memory as a whole."""


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The first bytes of a file with these tensors (name, dtype, shape), whose values follow in the same order.

    Give the widest dtypes first: the format wants no gaps, and that order keeps every tensor aligned.
    """
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
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
