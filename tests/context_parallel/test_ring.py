"""The ring: which messages are under way while a step is computed."""

from __future__ import annotations

import numpy as np
import torch

from megacp.core.context_parallel.attention import core_attention
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.ring import RingAttention
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.distributed.grid import Axis
from megacp.core.ops.kernel import KV, QKV, Partial, Saved
from megacp.core.ops.mask import TileTable
from megacp.core.ops.tile_kernels import MathKernel
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch


class WatchingKernel(MathKernel):
    """A kernel that notes how many messages of an axis are under way while it computes."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.messages: tuple[list[int], list[int]] = ([], [])

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        self.messages[0].append(len(self.axis.calls.under_way()))
        super().attend(partial, qkv, table, scale)

    def attend_backward(self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV) -> None:
        self.messages[1].append(len(self.axis.calls.under_way()))
        super().attend_backward(saved, kv, table, scale, grads)


def watched(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Messages under way in each step of a ring, forward and backward."""
    cp = grid(cp=world_size).cp
    kernel = WatchingKernel(cp)
    plan = shard_batch(random_batch(np.random.default_rng(0), 64, documents=1), cp, LAYOUTS["zigzag"]).plan
    leaves = [torch.ones(64 // world_size, 2, 8, requires_grad=True) for _ in range(3)]
    core_attention(*leaves, transport=RingAttention(cp, kernel), plan=plan, scale=1.0).sum().backward()
    return kernel.messages


def test_a_rings_messages_are_under_way_while_a_step_is_computed() -> None:
    """The next keys beside all steps but the last; gradients, begun by the second step, beside the third and fourth."""
    assert run_ranks(watched, 4) == [([1, 1, 1, 0], [1, 1, 2, 1])] * 4
