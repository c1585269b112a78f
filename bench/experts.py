"""Measures the forward and backward pass of an expert layer, relative to transformers' loop and
grouped products.

torchtitan's layer is included if it can be imported: put torchtitan 0.3.0 and triton in a folder on
PYTHONPATH. Two of its behaviours are patched: it chooses CUDA if torch finds no accelerator, and in
float32 it rounds rows and matrices to bfloat16. Its scores have the layer's dtype, because a CPU
has no autocast to float32. The figures are CPU seconds of ranks with one thread each, which take
turns.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from bench.report import Goal, Part, Seconds, take_turns, timed
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import Metadata
from megacp.distributed.collectives import barrier
from megacp.distributed.grid import Axis, build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.backends.native import NativeBackend
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.engine.expert_parallel.layer import MixtureOfExperts
from megacp.engine.expert_parallel.route import Routes
from megacp.engine.save import keep
from megacp.verify.spawn import RankPool

SIZES: dict[str, Value] = {
    "num_layers": 1,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "norm_position": "after",
}
EXPERTS: dict[str, Value] = {"num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 256}
GOALS = {"ep 1": 1.0, "dp 2, ep 1": 1.1, "dp 2, ep 2": 1.2}
"""Limits on the work of our layer, relative to the faster implementation in transformers."""


def ours(rank: int, world_size: int, tokens: int, ep: int, dtype: str = "float32") -> Seconds:
    """Time our layer on this rank's share of the tokens."""
    grid = build_grid(GridShape(dp=world_size, ep=ep), rank)
    config = with_values(RunConfig(), {**SIZES, **EXPERTS, "dtype": dtype})
    layer = MixtureOfExperts(0, config.model, NativeBackend(grid, config))
    row = Metadata.of_documents(np.zeros(tokens // world_size, int))
    plan = AttentionPlan(np.arange(len(row))[None], row, 0)
    return _measured(
        layer, rank, len(row), lambda x: layer(x, keep, Routes.of(plan, grid.tp, x.device)), grid.dp
    )


def library(rank: int, world_size: int, tokens: int, way: str, dtype: str = "float32") -> Seconds:
    """Time transformers' layer on one process; `way` is an `experts_implementation`."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = OlmoeConfig(
        hidden_size=512, intermediate_size=256, num_experts=32, num_experts_per_tok=4
    )
    config.norm_topk_prob, config._experts_implementation = True, way
    layer = OlmoeSparseMoeBlock(config).to(getattr(torch, dtype))
    return _measured(layer, rank, tokens, lambda x: layer(x[None]), build_grid(GridShape(), 0).dp)


def torchtitan(rank: int, world_size: int, tokens: int, dtype: str) -> Seconds:
    """Time torchtitan's layer on one process, built with the functions that its models use."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    initial = {"weight": torch.nn.init.zeros_}
    sizes = {"dim": 512, "num_experts": 32, "top_k": 4}
    router = make_router_config(
        **sizes, gate_param_init=initial, score_func="softmax", route_norm=True
    )
    routed = make_routed_experts_config(
        **sizes, hidden_dim=256, param_init=initial, comm_backend="standard"
    )
    config = make_moe_config(
        num_experts=32, router=router, routed_experts=routed, load_balance_coeff=None
    )
    layer = config.build().to(getattr(torch, dtype))
    with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x):
        return _measured(
            layer, rank, tokens, lambda x: layer(x[None]), build_grid(GridShape(), 0).dp
        )


def _measured(
    layer: torch.nn.Module,
    rank: int,
    tokens: int,
    run: Callable[[torch.Tensor], torch.Tensor],
    axis: Axis,
) -> Seconds:
    draw = torch.Generator().manual_seed(rank)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=draw)
    x = torch.randn(tokens, 512, generator=draw).to(next(layer.parameters()).dtype)

    def step() -> None:
        run(x.clone().requires_grad_()).sum().backward()

    step()
    barrier(axis)
    return timed(step)[1]


def experts_part(quick: bool) -> Part:
    """Measure the total work of our layer on one and two ranks, relative to the faster
    implementation in transformers and to torchtitan.
    """
    rounds, tokens = (1, 256) if quick else (7, 4_096)

    def way(
        pool: RankPool, measured: Callable[..., Seconds], *how: int | str
    ) -> Callable[[], float]:
        return lambda: sum(one.cpu for one in pool.run(measured, tokens, *how))

    with RankPool(1) as one, RankPool(2) as two:
        ways = {
            "library, a loop": way(one, library, "eager"),
            "library, grouped": way(one, library, "grouped_mm"),
        }
        ways |= {
            "ep 1": way(one, ours, 1),
            "dp 2, ep 1": way(two, ours, 1),
            "dp 2, ep 2": way(two, ours, 2),
        }
        if importlib.util.find_spec("torchtitan"):
            for how in ("eager", "grouped_mm"):
                ways[f"library, {how}, bfloat16"] = way(one, library, how, "bfloat16")
            ways["ep 1, bfloat16"] = way(one, ours, 1, "bfloat16")
            ways |= {
                f"torchtitan, {dtype}": way(one, torchtitan, dtype)
                for dtype in ("float32", "bfloat16")
            }
        taken = take_turns(ways, rounds)
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    best = min(median["library, a loop"], median["library, grouped"])
    what = f"{tokens:,} tokens, 4 of 32 experts"
    goals = [Goal(f"{what}: {n} / library", median[n] / best, goal) for n, goal in GOALS.items()]
    if "ep 1, bfloat16" in median:
        goals.append(
            Goal(f"{what}: ep 1 / torchtitan", median["ep 1"] / median["torchtitan, float32"], 1.0)
        )
        narrow = median["ep 1, bfloat16"] / median["torchtitan, bfloat16"]
        goals.append(Goal(f"{what}: ep 1 / torchtitan, bfloat16", narrow, 1.0))
    return Part({"experts": taken}, goals)
