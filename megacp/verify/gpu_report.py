"""The report of a GPU: a run as users start it, comparisons with a CPU in float64, then the speed
of training steps.

Each part is a function of a device and of sizes, so a CPU runs the same lines with small ones. It
runs alone, so one that fails is a line of the report. Speeds are of the calls after the first ones,
which compile; the device is waited for before the clock is read.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.distributed.grid import build_grid
from megacp.engine.backends.apex import describe_apex
from megacp.engine.backends.select import backend_problems
from megacp.engine.config.run import RunConfig, Value, flag, with_values
from megacp.engine.models.costs import model_flops, model_parameters
from megacp.engine.rows.shard import mask_metadata
from megacp.engine.step.step import ParallelModel
from megacp.storage.files import write_atomically
from megacp.training.data.mock import MockRules, mock_batch
from megacp.training.monitor.flops import cuda_peak, peak_bytes
from megacp.verify.spawn import RankFailure, RankPool

Sizes = Mapping[str, Value]
MIDDLE: Sizes = {
    "num_layers": 4,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 1024,
    "seq_length": 2048,
    "qk_layernorm": "head",
}
SMALL: Sizes = {
    **MIDDLE,
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "seq_length": 128,
}
BILLION: Sizes = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
"""A model of the 1B class (Llama 3.2's sizes with a smaller vocabulary)."""
SAVED, STEPS = 10, 14
"""Steps before a run is saved, and those after it was resumed too."""
CALLS, WARM_UP = 5, 2
"""Calls of what is timed, and those that do not count."""


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest relative difference, what is allowed and why; or why it did not
    run.
    """

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
class Figure:
    """What was measured of one subject."""

    name: str
    values: Mapping[str, float | None]


ReportPart = Callable[[], Sequence[Any]]
"""Its results; those of a report are a `Finding` or a `Figure`."""


def config_of(sizes: Sizes, dtype: str, **settings: Value) -> RunConfig:
    """A run with native layers, unless `settings` say otherwise."""
    return with_values(
        RunConfig(), {"transformer_impl": "native", **sizes, "dtype": dtype, **settings}
    )


def losses(
    rank: int, world: int, config: RunConfig, device: str, mask: str = "mixed"
) -> list[float]:
    """Losses of three steps on rows that are the same on every grid."""
    model = ParallelModel(config, build_grid(config.grid_shape(world), rank, device))
    rules = MockRules(config.model.vocab_size, config.data.seq_length, mask=mask, ragged=True)
    batches = [mock_batch([step], rules) for step in (1, 2, 3)]
    return [
        model.train([b], step, b.weight_sum, b.real_tokens).loss
        for step, b in enumerate(batches, 1)
    ]


def trained_and_resumed(sizes: Sizes, tokens: int) -> list[Finding | Figure]:
    """`python -m megacp.train` on made-up packs: it saves at its end, and another one goes on from
    there.
    """
    name = f"megacp.train, {SAVED} steps, a save, {STEPS - SAVED} more"
    with tempfile.TemporaryDirectory() as folder:
        values = {
            **sizes,
            "seq_length": tokens,
            "global_batch_size": 1,
            "log_file": f"{folder}/log.jsonl",
        }
        command = [
            sys.executable,
            "-m",
            "megacp.train",
            *(f"{flag(key)}={value}" for key, value in values.items()),
        ]
        for way, last in (("save", SAVED), ("load", STEPS)):
            subprocess.run(
                [*command, f"--{way}={folder}/run", f"--train-iters={last}"],
                check=True,
                timeout=240,
            )
        rows = map(json.loads, Path(folder, "log.jsonl").read_text(encoding="utf-8").splitlines())
        steps = {
            row["step"]: row
            for row in rows
            if row["kind"] == "train" and math.isfinite(row["loss"] or math.nan)
        }
    figures = {
        key: steps[STEPS][key]
        for key in ("loss", "tokens_per_second", "mfu", "seconds", "peak_memory")
    }
    return [
        Finding(name, float(STEPS - len(steps)), 0.0, "steps without a finite loss"),
        Figure(name, figures),
    ]


def largest(values: Iterable[float]) -> float:
    """The largest, NaN when one is: Python's `max` passes over a NaN that is not the first."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def _worst(found: list[float], expected: list[float]) -> float:
    return largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def native_against_cpu(device: str, sizes: Sizes) -> list[Finding]:
    """Three updates on mixed masks: float64 on the device and on the CPU, then bfloat16 against
    that.
    """
    expected = losses(0, 1, config_of(sizes, "float64"), "cpu")
    wide, narrow = (
        _worst(losses(0, 1, config_of(sizes, t), device), expected) for t in ("float64", "bfloat16")
    )
    return [
        Finding(
            "native float64 against CPU", wide, 1e-10, "roundings of float64 over three updates"
        ),
        Finding("native bfloat16 against float64", narrow, 2e-2, "8 bits of mantissa"),
    ]


def engine_against_native(device: str, sizes: Sizes) -> list[Finding]:
    """Three updates in bfloat16 with Transformer Engine's layers and with ours."""
    cases: list[tuple[str, Sizes]] = [("packed", {}), ("mixed", {})]
    cases += [("packed", {"recompute_granularity": how}) for how in ("selective", "full")]
    cases += [("packed", {"fp8": recipe}) for recipe in ("delayed", "current", "blockwise")]
    findings = []
    for mask, settings in cases:
        name = " ".join(
            map(str, ("Transformer Engine against native,", mask, "masks", *settings.values()))
        )
        limit, why = (
            (0.1, "3 bits of mantissa") if "fp8" in settings else (2e-2, "two bfloat16 models")
        )
        config = config_of(sizes, "bfloat16", transformer_impl="transformer_engine", **settings)
        if problems := backend_problems(config, torch.device(device).type):
            findings.append(Finding(name, None, limit, "; ".join(problems)))
            continue
        expected = losses(0, 1, config_of(sizes, "bfloat16"), device, mask)
        findings.append(
            Finding(name, _worst(losses(0, 1, config, device, mask), expected), limit, why)
        )
    return findings


def ranks_on_one_device(device: str, sizes: Sizes, worlds: Sequence[int] = (2,)) -> list[Finding]:
    """Context parallelism of several processes that share the device, over gloo, against one
    process.
    """
    expected = losses(0, 1, config_of(sizes, "float32"), device)
    findings = []
    for ranks in worlds:
        with RankPool(
            ranks
        ) as pool:  # one for all transports: kernels are compiled once in a process
            for row in TRANSPORTS.values():
                if row.needs_sizes:
                    continue
                transport = row.name
                layout = row.best_layout or "zigzag_document"
                parallel: dict[str, Value] = {
                    "context_parallel_size": ranks,
                    "cp_comm_type": transport,
                    "cp_layout": layout,
                }
                name = f"{ranks} ranks on one device, {transport}"
                try:
                    found = pool.run(
                        losses, config_of(sizes, "float32", **parallel), device, timeout=150.0
                    )
                except RankFailure as error:  # after which the pool is closed
                    findings.append(Finding(name, math.nan, 2e-4, str(error).splitlines()[-1]))
                    break
                worst = largest(_worst(one, expected) for one in found)
                findings.append(Finding(name, worst, 2e-4, "sums in float32 over three updates"))
    return findings


def timed_steps(
    rank: int, world: int, config: RunConfig, device: str, mask: str = "causal"
) -> list[float]:
    """Seconds of this rank's steps after the first ones.

    Rows are planned before, as the loader's threads do in a run.
    """
    model = ParallelModel(config, build_grid(config.grid_shape(world), rank, device))
    rules = MockRules(config.model.vocab_size, config.data.seq_length, mask=mask)
    batch = mock_batch(range(model.rows.packs), rules)
    steps = [
        [model.plan(batch) for _ in range(config.num_microbatches(world))] for _ in range(CALLS)
    ]
    found = []
    for number, rows in enumerate(steps, 1):
        begin = time.perf_counter()
        model.train(
            rows, number, batch.weight_sum * config.training.global_batch_size, batch.real_tokens
        )
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[WARM_UP:]


def training_speed(
    device: str, sizes: Sizes, tokens: int, recompute: str, layers: str
) -> list[Finding | Figure]:
    """Steps of one pack of causal documents of `tokens` on one device; `layers` is a value of
    `--transformer-impl`.

    MFU is model FLOPs / (seconds x the vendor's dense peak); allowed pairs are counted,
    recomputation is not.
    """
    name, kind = f"training, {tokens} tokens, recompute {recompute}, {layers}", torch.device(device)
    chosen: Sizes = {
        "seq_length": tokens,
        "recompute_granularity": recompute,
        "transformer_impl": layers,
    }
    config = with_values(RunConfig(), {**sizes, **chosen, "global_batch_size": 1})
    if problems := backend_problems(config, kind.type):
        return [Finding(name, None, 0.0, "; ".join(problems))]
    seconds = statistics.mean(timed_steps(0, 1, config, device))
    batch = mock_batch([0], MockRules(config.model.vocab_size, tokens, mask="causal"))
    area = int(mask_metadata(batch).cost.sum())
    flops = model_flops(config.model, batch.real_tokens, area).published.training
    values = {
        "parameters": float(model_parameters(config.model)),
        "tokens/s": tokens / seconds,
        "seconds/step": seconds,
        "model FLOPs": flops,
        "MFU": flops / seconds / (cuda_peak(kind, config.training.dtype) or math.nan)
        if kind.type == "cuda"
        else None,
        "peak GiB": peak_bytes(kind.type) / 2**30,
    }
    return [Figure(name, values)]


def parts(device: str) -> dict[str, ReportPart]:
    """All parts by name, by worth: those at the end are left out where time runs out. A CPU gets
    small sizes.
    """
    on_gpu = device == "cuda"
    sizes, worlds = (MIDDLE, (2, 4)) if on_gpu else (SMALL, (2,))
    large, tokens = (BILLION, 8192) if on_gpu else (SMALL, 64)
    found: dict[str, ReportPart] = {
        f"training, saved and resumed, at {tokens} tokens": partial(
            trained_and_resumed, large, tokens
        ),
        f"native on {device} against the CPU in float64": partial(
            native_against_cpu, device, sizes
        ),
        f"{', '.join(map(str, worlds))} ranks on one {device}": partial(
            ranks_on_one_device, device, sizes, worlds
        ),
        "Transformer Engine against native": partial(engine_against_native, device, sizes),
    }
    for tokens, recompute in (
        ((8192, "none"), (32768, "selective")) if on_gpu else ((64, "none"), (128, "selective"))
    ):
        for layers in ("native", "transformer_engine"):
            part = partial(training_speed, device, large, tokens, recompute, layers)
            found[f"training at {tokens} tokens, recompute {recompute}, {layers}"] = part
    return found


def versions(device: str) -> dict[str, str]:
    """Versions and the GPU that the figures were measured with."""
    found = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "apex": describe_apex(),
    }
    for name in ("torch", "triton", "transformer_engine", "transformer_engine_torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if device == "cuda":
        found |= {
            "CUDA of torch": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
        found["GPU"] = (
            f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"
        )
    return found


def run_part(name: str, part: ReportPart) -> dict[str, Any]:
    """The results of a part, its seconds and its error."""
    entry: dict[str, Any] = {"part": name, "results": [], "error": ""}
    started = time.monotonic()
    try:
        torch._dynamo.reset()  # else the next part gets graphs that this one compiled
        entry["results"] = part()
    except Exception as error:  # a part that fails must not take the others with it
        entry["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    gc.collect()  # models are cycles, and their bytes would count as memory of the next part
    with contextlib.suppress(Exception):  # a device that a kernel has broken refuses this too
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {**entry, "seconds": time.monotonic() - started}


def write(
    output: Path, device: str, environment: Mapping[str, str], entries: Sequence[dict[str, Any]]
) -> None:
    """Write report.json and report.md."""
    plain = [{**e, "results": [asdict(r) for r in e["results"]]} for e in entries]
    report = {"device": device, "versions": environment, "parts": plain}
    write_atomically(output / "report.json", json.dumps(report, indent=1).encode())
    lines = [
        f"# Check of {device}",
        "",
        *(f"* {name}: {value}" for name, value in environment.items()),
        "",
    ]
    lines += ["| what | found | allowed | verdict |", "| --- | --- | --- | --- |"]
    figures = []
    for entry in entries:
        if entry["error"]:
            lines.append(f"| {entry['part']} | {entry['error']} | | not finished |")
        for result in entry["results"]:
            if isinstance(result, Finding):
                value = "" if result.difference is None else f"{result.difference:.2e}"
                lines.append(
                    f"| {result.name} | {value} | {result.allowed:g} ({result.reason}) | "
                    f"{result.verdict} |"
                )
            else:
                figures += ["", f"**{result.name}**", ""]
                figures += [
                    f"* {k}: {'-' if v is None else f'{v:.4g}'}" for k, v in result.values.items()
                ]
    write_atomically(output / "report.md", "\n".join([*lines, *figures, ""]).encode())


def check_device(device: str, output: Path, minutes: float) -> int:
    """Run the parts that begin within `minutes`; 1 when something was not equal or did not
    finish.
    """
    output.mkdir(parents=True, exist_ok=True)
    environment, begin = versions(device), time.monotonic()
    entries: list[dict[str, Any]] = []
    for name, part in parts(device).items():
        if time.monotonic() - begin > 60 * minutes:
            entries.append(
                {"part": name, "results": [], "error": f"left out: {minutes:g} minutes are over"}
            )
        else:
            entries.append(run_part(name, part))
        print(
            f"{name}: {entries[-1]['error'] or 'done'} ({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
        write(
            output, device, environment, entries
        )  # a machine that ends the command keeps what was found until then
    print((output / "report.md").read_text(encoding="utf-8"))
    failed = [
        r for e in entries for r in e["results"] if isinstance(r, Finding) and r.verdict == "FAILED"
    ]
    return 1 if failed or any(e["error"] for e in entries) else 0
