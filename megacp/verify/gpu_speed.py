"""Speed on one GPU: training steps with utilisation, attention with mixed masks.

Utilisation is model FLOPs / (seconds x the vendor's dense peak). Model FLOPs of a step: 6 x weights x tokens for the
products, and for attention 12 x layers x width of the heads x allowed pairs. Forbidden pairs and recomputation are not
counted. The device is waited for before every reading of the clock; the first calls, which compile, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacp.core.backends.select import backend_problems
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.context_parallel.attention import select_transport
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed.grid import GridShape, build_grid, single_axis
from megacp.core.models.costs import model_flops, model_parameters
from megacp.core.monitor.flops import cuda_peak, peak_bytes, utilisation
from megacp.core.ops.kernel import QKV
from megacp.core.ops.kernels import kernel_name
from megacp.core.ops.mask import allowed
from megacp.core.training.step import ParallelModel
from megacp.verify.mixed_rows import mixed_row

BILLION = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
"""A model of the 1B class (Llama 3.2's sizes with a smaller vocabulary)."""


@dataclass(frozen=True)
class Figure:
    """One measurement, or why there is none."""

    name: str
    values: Mapping[str, float | None]
    skipped: str = ""
    notes: tuple[str, ...] = ()
    """What else the reader must know, such as why a value is missing."""


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


CALLS, _WARM_UP = 5, 2
"""Calls of what is timed, and those that do not count."""


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Mean seconds of the last calls of `CALLS`; the first ones warm it up."""

    def several(count: int) -> None:
        for _ in range(count):
            call()
        _wait(device)

    several(_WARM_UP)
    started = time.perf_counter()
    several(CALLS - _WARM_UP)
    return (time.perf_counter() - started) / (CALLS - _WARM_UP)


def training_speed(device: str, tokens: int, recompute: str, layers: str, settings: Mapping[str, Value]) -> Figure:
    """Steps of one pack of causal documents of `tokens` on one device; `layers` is a value of `--transformer-impl`."""
    name = f"training, {tokens} tokens, recompute {recompute}, {layers}"
    chosen: dict[str, Value] = {"seq_length": tokens, "recompute_granularity": recompute, "transformer_impl": layers}
    config = with_values(RunConfig(), {**settings, **chosen})
    problems = backend_problems(config, torch.device(device).type)
    if problems:
        return Figure(name, {}, "; ".join(problems))
    model = ParallelModel(config, build_grid(GridShape(), 0, device))
    batch = mock_batch([0], MockRules(config.model.vocab_size, tokens, mask="causal"))
    steps = iter(range(1, 100))
    planned = [model.plan(batch) for _ in range(CALLS)]  # by the loader's threads in a run; the plan's tables are made
    seconds = seconds_of(lambda: model.train([planned.pop()], next(steps), batch.weight_sum), device)
    area = int(mask_metadata(batch).cost.sum())
    flops = model_flops(config.model, int((batch.document >= 0).sum()), area).training
    on_gpu = torch.device(device).type == "cuda"
    peak = cuda_peak(torch.device(device), config.training.dtype) if on_gpu else None
    values = {
        "parameters": float(model_parameters(config.model)),
        "tokens/s": tokens / seconds,
        "seconds/step": seconds,
        "model FLOPs": flops,
        "MFU": utilisation(flops, seconds, peak),
        "peak GiB": peak_bytes(torch.device(device).type) / 2**30,
    }
    return Figure(name, values)


OPPONENTS = {"cuda": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}}
"""Kernels of SDPA that take a dense mask, by type of device; elsewhere the one that holds all scores."""


def attention_speed(device: str, tokens: int, heads: tuple[int, int], width: int, dense_up_to: int) -> Figure:
    """Forward and backward over a row of images, videos and branches: our kernel, and each of SDPA's with a bool mask.

    An opponent that fails has a note instead of a value, so our figure is kept.
    """
    metadata = mask_metadata(mixed_row(tokens, seed=1))
    plan = AttentionPlan(np.arange(len(metadata))[None], metadata, 0)
    kind = torch.device(device)
    dtype = torch.bfloat16 if kind.type == "cuda" else torch.float32
    shapes = [(len(metadata), n, width) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    dout = torch.randn(shapes[0], device=device, dtype=dtype)
    transport = select_transport("p2p", kernel_name("auto", kind.type), single_axis("cp"), kind)

    def fused() -> object:
        out = transport.attend(q, k, v, plan, width**-0.5)
        return torch.autograd.grad(out, (q, k, v), dout)

    seconds = seconds_of(fused, device)
    area = int(metadata.cost.sum())
    values: dict[str, float | None] = {
        "ms": 1000 * seconds,
        "share of pairs allowed": area / len(metadata) ** 2,
        "TFLOP/s": 14 * area * heads[0] * width / seconds / 1e12,  # 4 forward, 10 backward (one product again)
    }
    notes = []
    if tokens <= dense_up_to:
        for name, backend in OPPONENTS.get(kind.type, {"math": SDPBackend.MATH}).items():
            values[f"dense SDPA ms, {name}"] = None
            try:
                values[f"dense SDPA ms, {name}"] = 1000 * _dense_seconds((q, k, v), dout, plan, backend)
            except Exception as error:  # whatever it is, an opponent's failure is no failure of ours
                notes.append(f"dense SDPA, {name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    title = f"attention with mixed masks, {tokens} tokens, {heads[0]}/{heads[1]} heads x {width}"
    return Figure(title, values, notes=tuple(notes))


def _dense_seconds(qkv: QKV, dout: torch.Tensor, plan: AttentionPlan, backend: SDPBackend) -> float:
    """Forward and backward of one kernel of SDPA with a dense bool mask.

    It gets a copy of K and V for every query head, without which only the kernel that holds all scores takes a mask.
    """
    device, local = dout.device, plan.metadata.take(plan.local)
    mask = torch.from_numpy(allowed(local, local)).to(device)
    mask |= (~mask.any(-1))[:, None]  # padding sees everything: a row without keys would be NaN
    index = torch.from_numpy(plan.local).to(device)
    q, k, v, g = (
        x[index].detach().repeat_interleave(dout.shape[1] // x.shape[1], 1).transpose(0, 1)[None].contiguous()
        for x in (*qkv, dout)
    )  # [n, heads or groups, d] -> [1, heads, n, d]
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def dense() -> object:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** -0.5)
        return torch.autograd.grad(out, (q, k, v), g)

    return seconds_of(dense, device.type)
