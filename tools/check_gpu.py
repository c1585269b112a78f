"""Check a machine's GPU in under ten minutes and write a report: `python tools/check_gpu.py --output DIR`.

First what must be equal (training against float64 on the CPU, FlexAttention's tiles, Transformer Engine, several ranks
on the one GPU), then what is measured (tokens/s and utilisation of a 1B model, attention with mixed masks, a replay of
a context-parallel plan). `report.json` and `report.md` hold the versions beside every figure. `--dry-run` needs no
GPU: it imports everything, checks the sizes, and prints what would run. Exit status 1 when something was not equal.

Key property: each part is run on its own, so one that fails or does not fit is a line of the report and not its end.
Rejected: a notebook, whose figures lose the versions that they were measured with.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megacp.backends.apex import describe_apex
from megacp.config.checks.check import require
from megacp.config.run import RunConfig, with_values
from megacp.measure import gpu_checks, gpu_speed
from megacp.measure.gpu_checks import CheckSizes, Finding
from megacp.measure.gpu_speed import BILLION, Figure
from megacp.planner.costs import model_parameters

PACKAGES = ("torch", "triton", "transformer_engine", "transformer_engine_torch", "transformer_engine_cu13", "numpy")


@dataclass(frozen=True)
class Part:
    """One part of the report."""

    name: str
    run: Callable[[], list[Any]]


@dataclass(frozen=True)
class Plan:
    """Sizes of a whole run; the small ones are for a CPU."""

    checks: CheckSizes = CheckSizes()
    model: tuple[tuple[str, Any], ...] = tuple(BILLION.items())
    training: tuple[tuple[int, str, str], ...] = (
        (8192, "none", "native"),
        (8192, "none", "transformer_engine"),
        (32768, "selective", "native"),
        (32768, "selective", "transformer_engine"),
    )
    """Tokens of a pack, granularity of recomputation, whose layers."""
    rows: tuple[int, ...] = (36864, 131072)
    dense_up_to: int = 36864
    heads: tuple[int, int] = (32, 8)
    width: int = 128
    cp: int = 8


SMALL = Plan(
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
    cp=4,
)


def parts(plan: Plan, device: str) -> list[Part]:
    """All parts, cheap and telling ones first."""
    c, settings = plan.checks, dict(plan.model)
    found = [
        Part(f"native on {device} against the CPU in float64", lambda: gpu_checks.native_against_cpu(device, c)),
        Part(f"attention tiles, {c.tokens} tokens", lambda: gpu_checks.fused_tiles(device, c)),
        Part("Transformer Engine against native", lambda: gpu_checks.engine_against_native(device, c)),
        Part("apex's fused weight gradient", lambda: gpu_checks.fused_weight_gradient(device, c)),
    ]
    for sizes in plan.training:
        found.append(
            Part(
                f"training at {sizes[0]} tokens, recompute {sizes[1]}, {sizes[2]}",
                lambda s=sizes: [gpu_speed.training_speed(device, *s, settings)],
            )
        )
    for tokens in plan.rows:
        found.append(
            Part(
                f"attention with mixed masks at {tokens} tokens" + (" and SDPA" if tokens <= plan.dense_up_to else ""),
                lambda t=tokens: [gpu_speed.attention_speed(device, t, plan.heads, plan.width, plan.dense_up_to)],
            )
        )
        found.append(
            Part(
                f"replay of a cp {plan.cp} plan at {tokens} tokens",
                lambda t=tokens: [gpu_speed.replay(device, t, plan.cp, plan.heads, plan.width)],
            )
        )
    ranks = ", ".join(map(str, c.ranks))
    found.append(Part(f"{ranks} ranks on one {device}", lambda: gpu_checks.ranks_on_one_device(device, c)))
    return found


def versions(device: str) -> dict[str, str]:
    """What the figures were measured with."""
    found = {"python": platform.python_version(), "system": platform.platform(), "apex": describe_apex()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["CUDA of torch"], found["cuDNN"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["GPU"] = f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
    return found


def run(
    chosen: Sequence[Part], minutes: float, keep: Callable[[list[dict[str, Any]]], object] = list
) -> list[dict[str, Any]]:
    """Every part with its results, its seconds, and its error if it had one; `keep` gets what there is after each."""
    begin, found = time.monotonic(), []
    for part in chosen:
        entry: dict[str, Any] = {"part": part.name, "results": [], "seconds": 0.0, "error": ""}
        started = time.monotonic()
        if started - begin > 60 * minutes:
            entry["error"] = f"left out: {minutes:g} minutes are over"
        else:
            try:
                torch._dynamo.reset()  # what one part compiled would decide what the next one gets
                entry["results"] = part.run()
                _clean()
            except Exception as error:  # a part that fails must not take the others with it
                entry["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        entry["seconds"] = time.monotonic() - started
        print(f"{part.name}: {entry['error'] or 'done'} ({entry['seconds']:.0f} s)", flush=True)
        found.append(entry)
        keep(found)
    return found


def _clean() -> None:
    """Leave nothing of a part: models are cycles, and what is left of one would count as the next one's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write(output: Path, device: str, environment: dict[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """Write both reports; the text of the one for a person."""
    plain = [{**e, "results": [asdict(r) for r in e["results"]]} for e in entries]
    report = {"device": device, "versions": environment, "parts": plain}
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    text = markdown(device, environment, entries)
    (output / "report.md").write_text(text, encoding="utf-8")
    return text


def markdown(device: str, environment: dict[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """The report for a person."""
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
    formula = "MFU = model FLOPs / (seconds x dense peak); allowed pairs are counted, recomputation is not."
    return "\n".join([*lines, *figures, "", formula, ""])


def describe(plan: Plan, chosen: Sequence[Part]) -> str:
    """What would run; raises ValueError where a size cannot."""
    lines = [f"{index}. {part.name}" for index, part in enumerate(chosen, 1)]
    for tokens, recompute, layers in plan.training:
        settings = {**dict(plan.model), "seq_length": tokens, "recompute_granularity": recompute}
        settings |= {"transformer_impl": layers, "global_batch_size": 1, "dry_run": True}
        config = with_values(RunConfig(), settings)
        require(config, 1)
        lines.append(f"   model of {model_parameters(config.model):,} parameters, packs of {tokens} tokens, {layers}")
    require(with_values(RunConfig(), {**plan.checks.settings, "dry_run": True}), 1)
    dense = 3 * plan.dense_up_to**2 / 2**30
    lines.append(f"   dense masks up to {plan.dense_up_to} tokens: about {dense:.1f} GiB as bool and in bfloat16")
    return "\n".join(["dry run, nothing is measured; a full run does:", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="folder for report.json and report.md")
    parser.add_argument("--minutes", type=float, default=7.0, help="parts that would begin later are left out")
    parser.add_argument("--dry-run", action="store_true", help="print what would run; needs no GPU")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu runs small sizes: a check of this file"
    )
    options = parser.parse_args(argv)
    plan = Plan() if options.device == "cuda" else SMALL
    chosen = parts(plan, options.device)
    if options.dry_run:
        print(describe(plan, chosen))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; --dry-run shows what would run", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    environment = versions(options.device)
    # after every part: a machine that ends the command keeps what was found until then
    entries = run(chosen, options.minutes, functools.partial(write, options.output, options.device, environment))
    print(write(options.output, options.device, environment, entries))
    failed = [r for e in entries for r in e["results"] if isinstance(r, Finding) and r.verdict == "FAILED"]
    return 1 if failed or any(e["error"] for e in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
