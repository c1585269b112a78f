"""Ranges of arrays as boxes, and flat slices of fused, padded, cut parameters as boxes of global tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.checkpoint.names import boxes_of_slice, boxes_to_load, boxes_to_save, split_range
from megacp.core.data_parallel.shards import ParameterSlice
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    low = draw(st.integers(0, math.prod(shape)))
    return shape, low, draw(st.integers(low, math.prod(shape)))


@settings(deadline=None, derandomize=True, max_examples=500)
@given(ranges())
@pytest.mark.slow
def test_boxes_of_a_range_are_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """Would catch a range inside one row, ends at row borders, more boxes than needed, wrong dimensions."""
    shape, low, high = case
    array = np.arange(math.prod(shape)).reshape(shape)
    boxes = split_range(shape, low, high)
    parts = [array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert [int(x) for part in parts for x in part] == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    """Would catch a box per row, which makes files of a million entries."""
    assert split_range((1000, 8), 8, 7992) == [((1, 0), (998, 8))]
    assert split_range((1000, 8), 5, 7993) == [((0, 5), (1, 3)), ((1, 0), (998, 8)), ((999, 0), (1, 1))]


def test_a_slice_of_a_fused_and_padded_parameter_lands_in_its_pieces() -> None:
    """Would catch padding rows that are saved, pieces mixed up, offsets of the local part forgotten."""
    pieces = (TensorSlice("q", (4, 3), (2, 0), (2, 3), start=0), TensorSlice("k", (2, 6), (1, 3), (1, 3), start=2))
    local = torch.arange(12.0)  # [4, 3]: two rows of q, one of k, one of padding
    part = ParameterSlice(ParameterSpec(pieces), (4, 3), 4, local[4:])
    boxes = boxes_of_slice("model", part)
    assert [(b.name, b.global_shape, b.offsets, b.tensor.tolist()) for b in boxes] == [
        ("model.q", (4, 3), (3, 1), [[4.0, 5.0]]),
        ("model.k", (2, 6), (1, 3), [[6.0, 7.0, 8.0]]),
    ]
    boxes[0].tensor.fill_(-1)
    assert local[4:6].tolist() == [-1.0, -1.0]


def test_copies_are_read_but_not_written() -> None:
    """Would catch two ranks that write the same element, and a tied head that stays empty after loading."""
    spec = ParameterSpec((TensorSlice("w", (2,), (0,), (2,)),), counted=False)
    part = ParameterSlice(spec, (2,), 0, torch.zeros(2))
    assert boxes_to_save([part], {"exp_avg": [part]}) == []
    assert [b.name for b in boxes_to_load([part], {"exp_avg": [part]})] == ["model.w", "optimizer.exp_avg.w"]
