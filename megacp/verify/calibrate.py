"""Measure this machine for plans: `megacp-plan calibrate --output here.yaml`, in two minutes.

Short runs of small models, which differ in how much of a step is products, attention, passes, calls of the host and
messages, are trained as a run trains them. The constants of a plan are then those with which its own arithmetic comes
nearest to all of them. So nothing that a step spends is left out, and no second model of time exists.

One GPU shows no links: theirs stay those of `--like`. Ranks of a CPU have one thread each and share its cores. Their
processor seconds count, which other programs on the machine move little: a rank that waits spends none.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from megacp.core.config.cli import OneLineParser
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed.collectives import barrier
from megacp.core.distributed.grid import build_grid
from megacp.core.models.costs import causal_area
from megacp.core.monitor.flops import cuda_peak
from megacp.core.training.step import ParallelModel
from megacp.plan.hardware import GPUS, NETWORKS, Sheet, hardware_of, nominal_sheet
from megacp.plan.packs import PackSample
from megacp.plan.report import table
from megacp.plan.times import step_time
from megacp.verify.spawn import RankPool

SECONDS = 90.0
"""No run begins later."""
WARM_UP, COUNTED = 2, 3
"""Steps of a run that do not count, and those whose median does."""
Factors = dict[tuple[str, str], float]
"""By which the numbers of a sheet, named by part and name, are multiplied."""
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"


@dataclass(frozen=True)
class Case:
    """A short run."""

    values: Mapping[str, Value]
    ranks: int = 1
    mask: str = "causal"


_GPU: dict[str, Value] = {
    "num_layers": 4,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "vocab_size": 32_000,
    "seq_length": 8192,
    "global_batch_size": 1,
}
_CPU: dict[str, Value] = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 2048,
    "seq_length": 512,
    "global_batch_size": 2,
}
_LONG: dict[str, Value] = {**_CPU, "num_layers": 2, "seq_length": 2048, "global_batch_size": 1}
CASES: dict[str, dict[str, Case]] = {
    "cuda": {
        "8,192 tokens": Case(_GPU),
        "32,768 tokens": Case({**_GPU, "seq_length": 32_768}),
        "mixed masks": Case({**_GPU, "seq_length": 16_384}, mask="mixed"),
        "narrow": Case({**_GPU, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 8}),
        "short": Case({**_GPU, "num_layers": 16, "hidden_size": 512, "ffn_hidden_size": 1024, "seq_length": 512}),
        "wide": Case({**_GPU, "num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32}),
    },
    "cpu": {
        "base": Case(_CPU),
        "long": Case(_LONG),
        "mixed masks": Case(_LONG, mask="mixed"),
        "wide": Case({**_CPU, "num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 2048}),
        "words": Case({**_CPU, "num_layers": 1, "vocab_size": 16_384}),
        "thin": Case({**_CPU, "num_layers": 12, "hidden_size": 64, "ffn_hidden_size": 128, "seq_length": 64}),
        "dp 2": Case(_CPU, 2),
        "tp 2": Case({**_CPU, TP: 2}, 2),
        "pp 2": Case({**_CPU, PP: 2, "global_batch_size": 4}, 2),
        "cp 2": Case({**_LONG, CP: 2}, 2),
        "thin, tp 2": Case({**_CPU, "hidden_size": 64, "ffn_hidden_size": 128, "seq_length": 64, TP: 2}, 2),
        "dp 4": Case({**_CPU, "global_batch_size": 4}, 4),
        "tp 2, cp 2": Case({**_LONG, TP: 2, CP: 2}, 4),
    },
}
"""Runs by device, those that say most first: one that would begin too late is left out."""
FITTED = (
    *(("reached", name) for name in ("products", "fused", "flex", "bandwidth", "link", "latency")),
    ("terms", "calls"),
)
"""What the steps determine, by part and name of a sheet."""
LOOSE = 1e-4
"""Weight of a logarithm of a factor beside the relative error of a step: what no run shows stays where it begins."""
ROUNDS = 20


def steps(rank: int, world: int, config: RunConfig, device: str, mask: str) -> list[float]:
    """Seconds of this rank's steps after the first ones; rows are planned before, as the loader's threads do."""
    model = ParallelModel(config, build_grid(config.grid_shape(world), rank, device))
    batch = mock_batch(range(model.rows.packs), MockRules(config.model.vocab_size, config.data.seq_length, mask=mask))
    count, clock = config.num_microbatches(world), time.perf_counter if device == "cuda" else time.process_time
    rows = [[model.plan(batch) for _ in range(count)] for _ in range(WARM_UP + COUNTED)]
    found = []
    for number, planned in enumerate(rows, 1):
        barrier(model.grid.world)
        begin = clock()
        model.train(planned, number, batch.weight_sum * config.training.global_batch_size, 0)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - begin)
    return found[WARM_UP:]


@dataclass(frozen=True)
class Measured:
    """The step of a case, and what a plan asks of it."""

    config: RunConfig
    ranks: int
    kernel: str
    """Of `Hardware.attention`."""
    packs: PackSample
    seconds: float

    def planned(self, sheet: Sheet) -> float:
        """Seconds that a plan with these numbers gives the busiest rank."""
        here = hardware_of(sheet, NETWORKS[0])
        here = dataclasses.replace(here, attention=dict.fromkeys(here.attention, here.attention[self.kernel]))
        return step_time(self.config, self.ranks, here, self.packs).busy


def sampled(config: RunConfig, mask: str) -> PackSample:
    """Attention of a case's row over that of one causal document."""
    tokens = config.data.seq_length
    batch = mock_batch([0], MockRules(config.model.vocab_size, tokens, mask=mask))
    return PackSample((float(mask_metadata(batch).cost.sum()) / causal_area(tokens),))


def measure(cases: Mapping[str, Case], device: str, dtype: str) -> dict[str, Measured]:
    """The runs of a device; one that fails is a line, and the others go on."""
    begin, found = time.monotonic(), dict[str, Measured]()
    with ExitStack() as stack:
        pools: dict[int, RankPool] = {}
        for name, case in cases.items():
            config = with_values(RunConfig(), {**case.values, "dtype": dtype})
            if time.monotonic() - begin > SECONDS:
                print(f"{name}: left out, {SECONDS:g} s are over", flush=True)
                continue
            try:
                if device == "cuda":
                    torch._dynamo.reset()  # else the next run gets graphs that this one compiled
                    ranks = [steps(0, 1, config, device, case.mask)]
                else:
                    if case.ranks not in pools:
                        pools[case.ranks] = stack.enter_context(RankPool(case.ranks))
                    ranks = pools[case.ranks].run(steps, config, device, case.mask)
            except Exception as error:  # a broken kernel must not take the other runs with it
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                pools.pop(case.ranks, None)
                continue
            seconds = max(map(statistics.median, ranks))
            kernel = "fused" if case.mask == "causal" else "flex"
            found[name] = Measured(config, case.ranks, kernel, sampled(config, case.mask), seconds)
            print(f"{name}: {seconds:.4g} s a step ({time.monotonic() - begin:.0f} s)", flush=True)
            if device == "cuda":
                gc.collect()  # models are cycles
                torch.cuda.empty_cache()
    return found


def scaled(sheet: Sheet, factors: Factors) -> Sheet:
    """The sheet with some numbers multiplied, a list as a whole."""
    found = copy.deepcopy(sheet)
    for (part, name), factor in factors.items():
        value = found[part][name]
        found[part][name] = [one * factor for one in value] if isinstance(value, list) else value * factor
    return found


def fitted(sheet: Sheet, measured: Sequence[Measured]) -> Sheet:
    """The sheet whose plans are nearest to the measured seconds: least squares of relative errors, by Gauss-Newton."""
    logs, small = np.zeros(len(FITTED)), 1e-3

    def at(point: np.ndarray) -> Sheet:
        return scaled(sheet, dict(zip(FITTED, np.exp(point).tolist(), strict=True)))

    def errors(point: np.ndarray) -> np.ndarray:
        trial = at(point)
        return np.array([math.log(one.planned(trial) / one.seconds) for one in measured])

    for _ in range(ROUNDS):
        now = errors(logs)
        slopes = np.stack([(errors(logs + small * unit) - now) / small for unit in np.eye(len(FITTED))], 1)
        step = np.linalg.solve(slopes.T @ slopes + LOOSE * np.eye(len(FITTED)), slopes.T @ now + LOOSE * logs)
        logs -= np.clip(step, -1, 1)
    return at(logs)


def product(device: str, dtype: str) -> float:
    """FLOP/s of a large product, the best of some; on a CPU of one thread."""
    size, clock = (8192, time.perf_counter) if device == "cuda" else (2048, time.process_time)
    torch.set_num_threads(1)
    x, seconds = torch.ones(size, size, device=device, dtype=getattr(torch, dtype)), []
    for _ in range(5):
        begin = clock()
        (x @ x)[0, 0].item()
        seconds.append(clock() - begin)
    return 2 * size**3 / min(seconds)


def beginning(device: str, like: str) -> Sheet:
    """What is known before a run: the device's memory and peak, links and shares of the GPU that is `like` it."""
    sheet = nominal_sheet()
    own, today = sheet["gpus"][like], datetime.date.today()
    if device == "cuda":
        name, dtype = torch.cuda.get_device_name(), "bfloat16"
        own["memory"] = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
        own["flops"] = cuda_peak(torch.device(device), dtype) or product(device, dtype)
        source = f"Times measured in {dtype} on {name}, {today}; links are those of {like}"
        terms = {"dtype": dtype, "calls": 2e-4, "overlap": 1.0, "cores": math.inf}
    else:
        cores, dtype = os.cpu_count() or 1, "float32"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        own |= {"memory": round(memory / cores, 1), "flops": product(device, dtype), "bandwidth": 1e10, "link": 5e9}
        source = f"Times measured in {dtype} on {cores} cores of {platform.node()}, {today}; a rank has one thread"
        terms = {"dtype": dtype, "calls": 2e-4, "overlap": 0.0, "cores": float(cores)}
    return {**sheet, "gpus": {"here": {**own, "source": source}}, "terms": terms}


def calibrated(device: str, like: str = "h100") -> tuple[Sheet, dict[str, Measured]]:
    """The sheet of this machine, and the runs that it is fitted to."""
    begin = beginning(device, like)
    measured = measure(CASES[device], device, begin["terms"]["dtype"])
    if not measured:
        raise ValueError(f"no run could be measured on {device}: see the lines above")
    return fitted(begin, [*measured.values()]), measured


def main(argv: Sequence[str]) -> int:
    """Run the command line; the exit status."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the file that --gpu takes")
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=usual, choices=CASES, help=f"what trains (default {usual} here)")
    parser.add_argument("--like", default="h100", choices=GPUS, help="the GPU whose links are taken (default h100)")
    options = parser.parse_args(argv)
    found, measured = calibrated(options.device, options.like)
    rows = [["run", "s/step", "planned", "planned / measured"]]
    for name, one in measured.items():
        seconds = one.planned(found)
        rows.append([name, f"{one.seconds:.4g}", f"{seconds:.4g}", f"{seconds / one.seconds:.3f}"])
    print(table(rows))
    options.output.write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")
    print(options.output.read_text(encoding="utf-8"), end="")
    return 0
