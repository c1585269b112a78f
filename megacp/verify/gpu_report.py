"""The report of a GPU: all comparisons of `gpu_checks` and figures of `gpu_speed`, with the versions beside them.

Each part runs alone, so one that fails or does not fit is a line of the report and not its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megacp.core.backends.apex import describe_apex
from megacp.verify import gpu_checks, gpu_speed
from megacp.verify.gpu_checks import CheckSizes, Finding
from megacp.verify.gpu_speed import BILLION, Figure

Check = Callable[[], list[Finding] | Figure]
PACKAGES = ("torch", "triton", "transformer_engine", "transformer_engine_torch", "transformer_engine_cu13", "numpy")


@dataclass(frozen=True)
class GpuPlan:
    """Sizes of a whole run; the small ones are for a CPU."""

    checks: CheckSizes = CheckSizes()
    model: tuple[tuple[str, Any], ...] = tuple(BILLION.items())
    training: tuple[tuple[int, str, str], ...] = (
        (8192, "none", "native"),
        (8192, "none", "transformer_engine"),
        (32768, "selective", "native"),
        (32768, "selective", "transformer_engine"),
    )
    """Tokens of a pack, granularity of recomputation, implementation of the layers."""
    rows: tuple[int, ...] = (36864, 131072)
    dense_up_to: int = 36864
    heads: tuple[int, int] = (32, 8)
    width: int = 128


SMALL = GpuPlan(
    checks=CheckSizes(layers=1, hidden=32, heads=4, groups=2, tokens=128, ranks=(2,)),
    model=(
        ("num_layers", 1),
        ("hidden_size", 32),
        ("ffn_hidden_size", 64),
        ("num_attention_heads", 4),
        ("vocab_size", 64),
    ),
    training=((64, "none", "native"), (64, "none", "transformer_engine")),
    rows=(512,),
    dense_up_to=512,
    heads=(4, 2),
    width=16,
)


def parts(plan: GpuPlan, device: str) -> dict[str, Check]:
    """All parts by name, by worth: those at the end are left out where time runs out."""
    c, settings, shape = plan.checks, dict(plan.model), (plan.heads, plan.width)
    training: dict[int, dict[str, Check]] = {}
    for tokens, recompute, layers in plan.training:
        name = f"training at {tokens} tokens, recompute {recompute}, {layers}"
        part = partial(gpu_speed.training_speed, device, tokens, recompute, layers, settings)
        training.setdefault(tokens, {})[name] = part
    attention: dict[int, dict[str, Check]] = {}
    for tokens in plan.rows:
        name = f"attention with mixed masks at {tokens} tokens" + (" and SDPA" if tokens <= plan.dense_up_to else "")
        attention[tokens] = {name: partial(gpu_speed.attention_speed, device, tokens, *shape, plan.dense_up_to)}
    (short, *long), (row, *longer) = training.values(), attention.values()
    ranks = {
        f"{', '.join(map(str, c.ranks))} ranks on one {device}": partial(gpu_checks.ranks_on_one_device, device, c)
    }
    checks: dict[str, Check] = {
        f"native on {device} against the CPU in float64": partial(gpu_checks.native_against_cpu, device, c),
        f"attention tiles, {c.tokens} tokens": partial(gpu_checks.fused_tiles, device, c),
    }
    guests: dict[str, Check] = {
        "Transformer Engine against native": partial(gpu_checks.engine_against_native, device, c),
        "apex's fused weight gradient": partial(gpu_checks.fused_weight_gradient, device, c),
    }
    return {**checks, **short, **row, **ranks, **guests, **_joined(long), **_joined(longer)}


def _joined(groups: list[dict[str, Check]]) -> dict[str, Check]:
    return {name: part for group in groups for name, part in group.items()}


def versions(device: str) -> dict[str, str]:
    """Versions and the GPU that the figures were measured with."""
    found = {"python": platform.python_version(), "system": platform.platform(), "apex": describe_apex()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["CUDA of torch"] = str(torch.version.cuda)
    if device == "cuda":
        found["cuDNN"] = str(torch.backends.cudnn.version())
        free, total = torch.cuda.mem_get_info()
        found["GPU"] = f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
    return found


def run(
    chosen: Mapping[str, Check], minutes: float, keep: Callable[[list[dict[str, Any]]], object] = list
) -> list[dict[str, Any]]:
    """Every part with its results, its seconds and its error; `keep` gets the entries after each part."""
    begin, found = time.monotonic(), []
    for name, check in chosen.items():
        entry: dict[str, Any] = {"part": name, "results": [], "seconds": 0.0, "error": ""}
        started = time.monotonic()
        if started - begin > 60 * minutes:
            entry["error"] = f"left out: {minutes:g} minutes are over"
        else:
            try:
                torch._dynamo.reset()  # else the next part gets graphs that this one compiled
                results = check()
                entry["results"] = results if isinstance(results, list) else [results]
            except Exception as error:  # a part that fails must not take the others with it
                entry["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            with contextlib.suppress(Exception):  # a device that a kernel has broken refuses this too
                _clean()
        entry["seconds"] = time.monotonic() - started
        print(f"{name}: {entry['error'] or 'done'} ({entry['seconds']:.0f} s)", flush=True)
        found.append(entry)
        keep(found)
    return found


def _clean() -> None:
    """Free all that a part left: models are cycles, and their bytes would count as memory of the next part."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write(output: Path, device: str, environment: dict[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """Write both reports; the text of report.md."""
    plain = [{**e, "results": [asdict(r) for r in e["results"]]} for e in entries]
    report = {"device": device, "versions": environment, "parts": plain}
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    text = markdown(device, environment, entries)
    (output / "report.md").write_text(text, encoding="utf-8")
    return text


def markdown(device: str, environment: dict[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """The text of report.md."""
    lines = [f"# Check of {device}", "", *(f"* {name}: {value}" for name, value in environment.items()), ""]
    lines += ["| what | found | allowed | verdict |", "| --- | --- | --- | --- |"]
    figures = []
    for entry in entries:
        if entry["error"]:
            lines.append(f"| {entry['part']} | {entry['error']} | | not finished |")
        for result in entry["results"]:
            if isinstance(result, Finding):
                value = result.skipped or f"{result.difference:.2e}"
                lines.append(f"| {result.name} | {value} | {result.allowed:g} ({result.reason}) | {result.verdict} |")
            elif isinstance(result, Figure):
                figures += ["", f"**{result.name}**", "", *([f"* skipped: {result.skipped}"] if result.skipped else [])]
                figures += [f"* {k}: {'-' if v is None else f'{v:.4g}'}" for k, v in result.values.items()]
                figures += [f"* {note}" for note in result.notes]
    formula = "MFU = model FLOPs / (seconds x dense peak); allowed pairs are counted, recomputation is not."
    return "\n".join([*lines, *figures, "", formula, ""])


def check(device: str, output: Path, minutes: float) -> int:
    """Run all parts and write the report after each; 1 when something was not equal or did not finish."""
    plan = GpuPlan() if device == "cuda" else SMALL
    output.mkdir(parents=True, exist_ok=True)
    environment = versions(device)
    # after every part: a machine that ends the command keeps what was found until then
    entries = run(parts(plan, device), minutes, partial(write, output, device, environment))
    print(write(output, device, environment, entries))
    failed = [r for e in entries for r in e["results"] if isinstance(r, Finding) and r.verdict == "FAILED"]
    return 1 if failed or any(e["error"] for e in entries) else 0
