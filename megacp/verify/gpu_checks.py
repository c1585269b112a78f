"""What is checked and measured on a GPU: training, FlexAttention, Transformer Engine, ranks that share it.

Each part is a function of a device and of sizes, so a CPU runs the same lines with small ones. A check returns the
largest difference beside the allowed one, with the reason for that limit. Speeds are of the calls after the first ones,
which compile; the device is waited for before the clock is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megacp.core.backends.select import backend_problems
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.context_parallel.attention import select_transport
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed.grid import GridShape, build_grid, single_axis
from megacp.core.models.build import grid_shape
from megacp.core.models.costs import model_flops, model_parameters
from megacp.core.monitor.flops import cuda_peak, peak_bytes, utilisation
from megacp.core.ops.kernels import kernel_name
from megacp.core.ops.mask import allowed
from megacp.core.ops.tile_kernels import dense_attention
from megacp.core.training.step import ParallelModel
from megacp.verify.spawn import RankFailure, RankPool


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest relative difference, what is allowed and why; or why it did not run."""

    name: str
    difference: float | None
    allowed: float
    reason: str

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

    def config(self, dtype: str, **settings: Any) -> RunConfig:
        """A run of this size on one rank."""
        sizes: dict[str, Value] = {
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
        return with_values(RunConfig(), {**sizes, "dtype": dtype, **settings})


def losses(rank: int, world: int, config: RunConfig, device: str, mask: str) -> list[float]:
    """Losses of three steps on rows that are the same on every grid."""
    model = ParallelModel(config, build_grid(grid_shape(config, world), rank, device))
    rules = MockRules(config.model.vocab_size, config.data.seq_length, mask=mask, ragged=True)
    batches = [mock_batch([step], rules) for step in (1, 2, 3)]
    return [model.train([batch], step, batch.weight_sum).loss for step, batch in enumerate(batches, 1)]


def largest(values: Iterable[float]) -> float:
    """The largest, NaN when one is: Python's `max` passes over a NaN that is not the first."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def _worst(found: list[float], expected: list[float]) -> float:
    return largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def native_against_cpu(device: str, sizes: CheckSizes) -> list[Finding]:
    """Three updates on mixed masks: float64 on the device and on the CPU, then bfloat16 against that."""
    config = sizes.config("float64")
    expected = losses(0, 1, config, "cpu", "mixed")
    wide = losses(0, 1, config, device, "mixed")
    narrow = losses(0, 1, sizes.config("bfloat16"), device, "mixed")
    return [
        Finding("native float64 against CPU", _worst(wide, expected), 1e-10, "roundings of float64 over three updates"),
        Finding("native bfloat16 against float64", _worst(narrow, expected), 2e-2, "8 bits of mantissa"),
    ]


def fused_tiles(device: str, sizes: CheckSizes, seed: int = 3) -> list[Finding]:
    """The device's kernel over tiles of a row of images and branches, out and gradients, against a dense softmax."""
    metadata = mask_metadata(mock_batch([seed], MockRules(1024, sizes.tokens, mask="mixed", ragged=True)))
    plan = AttentionPlan(torch.arange(len(metadata))[None].numpy(), metadata, 0)
    index, generator = torch.from_numpy(plan.local), torch.Generator().manual_seed(seed)
    width, heads = sizes.hidden // sizes.heads, (sizes.heads, sizes.groups, sizes.groups, sizes.heads)
    q, k, v, dout = (torch.randn(len(metadata), n, width, generator=generator, dtype=torch.float64) for n in heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dense = dense_attention(q, k, v, torch.from_numpy(allowed(metadata, metadata)), width**-0.5)
    expected = [dense, *torch.autograd.grad(dense, leaves, dout)]
    kind = torch.device(device)
    transport = select_transport("p2p", kernel_name("auto", kind.type), single_axis("cp"), kind)
    findings = []
    for dtype, limit, why in ((torch.float32, 2e-5, "sums in float32"), (torch.bfloat16, 5e-2, "8 bits of mantissa")):
        mine = [x.detach().to(device, dtype)[index].requires_grad_() for x in (q, k, v)]
        out = transport.attend(mine[0], mine[1], mine[2], plan, width**-0.5)
        parts = zip((out, *torch.autograd.grad(out, mine, dout.to(device, dtype)[index])), expected, strict=True)
        worst = largest(((a.detach().cpu().double() - b[index]).norm() / b.norm()).item() for a, b in parts)
        findings.append(Finding(f"attention tiles, {str(dtype)[6:]}", worst, limit, why))
    return findings


ENGINE_CASES: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("packed masks", "packed", {}, 2e-2),
    ("mixed masks", "mixed", {}, 2e-2),
    ("recompute selective", "packed", {"recompute_granularity": "selective"}, 2e-2),
    ("recompute full", "packed", {"recompute_granularity": "full"}, 2e-2),
    ("fp8 delayed", "packed", {"fp8": "delayed"}, 0.1),
    ("fp8 current", "packed", {"fp8": "current"}, 0.1),
    ("fp8 blockwise", "packed", {"fp8": "blockwise"}, 0.1),
)
"""Name, mask, settings, allowed difference of a loss: of two bfloat16 models, or of 3 bits of mantissa."""


def engine_against_native(device: str, sizes: CheckSizes) -> list[Finding]:
    """Three updates in bfloat16 with Transformer Engine's layers and with ours."""
    findings = []
    for case, mask, settings, limit in ENGINE_CASES:
        name = f"Transformer Engine against native, {case}"
        config = sizes.config("bfloat16", transformer_impl="transformer_engine", **settings)
        if problems := backend_problems(config, torch.device(device).type):
            findings.append(Finding(name, None, limit, "; ".join(problems)))
            continue
        expected = losses(0, 1, sizes.config("bfloat16"), device, mask)
        worst = _worst(losses(0, 1, config, device, mask), expected)
        findings.append(Finding(name, worst, limit, "bits of the mantissa"))
    return findings


def ranks_on_one_device(device: str, sizes: CheckSizes) -> list[Finding]:
    """Context parallelism of several processes that share the device, over gloo, against one process."""
    expected = losses(0, 1, sizes.config("float32"), device, "mixed")
    findings = []
    for ranks in sizes.ranks:
        with RankPool(ranks) as pool:  # one for all transports: kernels are compiled once in a process
            for transport in ("p2p", "a2a", "all_gather", "kv_exchange"):
                layout = "balanced" if transport == "kv_exchange" else "zigzag_document"
                parallel = {"context_parallel_size": ranks, "cp_comm_type": transport, "cp_layout": layout}
                name = f"{ranks} ranks on one device, {transport}"
                try:
                    found = pool.run(losses, sizes.config("float32", **parallel), device, "mixed", timeout=150.0)
                except RankFailure as error:  # after which the pool is closed
                    findings.append(Finding(name, math.nan, 2e-4, str(error).splitlines()[-1]))
                    break
                worst = largest(_worst(one, expected) for one in found)
                findings.append(Finding(name, worst, 2e-4, "sums in float32 over three updates"))
    return findings


BILLION: dict[str, Value] = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
"""A model of the 1B class (Llama 3.2's sizes with a smaller vocabulary)."""
CALLS, WARM_UP = 5, 2
"""Calls of what is timed, and those that do not count."""


@dataclass(frozen=True)
class Figure:
    """What was measured of one subject."""

    name: str
    values: Mapping[str, float | None]


def _seconds_of(call: Callable[[], object], kind: torch.device) -> float:
    """Mean seconds of the last calls of `CALLS`; the first ones warm it up."""
    moments = []
    for number in range(CALLS):
        if number == WARM_UP:
            torch.cuda.synchronize() if kind.type == "cuda" else None
            moments.append(time.perf_counter())
        call()
    torch.cuda.synchronize() if kind.type == "cuda" else None
    return (time.perf_counter() - moments[0]) / (CALLS - WARM_UP)


def training_speed(
    device: str, tokens: int, recompute: str, layers: str, sizes: Mapping[str, Value]
) -> list[Finding | Figure]:
    """Steps of one pack of causal documents of `tokens` on one device; `layers` is a value of `--transformer-impl`.

    MFU is model FLOPs / (seconds x the vendor's dense peak); allowed pairs are counted, recomputation is not.
    """
    name, kind = f"training, {tokens} tokens, recompute {recompute}, {layers}", torch.device(device)
    chosen: dict[str, Value] = {"seq_length": tokens, "recompute_granularity": recompute, "transformer_impl": layers}
    config = with_values(RunConfig(), {**sizes, **chosen})
    if problems := backend_problems(config, kind.type):
        return [Finding(name, None, 0.0, "; ".join(problems))]
    model = ParallelModel(config, build_grid(GridShape(), 0, device))
    batch = mock_batch([0], MockRules(config.model.vocab_size, tokens, mask="causal"))
    steps = iter(range(1, CALLS + 1))
    planned = [model.plan(batch) for _ in range(CALLS)]  # by the loader's threads in a run; the plan's tables are made
    seconds = _seconds_of(lambda: model.train([planned.pop()], next(steps), batch.weight_sum), kind)
    area = int(mask_metadata(batch).cost.sum())
    flops = model_flops(config.model, int((batch.document >= 0).sum()), area).training
    values = {
        "parameters": float(model_parameters(config.model)),
        "tokens/s": tokens / seconds,
        "seconds/step": seconds,
        "model FLOPs": flops,
        "MFU": utilisation(flops, seconds, cuda_peak(kind, config.training.dtype) if kind.type == "cuda" else None),
        "peak GiB": peak_bytes(kind.type) / 2**30,
    }
    return [Figure(name, values)]
