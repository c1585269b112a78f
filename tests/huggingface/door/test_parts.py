"""Parts of the door for other libraries: documents of their batches, axes of their meshes, shapes of their models."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import axis_of_mesh
from megacp.huggingface.door.context import context_parallel
from megacp.huggingface.door.loop import sum_gradients
from megacp.huggingface.door.mask import documents_of
from tests.huggingface.door.test_context import axis_of
from tests.ranks import grid, run_ranks


def test_documents_are_read_from_positions_and_masks() -> None:
    """Would catch rows of positions that do not begin at 0, and padding on the left that opens a document."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 0, 1]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    assert documents_of(None, mask).tolist() == [[0, 0, 0, 0, -1, -1], [-1, -1, 0, 0, 0, 0]]
    padded = documents_of(torch.tensor([[1, 1, 0, 1, 0, 1]]), mask[1:].bool())
    assert padded.tolist() == [[-1, -1, 2, 2, 3, 3]]  # numbers may have gaps
    assert documents_of(torch.arange(6)[None], mask).tolist() == documents_of(None, mask).tolist()


@pytest.mark.parametrize(
    ("positions", "mask", "message"),
    [
        (None, None, "got neither"),
        (torch.zeros(3, 2, 6), None, r"got \(3, 2, 6\)"),
        (torch.zeros(2, 6), torch.ones(2, 5), r"got \(2, 6\), \(2, 5\)"),
        (None, torch.tensor([[1, 1, 2, 2]]), "is no mask of padding"),
    ],
)
def test_other_positions_and_masks_are_refused(positions: Tensor | None, mask: Tensor | None, message: str) -> None:
    """Would catch a mask that numbers documents taken for one of padding."""
    with pytest.raises(ValueError, match=message):
        documents_of(positions, mask)


def narrow_values(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Attention with values of 3 columns and keys of 8, put back in order, and what torch computes of the whole."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 24, width, generator=generator).double() for width in (8, 8, 3)]
    axis = axis_of(2)
    block = context_parallel(axis, buffers=[torch.arange(24)], buffer_seq_dims=[0], transport="kv_exchange")
    with block as context:
        out = context.attend(*[context.cut(x, 2) for x in whole], True)
    found = torch.zeros(1, 2, 24, 3).double().index_copy(2, torch.from_numpy(context.local[0]), out)
    return all_reduce(found, axis), F.scaled_dot_product_attention(*whole, is_causal=True)


def test_values_may_be_narrower_than_keys() -> None:
    """As those of latent attention; would catch columns that are lost or left."""
    for found, want in run_ranks(narrow_values, 4):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def summed_shards(rank: int, world_size: int) -> tuple[list[tuple[int, ...]], float, bool]:
    """On a mesh of dp 2 x cp 2: the ranks of both axes, and the gradient of a weight that torch shards over dp."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    axis, outer = axis_of_mesh(mesh["cp"]), axis_of_mesh(mesh["dp"])
    assert all((x.local is None) == (grid(cp=world_size).cp.local is None) for x in (axis, outer)), "slow messages"
    layer = dist.fsdp.fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh["dp"])
    layer.weight.grad = torch.full_like(layer.weight, 10.0**rank)
    sum_gradients(layer.parameters(), axis)
    shard = layer.weight.grad.to_local()
    with pytest.raises(ValueError, match="one dimension of a mesh"):
        axis_of_mesh(mesh)
    ranks = [(x.rank, *x.global_ranks) for x in (axis, outer)]
    return ranks, shard[0, 0].item(), shard.shape == (2, 4) and bool((shard == shard[0, 0]).all())


def test_an_axis_is_one_dimension_of_a_mesh_and_shards_of_torch_are_summed_over_it() -> None:
    """Would catch sums over the ranks that hold other rows of a weight, and a place counted along another axis."""
    inner = [(0, 0, 1), (1, 0, 1), (0, 2, 3), (1, 2, 3)]
    outer = [(0, 0, 2), (0, 1, 3), (1, 0, 2), (1, 1, 3)]
    expected = [
        ([*both], 11.0 if rank < 2 else 1100.0, True) for rank, both in enumerate(zip(inner, outer, strict=True))
    ]
    assert run_ranks(summed_shards, 4) == expected
