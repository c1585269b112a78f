"""Run every grid named in examples/ as a step on fake tensors: `python tests/fake_grids.py [WORD
...]` (make fake-grids).

A grid of 64 GPUs also runs at 1,024. A line prints the memory of rank 0, and the dry run's
estimate. Each row is one causal document, as the dry run assumes. The exit status is 1 if an
estimate is off by more than 2 %, if half of them are off by more than 0.5 %, or if another rank
makes different calls than rank 0. Without a word, the small layouts of `tests/verify/fake_cases.py`
run first; half of them must be within 1 %, all of them within 5 %.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEDIAN, WORST = 0.005, 0.02
"""Tolerances of dry runs."""
RANK = re.compile(
    r"^rank \d+ .*: peak ([\d.]+) GiB .*; the dry run estimates ([\d.]+);", re.MULTILINE
)


def grids() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each grid and the flags of its run."""
    from tests.examples.test_launch_files import RECIPES, SCRIPTS, dry_run_flags, estimates, gpus_of

    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            for row in estimates(script):
                for gpus in (row[0], "1024") if row[0] == "64" else (row[0],):
                    flags = dry_run_flags(script, (gpus, *row[1:]), Path(folder))
                    more = ["--global-batch-size", gpus] if gpus == "1024" else []
                    yield f"{script} {gpus} GPUs {row[1].strip()}", [*flags, *more]
    for (model, grid), path in RECIPES.items():
        files = ["--config", str(path.with_name("model.yaml")), "--config", str(path)]
        yield f"{model} {grid}", ["--world-size", str(gpus_of(grid)), *files]
    command = ["bash", "examples/million_tokens.sh", "--flags"]
    yield (
        "million_tokens.sh 8 GPUs",
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split(),
    )


def checked(grid: tuple[str, list[str]]) -> float:
    """Return the relative error of a grid's dry run; infinity if its step failed."""
    name, flags = grid
    command = [
        sys.executable,
        "-W",
        "ignore",
        "tools/check_gpu.py",
        "--fake",
        "--mask",
        "causal",
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    figures = [(float(peak), float(plan)) for peak, plan in RANK.findall(done.stdout)]
    if done.returncode or not figures:
        print(f"FAILED  {name}: {(done.stdout + done.stderr)[-600:]}", flush=True)
        return math.inf
    peak, plan = figures[0]  # of the rank itself, which compiles nothing: it is the last one run
    off = abs(plan / peak - 1)
    verdict = "good   " if off <= WORST else "FAR OFF"
    print(f"{verdict} {peak:6.2f} GiB, dry run {plan / peak:.3f} of it: {name}", flush=True)
    return off


def ratio(name: str) -> float:
    """Return the dry run's estimate of a layout divided by its step's memory."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.verify.fake_cases", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(
        f"dry run {found['planned'] / found['peak']:.3f} of {found['peak'] / 2**30:.2f} GiB: "
        f"{name}",
        flush=True,
    )
    return found["planned"] / found["peak"]


def layouts() -> bool:
    """Return whether dry runs of small models of all kinds, each with another layout, are accurate:
    all within 5 %, and the median within 1 %.
    """
    from tests.verify.fake_cases import CASES

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        off = [abs(one - 1) for one in pool.map(ratio, CASES)]
    print(
        f"{len(off)} layouts: {statistics.median(off):.2%} in the median, {max(off):.2%} at worst"
    )
    return statistics.median(off) <= 0.01 and max(off) <= 0.05


def main(words: list[str]) -> int:
    """Run the layouts of small models, then the chosen grids, two at a time."""
    small = bool(words) or layouts()
    chosen = [grid for grid in grids() if all(word in grid[0] for word in words)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        off = list(pool.map(checked, chosen))
    print(f"{len(off)} grids: {statistics.median(off):.2%} in the median, {max(off):.2%} at worst")
    good = max(off) <= WORST and (len(off) < 10 or statistics.median(off) <= MEDIAN)
    return int(not (small and good))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
