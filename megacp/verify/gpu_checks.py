"""Comparisons of a GPU with a CPU in float64: training steps, FlexAttention, Transformer Engine, ranks on one GPU.

Each check is a function of a device and of sizes, so a CPU runs the same lines with small ones. It returns the largest
difference beside the allowed one, with the reason for that limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megacp.core.backends.apex import describe_apex, weight_gradient_kernel
from megacp.core.backends.select import backend_problems
from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.attention import select_transport
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed.grid import GridShape, build_grid, single_axis
from megacp.core.distributed.spawn import RankFailure, RankPool
from megacp.core.ops.kernels import kernel_name
from megacp.core.ops.mask import allowed
from megacp.core.ops.tile_kernels import dense_attention
from megacp.core.tensor_parallel.weight_gradients import add_weight_gradient
from megacp.core.training.step import ParallelModel
from megacp.verify.mixed_rows import mixed_row


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest relative difference, what is allowed and why; or why it did not run."""

    name: str
    difference: float | None
    allowed: float
    reason: str
    skipped: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `FAILED` or `skipped`."""
        if self.difference is None:
            return "skipped"
        return "ok" if self.difference <= self.allowed else "FAILED"  # also for NaN


@dataclass(frozen=True)
class CheckSizes:
    """How large the compared things are."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    groups: int = 4
    tokens: int = 2048
    ranks: tuple[int, ...] = (2, 4)

    @property
    def settings(self) -> dict[str, Any]:
        """Flags of the model and its packs."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": 2 * self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "vocab_size": 1024,
            "seq_length": self.tokens,
            "qk_layernorm": "head",
            "transformer_impl": "native",
        }


def losses(config: RunConfig, grid: Any, mask: str) -> list[float]:
    """Losses of three steps on rows that are the same on every grid."""
    model = ParallelModel(config, grid)
    rules = MockRules(config.model.vocab_size, config.data.seq_length, mask=mask, ragged=True)
    found = []
    for step in (1, 2, 3):
        batch = mock_batch([step], rules)
        found.append(model.train([batch], step, batch.weight_sum).loss)
    return found


def _rank_losses(rank: int, world: int, config: RunConfig, device: str, mask: str) -> list[float]:
    shape = GridShape(cp=config.parallel.context_parallel_size, tp=config.parallel.tensor_model_parallel_size)
    return losses(config, build_grid(shape, rank, device), mask)


def _largest(values: Iterable[float]) -> float:
    """The largest, NaN when one is: Python's `max` passes over a NaN that is not the first."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def _worst(found: list[float], expected: list[float]) -> float:
    return _largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def native_against_cpu(device: str, sizes: CheckSizes) -> list[Finding]:
    """Three updates on mixed masks: float64 on the device and on the CPU, then bfloat16 against that."""
    config = with_values(RunConfig(), {**sizes.settings, "dtype": "float64"})
    expected = losses(config, build_grid(GridShape(), 0), "mixed")
    wide = losses(config, build_grid(GridShape(), 0, device), "mixed")
    narrow = losses(with_values(config, {"dtype": "bfloat16"}), build_grid(GridShape(), 0, device), "mixed")
    return [
        Finding("native float64 against CPU", _worst(wide, expected), 1e-10, "roundings of float64 over three updates"),
        Finding("native bfloat16 against float64", _worst(narrow, expected), 2e-2, "8 bits of mantissa"),
    ]


def fused_tiles(device: str, sizes: CheckSizes, seed: int = 3) -> list[Finding]:
    """The device's kernel over tiles of a row of images and branches, out and gradients, against a dense softmax."""
    metadata = mask_metadata(mixed_row(sizes.tokens, seed))
    plan = AttentionPlan(torch.arange(len(metadata))[None].numpy(), metadata, 0)
    generator = torch.Generator().manual_seed(seed)
    width, heads = sizes.hidden // sizes.heads, (sizes.heads, sizes.groups, sizes.groups, sizes.heads)
    q, k, v, dout = (torch.randn(len(metadata), n, width, generator=generator, dtype=torch.float64) for n in heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dense = dense_attention(q, k, v, torch.from_numpy(allowed(metadata, metadata)), width**-0.5)
    expected = [dense, *torch.autograd.grad(dense, leaves, dout)]
    kind = torch.device(device)
    transport = select_transport("p2p", kernel_name("auto", kind.type), single_axis("cp"), kind)
    findings = []
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 5e-2)):
        mine = [x.detach().to(device, dtype)[torch.from_numpy(plan.local)].requires_grad_() for x in (q, k, v)]
        out = transport.attend(mine[0], mine[1], mine[2], plan, width**-0.5)
        grads = torch.autograd.grad(out, mine, dout.to(device, dtype)[torch.from_numpy(plan.local)])
        index = torch.from_numpy(plan.local)
        parts = zip((out, *grads), expected, strict=True)
        worst = _largest(((a.detach().cpu().double() - b[index]).norm() / b.norm()).item() for a, b in parts)
        why = "sums in float32" if dtype == torch.float32 else "8 bits of mantissa, scores and weights rounded"
        findings.append(Finding(f"attention tiles, {str(dtype)[6:]}", worst, limit, why))
    return findings


ENGINE_CASES: tuple[tuple[str, str, dict[str, Any], float, str], ...] = (
    ("packed masks", "packed", {}, 2e-2, "two bfloat16 models"),
    ("mixed masks", "mixed", {}, 2e-2, "two bfloat16 models"),
    ("recompute selective", "packed", {"recompute_granularity": "selective"}, 2e-2, "two bfloat16 models"),
    ("recompute full", "packed", {"recompute_granularity": "full"}, 2e-2, "two bfloat16 models"),
    ("fp8 delayed", "packed", {"fp8": "delayed"}, 0.1, "3 bits of mantissa"),
    ("fp8 current", "packed", {"fp8": "current"}, 0.1, "3 bits of mantissa"),
    ("fp8 blockwise", "packed", {"fp8": "blockwise"}, 0.1, "3 bits of mantissa"),
)
"""Name, mask, settings, allowed difference of a loss and why."""


def engine_against_native(device: str, sizes: CheckSizes) -> list[Finding]:
    """Three updates in bfloat16 with Transformer Engine's layers and with ours."""
    findings = []
    here = build_grid(GridShape(), 0, device)
    native = with_values(RunConfig(), {**sizes.settings, "dtype": "bfloat16"})
    expected: dict[str, list[float]] = {}
    for case, mask, settings, limit, why in ENGINE_CASES:
        name = f"Transformer Engine against native, {case}"
        config = with_values(native, {"transformer_impl": "transformer_engine", **settings})
        problems = backend_problems(config, torch.device(device).type)
        if problems:
            findings.append(Finding(name, None, limit, "", "; ".join(problems)))
            continue
        if mask not in expected:
            expected[mask] = losses(native, here, mask)
        findings.append(Finding(name, _worst(losses(config, here, mask), expected[mask]), limit, why))
    return findings


def fused_weight_gradient(device: str, sizes: CheckSizes) -> list[Finding]:
    """apex's product that adds a bfloat16 weight gradient to a float32 sum, against torch's."""
    name, limit = "apex's fused weight gradient", 1e-2
    kernel = weight_gradient_kernel() if torch.device(device).type == "cuda" else None
    if kernel is None:
        return [Finding(name, None, limit, "", f"no CUDA or {describe_apex()}")]
    shapes = ((sizes.tokens, 2 * sizes.hidden), (sizes.tokens, sizes.hidden))
    grad, x = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    found, expected = (torch.ones(2 * sizes.hidden, sizes.hidden, device=device) for _ in range(2))
    kernel(found, grad, x)
    add_weight_gradient(expected, grad, x)
    worst = ((found - expected).norm() / expected.norm()).item()
    return [Finding(name, worst, limit, "torch rounds the product to bfloat16 before it adds")]


_COLD_SECONDS, _WARM_SECONDS = 150.0, 60.0
"""Time of ranks that have to compile their kernels first, and of those that have."""


def ranks_on_one_device(device: str, sizes: CheckSizes, seconds: float = 120.0) -> list[Finding]:
    """Context parallelism of several processes that share the device, over gloo, against one process.

    Runs that would begin after `seconds` are skipped, so that other parts are reached.
    """
    settings = {**sizes.settings, "dtype": "float32"}
    base = with_values(RunConfig(), settings)
    expected = losses(base, build_grid(GridShape(), 0, device), "mixed")
    findings, end = [], time.monotonic() + seconds
    for ranks in sizes.ranks:
        limit = _COLD_SECONDS
        with RankPool(ranks) as pool:  # one for all transports: kernels are compiled once in a process
            for comm_type in ("p2p", "a2a", "all_gather", "kv_exchange"):
                layout = "balanced" if comm_type == "kv_exchange" else "zigzag_document"
                parallel = {"context_parallel_size": ranks, "cp_comm_type": comm_type, "cp_layout": layout}
                name = f"{ranks} ranks on one device, {comm_type}"
                if time.monotonic() > end:
                    findings.append(Finding(name, None, 2e-4, "", f"the {seconds:g} seconds of this part are over"))
                    continue
                try:
                    found = pool.run(_rank_losses, with_values(base, parallel), device, "mixed", timeout=limit)
                except RankFailure as error:  # after which the pool is closed
                    findings.append(Finding(name, math.nan, 2e-4, str(error).splitlines()[-1]))
                    break
                worst, limit = _largest(_worst(one, expected) for one in found), _WARM_SECONDS
                findings.append(Finding(name, worst, 2e-4, "sums in float32 over three updates"))
    return findings
