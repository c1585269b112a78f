"""The report of a GPU: each part of `gpu_checks` runs alone, so one that fails is a line of the report, not its end."""

from __future__ import annotations

import contextlib
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megacp.core.backends.apex import describe_apex
from megacp.verify import gpu_checks
from megacp.verify.gpu_checks import BILLION, CheckSizes, Figure, Finding

Part = Callable[[], Sequence[Finding | Figure]]
PACKAGES = ("torch", "triton", "transformer_engine", "transformer_engine_torch", "transformer_engine_cu13", "numpy")
SMALL = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}


def parts(device: str) -> dict[str, Part]:
    """All parts by name, by worth: those at the end are left out where time runs out. A CPU gets small sizes."""
    large = device == "cuda"
    c = CheckSizes() if large else CheckSizes(layers=1, hidden=32, heads=4, groups=2, tokens=128, ranks=(2,))
    (short, long), sizes = ((8192, 32768), BILLION) if large else ((64, 128), SMALL)
    speed = {
        f"training at {tokens} tokens, recompute {recompute}, {layers}": partial(
            gpu_checks.training_speed, device, tokens, recompute, layers, sizes
        )
        for tokens, recompute in ((short, "none"), (long, "selective"))
        for layers in ("native", "transformer_engine")
    }
    checks = {
        f"native on {device} against the CPU in float64": gpu_checks.native_against_cpu,
        f"attention tiles, {c.tokens} tokens": gpu_checks.fused_tiles,
        f"{', '.join(map(str, c.ranks))} ranks on one {device}": gpu_checks.ranks_on_one_device,
        "Transformer Engine against native": gpu_checks.engine_against_native,
    }
    return {**{name: partial(check, device, c) for name, check in checks.items()}, **speed}


def versions(device: str) -> dict[str, str]:
    """Versions and the GPU that the figures were measured with."""
    found = {"python": platform.python_version(), "system": platform.platform(), "apex": describe_apex()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if device == "cuda":
        found |= {"CUDA of torch": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        free, total = torch.cuda.mem_get_info()
        found["GPU"] = f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
    return found


def run(name: str, part: Part) -> dict[str, Any]:
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


def write(output: Path, device: str, environment: Mapping[str, str], entries: Sequence[dict[str, Any]]) -> None:
    """Write report.json and report.md."""
    plain = [{**e, "results": [asdict(r) for r in e["results"]]} for e in entries]
    report = {"device": device, "versions": environment, "parts": plain}
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    lines = [f"# Check of {device}", "", *(f"* {name}: {value}" for name, value in environment.items()), ""]
    lines += ["| what | found | allowed | verdict |", "| --- | --- | --- | --- |"]
    figures = []
    for entry in entries:
        if entry["error"]:
            lines.append(f"| {entry['part']} | {entry['error']} | | not finished |")
        for result in entry["results"]:
            if isinstance(result, Finding):
                value = "" if result.difference is None else f"{result.difference:.2e}"
                lines.append(f"| {result.name} | {value} | {result.allowed:g} ({result.reason}) | {result.verdict} |")
            else:
                figures += ["", f"**{result.name}**", ""]
                figures += [f"* {k}: {'-' if v is None else f'{v:.4g}'}" for k, v in result.values.items()]
    (output / "report.md").write_text("\n".join([*lines, *figures, ""]), encoding="utf-8")


def check(device: str, output: Path, minutes: float) -> int:
    """Run the parts that begin within `minutes`; 1 when something was not equal or did not finish."""
    output.mkdir(parents=True, exist_ok=True)
    environment, begin = versions(device), time.monotonic()
    entries: list[dict[str, Any]] = []
    for name, part in parts(device).items():
        if time.monotonic() - begin > 60 * minutes:
            entries.append({"part": name, "results": [], "error": f"left out: {minutes:g} minutes are over"})
        else:
            entries.append(run(name, part))
        print(f"{name}: {entries[-1]['error'] or 'done'} ({time.monotonic() - begin:.0f} s)", flush=True)
        write(output, device, environment, entries)  # a machine that ends the command keeps what was found until then
    print((output / "report.md").read_text(encoding="utf-8"))
    failed = [r for e in entries for r in e["results"] if isinstance(r, Finding) and r.verdict == "FAILED"]
    return 1 if failed or any(e["error"] for e in entries) else 0
