"""A layer of experts, forward and backward, beside the transformers library's two ways: a loop, and grouped products.

Processor seconds of ranks with one thread each, by turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch

from bench.report import Goal, Part, Seconds, take_turns, timed
from megacp.core.backends.mlp import keep
from megacp.core.backends.native import NativeBackend
from megacp.core.config.parallel import GridShape
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.collectives import barrier
from megacp.core.distributed.grid import Axis, build_grid
from megacp.core.expert_parallel.layer import MixtureOfExperts
from megacp.core.expert_parallel.route import Routes
from megacp.core.ops.mask import Metadata
from megacp.verify.spawn import RankPool

SIZES: dict[str, Value] = {"num_layers": 1, "hidden_size": 512, "num_attention_heads": 8, "norm_position": "after"}
EXPERTS: dict[str, Value] = {"num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 256}
GOALS = {"ep 1": 1.0, "dp 2, ep 1": 1.1, "dp 2, ep 2": 1.2}
"""Work of ours, over that of the library's faster way."""


def ours(rank: int, world_size: int, tokens: int, ep: int) -> Seconds:
    """A rank's part of the tokens."""
    grid = build_grid(GridShape(dp=world_size, ep=ep), rank)
    config = with_values(RunConfig(), {**SIZES, **EXPERTS})
    layer = MixtureOfExperts(0, config.model, NativeBackend(grid, config))
    row = Metadata.of_documents(np.zeros(tokens // world_size, int))
    plan = AttentionPlan(np.arange(len(row))[None], row, 0)
    return _measured(layer, rank, len(row), lambda x: layer(x, keep, Routes.of(plan, grid.tp, x.device)), grid.dp)


def library(rank: int, world_size: int, tokens: int, way: str) -> Seconds:
    """One process; `way` is a value of the library's `experts_implementation`."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = OlmoeConfig(hidden_size=512, intermediate_size=256, num_experts=32, num_experts_per_tok=4)
    config.norm_topk_prob, config._experts_implementation = True, way
    layer = OlmoeSparseMoeBlock(config)
    return _measured(layer, rank, tokens, lambda x: layer(x[None]), build_grid(GridShape(), 0).dp)


def _measured(
    layer: torch.nn.Module, rank: int, tokens: int, run: Callable[[torch.Tensor], torch.Tensor], axis: Axis
) -> Seconds:
    draw = torch.Generator().manual_seed(rank)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=draw)
    x = torch.randn(tokens, 512, generator=draw)

    def step() -> None:
        run(x.clone().requires_grad_()).sum().backward()

    step()
    barrier(axis)
    return timed(step)[1]


def experts_part(quick: bool) -> Part:
    """Total work of ours on one and two ranks, over that of the library's faster way."""
    rounds, tokens = (1, 256) if quick else (7, 4_096)

    def way(pool: RankPool, measured: Callable[..., Seconds], how: int | str) -> Callable[[], float]:
        return lambda: sum(one.cpu for one in pool.run(measured, tokens, how))

    with RankPool(1) as one, RankPool(2) as two:
        ways = {"library, a loop": way(one, library, "eager"), "library, grouped": way(one, library, "grouped_mm")}
        ways |= {"ep 1": way(one, ours, 1), "dp 2, ep 1": way(two, ours, 1), "dp 2, ep 2": way(two, ours, 2)}
        taken = take_turns(ways, rounds)
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    best = min(median["library, a loop"], median["library, grouped"])
    what = f"{tokens:,} tokens, 4 of 32 experts"
    return Part(
        {"experts": taken}, [Goal(f"{what}: {n} / library", median[n] / best, goal) for n, goal in GOALS.items()]
    )
