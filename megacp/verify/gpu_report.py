"""Checks a GPU and reports the results: a complete run, comparisons with a CPU, and training speed.

Each part is a function of a device and model sizes, so that tests can run the same code on a CPU
with small sizes. The parts are independent: if one fails, the report shows its error and the other
parts still run. Timings exclude the first calls, which compile, and include the wait for the
device.
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
# Sizes for the comparisons on a GPU: large enough to select the kernels of real runs.
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
# Sizes for a CPU.
SMALL: Sizes = {
    **MIDDLE,
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "seq_length": 128,
}
# A model with about a billion parameters: Llama 3.2 1B with a smaller vocabulary.
BILLION: Sizes = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
# A run is saved after SAVED steps, then resumed up to step STEPS.
SAVED = 10
STEPS = 14
# Number of timed calls, of which the first WARM_UP compile and are discarded.
CALLS = 5
WARM_UP = 2


@dataclass(frozen=True)
class Finding:
    """A comparison: its largest relative difference, the limit, and the reason for the limit.

    If the comparison did not run, `difference` is None and `reason` explains why.
    """

    name: str
    difference: float | None
    allowed: float
    reason: str

    @property
    def verdict(self) -> str:
        """The result as a word: `ok`, `FAILED` or `skipped`."""
        if self.difference is None:
            return "skipped"
        # NaN also fails, because every comparison with NaN is false.
        return "ok" if self.difference <= self.allowed else "FAILED"


@dataclass(frozen=True)
class Figure:
    """Named measurements of one subject."""

    name: str
    values: Mapping[str, float | None]


# A part of the report returns its results, each a `Finding` or a `Figure`.
ReportPart = Callable[[], Sequence[Any]]


def config_of(sizes: Sizes, dtype: str, **settings: Value) -> RunConfig:
    """Return the config of a run, with native layers unless `settings` selects other layers."""
    return with_values(
        RunConfig(), {"transformer_impl": "native", **sizes, "dtype": dtype, **settings}
    )


def losses(
    rank: int, world: int, config: RunConfig, device: str, mask: str = "mixed"
) -> list[float]:
    """Return the losses of three training steps on rows that do not depend on the grid."""
    model = ParallelModel(config, build_grid(config.grid_shape(world), rank, device))
    rules = MockRules(config.model.vocab_size, config.data.seq_length, mask=mask, ragged=True)
    batches = [mock_batch([step], rules) for step in (1, 2, 3)]
    return [
        model.train([b], step, b.weight_sum, b.real_tokens).loss
        for step, b in enumerate(batches, 1)
    ]


def trained_and_resumed(sizes: Sizes, tokens: int) -> list[Finding | Figure]:
    """Run `python -m megacp.train` on random packs, save a checkpoint, and resume it.

    Raise CalledProcessError if a run fails, or TimeoutExpired after 240 s.
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
        # Train and save, then load the checkpoint and continue training.
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
    # The second run appends to the log of the first, so the log must contain every step.
    return [
        Finding(name, float(STEPS - len(steps)), 0.0, "steps without a finite loss"),
        Figure(name, figures),
    ]


def largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if any value is NaN.

    Python's `max` ignores a NaN that is not the first value.
    """
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def _worst(found: list[float], expected: list[float]) -> float:
    return largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def native_against_cpu(device: str, sizes: Sizes) -> list[Finding]:
    """Compare three updates on the device with float64 on the CPU, under mixed masks.

    The device uses float64 first, then bfloat16.
    """
    # The reference for both dtypes is the CPU in float64.
    expected = losses(0, 1, config_of(sizes, "float64"), "cpu")
    wide, narrow = (
        _worst(losses(0, 1, config_of(sizes, t), device), expected) for t in ("float64", "bfloat16")
    )
    return [
        Finding("native float64 against CPU", wide, 1e-10, "float64 rounding in three updates"),
        Finding("native bfloat16 against float64", narrow, 2e-2, "8 bits of mantissa"),
    ]


def engine_against_native(device: str, sizes: Sizes) -> list[Finding]:
    """Compare three bfloat16 updates of Transformer Engine's layers with those of native layers.

    Unsupported cases are skipped.
    """
    # Masks and settings: plain layers, recomputation, and the fp8 recipes.
    cases: list[tuple[str, Sizes]] = [("packed", {}), ("mixed", {})]
    cases += [("packed", {"recompute_granularity": how}) for how in ("selective", "full")]
    cases += [("packed", {"fp8": recipe}) for recipe in ("delayed", "current", "blockwise")]
    findings = []
    for mask, settings in cases:
        words = ("Transformer Engine against native,", mask, "masks", *settings.values())
        name = " ".join(map(str, words))
        if "fp8" in settings:
            limit, why = 0.1, "3 bits of mantissa"
        else:
            limit, why = 2e-2, "two bfloat16 models"
        config = config_of(sizes, "bfloat16", transformer_impl="transformer_engine", **settings)
        if problems := backend_problems(config, torch.device(device).type):
            findings.append(Finding(name, None, limit, "; ".join(problems)))
            continue
        expected = losses(0, 1, config_of(sizes, "bfloat16"), device, mask)
        worst = _worst(losses(0, 1, config, device, mask), expected)
        findings.append(Finding(name, worst, limit, why))
    return findings


def ranks_on_one_device(device: str, sizes: Sizes, worlds: Sequence[int] = (2,)) -> list[Finding]:
    """Compare context parallelism with one process.

    The ranks share the device and communicate through gloo. Every transport that needs no flag
    with sizes is tested.
    """
    expected = losses(0, 1, config_of(sizes, "float32"), device)
    findings = []
    for ranks in worlds:
        # All transports use one pool, because each process compiles its kernels only once.
        with RankPool(ranks) as pool:
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
                except RankFailure as error:  # the pool is closed now
                    findings.append(Finding(name, math.nan, 2e-4, str(error).splitlines()[-1]))
                    break
                worst = largest(_worst(one, expected) for one in found)
                findings.append(Finding(name, worst, 2e-4, "float32 sums in three updates"))
    return findings


def timed_steps(
    rank: int, world: int, config: RunConfig, device: str, mask: str = "causal"
) -> list[float]:
    """Return the seconds per step of this rank, without the first WARM_UP steps.

    Rows are planned in advance; in a real run, the loader's threads plan them.
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
        # Kernels run asynchronously, so wait for them before reading the clock.
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[WARM_UP:]


def training_speed(
    device: str, sizes: Sizes, tokens: int, recompute: str, layers: str
) -> list[Finding | Figure]:
    """Measure training steps on one device, each with one pack of causal documents.

    `layers` is a value of `--transformer-impl`. MFU is model FLOPs / (seconds x the vendor's dense
    peak). The FLOPs include only query-key pairs that the mask allows, and exclude recomputation.
    """
    name = f"training, {tokens} tokens, recompute {recompute}, {layers}"
    kind = torch.device(device)
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
    # The number of query-key pairs that the mask allows.
    area = int(mask_metadata(batch).cost.sum())
    flops = model_flops(config.model, batch.real_tokens, area).published.training
    utilisation: float | None = None
    if kind.type == "cuda":
        # An unknown GPU has no peak, which gives NaN.
        peak = cuda_peak(kind, config.training.dtype) or math.nan
        utilisation = flops / seconds / peak
    values = {
        "parameters": float(model_parameters(config.model)),
        "tokens/s": tokens / seconds,
        "seconds/step": seconds,
        "model FLOPs": flops,
        "MFU": utilisation,
        "peak GiB": peak_bytes(kind.type) / 2**30,
    }
    return [Figure(name, values)]


def parts(device: str) -> dict[str, ReportPart]:
    """Return all parts by name, the most important first, because the last may run out of time.

    On a CPU, the sizes are small.
    """
    if device == "cuda":
        sizes, large = MIDDLE, BILLION
        worlds: tuple[int, ...] = (2, 4)
        lengths = ((8192, "none"), (32768, "selective"))
    else:
        sizes, large = SMALL, SMALL
        worlds = (2,)
        lengths = ((64, "none"), (128, "selective"))
    tokens = lengths[0][0]
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
    for tokens, recompute in lengths:
        for layers in ("native", "transformer_engine"):
            part = partial(training_speed, device, large, tokens, recompute, layers)
            found[f"training at {tokens} tokens, recompute {recompute}, {layers}"] = part
    return found


def versions(device: str) -> dict[str, str]:
    """Return the software versions, and the name and memory of the GPU."""
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
    """Run a part; return its name, results, error (empty on success) and duration in seconds."""
    entry: dict[str, Any] = {"part": name, "results": [], "error": ""}
    started = time.monotonic()
    try:
        torch._dynamo.reset()  # drop graphs that the previous part compiled
        entry["results"] = part()
    except Exception as error:  # later parts must still run
        entry["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    # Models contain reference cycles. Free them, so that the next part does not count their memory.
    gc.collect()
    # If a kernel has broken the device, these calls fail, too.
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {**entry, "seconds": time.monotonic() - started}


def write(
    output: Path, device: str, environment: Mapping[str, str], entries: Sequence[dict[str, Any]]
) -> None:
    """Write report.json and report.md to the folder `output`."""
    plain = []
    for entry in entries:
        results = [asdict(result) for result in entry["results"]]
        plain.append({**entry, "results": results})
    report = {"device": device, "versions": environment, "parts": plain}
    write_atomically(output / "report.json", json.dumps(report, indent=1).encode())
    lines = [
        f"# Check of {device}",
        "",
        *(f"* {name}: {value}" for name, value in environment.items()),
        "",
    ]
    lines += ["| what | found | allowed | verdict |", "| --- | --- | --- | --- |"]
    # All comparisons form one table, which is followed by the figures.
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
    """Run the parts and write the report. After `minutes`, no further part is started.

    Return the exit status: 1 if a comparison failed or a part did not finish, else 0.
    """
    output.mkdir(parents=True, exist_ok=True)
    environment = versions(device)
    begin = time.monotonic()
    entries: list[dict[str, Any]] = []
    for name, part in parts(device).items():
        if time.monotonic() - begin > 60 * minutes:
            late = f"skipped: the limit of {minutes:g} minutes has passed; raise --minutes"
            entries.append({"part": name, "results": [], "error": late})
        else:
            entries.append(run_part(name, part))
        outcome = entries[-1]["error"] or "done"
        print(f"{name}: {outcome} ({time.monotonic() - begin:.0f} s)", flush=True)
        # Write the report after every part, so that its results survive if the command is killed.
        write(output, device, environment, entries)
    print((output / "report.md").read_text(encoding="utf-8"))
    for entry in entries:
        findings = [result for result in entry["results"] if isinstance(result, Finding)]
        if entry["error"] or any(finding.verdict == "FAILED" for finding in findings):
            return 1
    return 0
