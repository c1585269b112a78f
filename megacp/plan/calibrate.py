"""Measure this machine for plans: `megacp-plan calibrate --output machine.yaml`, in two minutes.

The command trains small models for a few steps each. The models differ in how much of a step they
spend on matrix products, attention, elementwise passes, host calls and messages. The planner's
constants are then fitted so that its predictions are closest to all measured step times.

A single GPU cannot measure links, so their rates come from the GPU of `--like`. CPU ranks have one
thread each and share the cores.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from megacp.dry_run.packs import PackSample, sample_of
from megacp.dry_run.report import table
from megacp.engine.config.cli import OneLineParser
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.shard import mask_metadata
from megacp.plan.hardware import GPUS, NETWORKS, hardware_of, sheet_like
from megacp.plan.search import CP, PP, TP
from megacp.plan.sheet import Sheet
from megacp.plan.times import step_time
from megacp.storage.files import require_free, write_result
from megacp.training.data.mock import MockRules, mock_batch
from megacp.training.monitor.flops import cuda_peak
from megacp.verify.gpu_report import BILLION, MIDDLE, Sizes, run_part, timed_steps
from megacp.verify.spawn import run_ranks

# Seconds after which no further run starts.
LAST_BEGIN = 90.0
# Constants to fit, as part and name in a sheet.
FITTED = [
    ("reached", name) for name in ("products", "fused", "flex", "bandwidth", "link", "latency")
]
FITTED += [("terms", "calls"), ("terms", "beside")]
# Weight of a factor's squared logarithm, relative to a step's squared error. It keeps a constant at
# its initial value if no run depends on it.
LOOSE = 1e-4
# Gauss-Newton iterations of the fit.
FIT_ROUNDS = 20
# Dtype of the runs, by device.
COMPUTED_IN = {"cuda": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True)
class ShortRun:
    """A small training run of a few steps."""

    values: Sizes
    ranks: int = 1
    mask: str = "causal"

    def config(self, dtype: str) -> RunConfig:
        """Return the configuration of the run."""
        return with_values(RunConfig(), {**self.values, "dtype": dtype})

    def trained(self, device: str, dtype: str) -> list[list[float]]:
        """Train and return the seconds per step, one list per rank.

        On a GPU, the run uses this process so that compiled kernels are reused.
        """
        if device == "cuda":
            return [timed_steps(0, 1, self.config(dtype), device, self.mask)]
        return run_ranks(timed_steps, self.ranks, self.config(dtype), device, self.mask)

    def planned(self, sheet: Sheet) -> float:
        """Return the seconds per step that a plan predicts with the rates of `sheet`."""
        here = hardware_of(sheet, NETWORKS[0])
        return step_time(self.config(here.dtype), self.ranks, here, self.packs).total

    @functools.cached_property
    def packs(self) -> PackSample:
        """Pack sample with the mask of the run's training row."""
        config = self.config("float32")
        row = mock_batch(
            [0], MockRules(config.model.vocab_size, config.data.seq_length, mask=self.mask)
        )
        return sample_of(config, [mask_metadata(row)])


# the base of all GPU runs: a few layers of a model with a billion parameters
_GPU: Sizes = {
    **BILLION,
    "num_layers": 4,
    "num_attention_heads": 16,
    "seq_length": 8192,
    "global_batch_size": 4,
}
# a narrow model with heads of the same width
_NARROW: Sizes = {
    "hidden_size": 1024,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 8,
}
# the base of all CPU runs
_CPU: Sizes = {
    **MIDDLE,
    "hidden_size": 256,
    "seq_length": 512,
    "global_batch_size": 2,
    "qk_layernorm": "off",
}
# `_LONG` spends much of a step on attention, and `_THIN` on launches
_LONG: Sizes = {**_CPU, "num_layers": 2, "seq_length": 2048, "global_batch_size": 1}
_THIN: Sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "seq_length": 64}
# Runs by device, the most informative first: the last ones are skipped if time runs out.
RUNS: dict[str, dict[str, ShortRun]] = {
    "cuda": {
        "8,192 tokens": ShortRun(_GPU),
        "32,768 tokens": ShortRun({**_GPU, "seq_length": 32_768}),
        "mixed masks": ShortRun({**_GPU, "seq_length": 32_768}, mask="mixed"),
        "narrow": ShortRun({**_GPU, **_NARROW}),
        "short": ShortRun({**_GPU, **_NARROW, "num_layers": 16, "seq_length": 512}),
        "wide": ShortRun({**_GPU, "num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32}),
    },
    "cpu": {
        "base": ShortRun(_CPU),
        "long": ShortRun(_LONG),
        "wide": ShortRun({**_CPU, "num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 2048}),
        "thin": ShortRun({**_CPU, **_THIN, "num_layers": 12}),
        "dp 4": ShortRun({**_CPU, "global_batch_size": 4}, 4),
        "tp 2 x cp 2": ShortRun({**_LONG, TP: 2, CP: 2}, 4),
        "tp 2": ShortRun({**_CPU, TP: 2}, 2),
        "thin, tp 2": ShortRun({**_CPU, **_THIN, TP: 2}, 2),
        "cp 2": ShortRun({**_LONG, CP: 2}, 2),
        "dp 2": ShortRun(_CPU, 2),
        "words": ShortRun({**_CPU, "num_layers": 1, "vocab_size": 16_384}),
        "mixed masks": ShortRun(_LONG, mask="mixed"),
        "pp 2": ShortRun({**_CPU, PP: 2, "global_batch_size": 4}, 2),
    },
}


def measured(device: str) -> dict[str, float]:
    """Train the runs of a device, and return the seconds per step by run.

    A failed run prints a line, and the remaining runs continue. Raise ValueError if all fail.
    """
    begin = time.monotonic()
    found: dict[str, float] = {}
    dtype = COMPUTED_IN[device]
    for name, run in RUNS[device].items():
        if time.monotonic() - begin > LAST_BEGIN:
            print(f"{name}: skipped, because {LAST_BEGIN:g} s have passed")
            continue
        entry = run_part(name, functools.partial(run.trained, device, dtype))
        if not entry["error"]:
            # The slowest rank determines the step time.
            found[name] = max(map(statistics.median, entry["results"]))
        result = entry["error"] or f"{found[name]:.4g} s per step"
        print(f"{name}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
    if not found:
        raise ValueError(f"no run could be measured on {device}: see the lines above")
    return found


def scaled(sheet: Sheet, factors: Mapping[tuple[str, str], float]) -> Sheet:
    """Return a copy of a sheet with some fields multiplied; a list is multiplied elementwise."""
    found = copy.deepcopy(sheet)
    for (part, name), factor in factors.items():
        value = found[part][name]
        if isinstance(value, list):
            found[part][name] = [one * factor for one in value]
        else:
            found[part][name] = value * factor
    return found


def fitted(sheet: Sheet, runs: Sequence[ShortRun], seconds: Sequence[float]) -> Sheet:
    """Return a copy of `sheet` whose predictions are closest to the measured seconds per step.

    Gauss-Newton minimises the sum of squared relative errors over the logarithms of the factors.
    """
    logs = np.zeros(len(FITTED))  # logarithms of the factors, [constants]
    units = np.eye(len(FITTED))  # [constants, constants]
    small = 1e-3  # step of the numerical derivatives

    def at(point: np.ndarray) -> Sheet:
        factors = np.exp(point).tolist()
        return scaled(sheet, dict(zip(FITTED, factors, strict=True)))

    def errors(point: np.ndarray) -> np.ndarray:
        # logarithms of planned over measured seconds, [runs]
        trial = at(point)
        return np.log([run.planned(trial) for run in runs]) - np.log(seconds)

    for _ in range(FIT_ROUNDS):
        now = errors(logs)
        # numerical derivatives, [runs, constants]
        slopes = np.stack([(errors(logs + small * unit) - now) / small for unit in units], 1)
        # LOOSE pulls every factor towards 1, so the system is solvable even if no run depends on
        # some constant.
        curvature = slopes.T @ slopes + LOOSE * units
        gradient = slopes.T @ now + LOOSE * logs
        step = np.linalg.solve(curvature, gradient)
        # The plan is not linear in the factors, so limit their change to e-fold per iteration.
        logs -= np.clip(step, -1, 1)
    return at(logs)


def known_before(device: str, like: str) -> Sheet:
    """Return the sheet with which a fit begins.

    Name, memory and peak come from the device; links and fractions come from the GPU `like`. A CPU
    has no published peak, so its utilisation will be relative to its rate of matrix products.
    """
    sheet = sheet_like(like)
    dtype = COMPUTED_IN[device]
    # Keep the rates of `like`, except the values that this machine reports.
    own = sheet["gpus"][like]
    if device == "cuda":
        overlap = 1.0
        cores = math.inf
        where = f"{torch.cuda.get_device_name()}, links of {like}"
        _, total = torch.cuda.mem_get_info()
        memory = float(total)
        own["flops"] = cuda_peak(torch.device(device), dtype) or own["flops"]
    else:
        # Each rank has one core and an equal part of the memory. The rates are rough estimates.
        overlap = 0.0
        cores = float(os.cpu_count() or 1)
        where = f"{platform.node()}, one thread per rank"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
        own |= {"flops": 1e11, "bandwidth": 1e10, "link": 1e9}
    own["memory"] = round(memory / 2**30, 1)
    own["source"] = f"Times measured in {dtype}, {datetime.date.today()}, on {where}"
    terms = {"dtype": dtype, "calls": 3e-4, "overlap": overlap, "cores": cores, "beside": 1.0}
    return {**sheet, "gpus": {"here": own}, "terms": terms}


def calibrated(device: str, seconds: Mapping[str, float], like: str = "h100") -> Sheet:
    """Return the sheet of this machine, fitted to the measured seconds per step by run."""
    sheet = known_before(device, like)
    found = fitted(sheet, [RUNS[device][name] for name in seconds], [*seconds.values()])
    if device == "cpu":
        # The peak of a CPU is the rate that its matrix products reach.
        found["gpus"]["here"]["flops"] *= found["reached"]["products"]
        shares = [("reached", name) for name in ("products", "fused", "flex")]
        found = scaled(found, dict.fromkeys(shares, 1 / found["reached"]["products"]))
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="write the sheet to this file, for --gpu"
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=usual, choices=RUNS, help=f"device to measure (here, default {usual})"
    )
    parser.add_argument(
        "--like",
        default="h100",
        type=str.lower,
        choices=GPUS,
        help="GPU whose link rates to use (default h100)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(argv)
    require_free("--output", options.output, options.overwrite)
    found = measured(options.device)
    sheet = calibrated(options.device, found, options.like)
    rows = [["run", "s/step", "planned", "planned / measured"]]
    for name, seconds in found.items():
        planned = RUNS[options.device][name].planned(sheet)
        rows.append([name, f"{seconds:.4g}", f"{planned:.4g}", f"{planned / seconds:.2f}"])
    text = yaml.safe_dump(sheet, sort_keys=False)
    print(f"{table(rows)}\n\n{text}", end="")
    write_result("--output", options.output, text.encode(), options.overwrite)
    return 0
