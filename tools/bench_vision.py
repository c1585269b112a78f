"""Figures of images: balance over ranks, bytes of features, preprocessing, packs; each beside its goal (`make bench`).

    python tools/bench_vision.py [--quick] [--json FILE] [--only loads bytes preprocessing packs]

Loads and bytes are counted from the tables and routes of training for 2 to 16 ranks, bytes also on 2 and 4 real ranks.
Preprocessing is the real build on photos made here, medians of runs with 1 and 2 workers that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megacp.batch import PackedBatch
from megacp.context_parallel.layout import LAYOUTS
from megacp.data.synthetic.mixed import mixed_row
from megacp.distributed.spawn import RankPool
from megacp.measure import vision as figures

DEGREES, REAL_DEGREES = (2, 4, 8, 16), (2, 4)
WIDTH = 32
"""Elements of a feature wherever bytes are counted; ratios do not depend on it."""
UNITS = 4
"""Parts of the photos that workers take."""


@dataclasses.dataclass
class Goal:
    """One figure beside its goal."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.limit

    def line(self) -> str:
        """As text."""
        word = "met" if self.met else "MISSED"
        return f"  {self.name:<78}{self.value:>9.3f}  goal <= {self.limit:<5g} {word}"


Part = tuple[dict[str, Any], list[Goal], str]
"""Figures for the JSON, goals, a table to print."""


def load_part(quick: bool) -> Part:
    """How evenly images load the ranks, by way of dealing."""
    packs = 10 if quick else 200
    entries, goals = [], []
    lines = [f"  {f'FLOPs max/mean (over optimum), {packs} packs':<42}" + "".join(f"{w:>16}" for w in figures.WAYS)]
    for cp in DEGREES:
        found = {kind: figures.vision_loads(kind, cp, packs) for kind in figures.KINDS}
        for kind, loads in found.items():
            cells = [f"{load.over_mean:.3f} ({load.over_optimum:.3f})" for load in loads.values()]
            lines.append(f"  {f'{kind}, cp {cp}':<42}" + "".join(f"{cell:>16}" for cell in cells))
            entries += [{"kind": kind, "cp": cp, "way": w, **dataclasses.asdict(load)} for w, load in loads.items()]
        by_flops, stored = ([loads[way] for loads in found.values()] for way in ("by FLOPs", "stored"))
        where = f"cp {cp}, worst pack: largest cost over the least possible"
        goals.append(Goal(f"{where}, ranges by FLOPs", max(load.worst for load in by_flops), 1.0))
        goals.append(Goal(f"{where}, stored ranges", max(load.worst for load in stored), 1.05))
        goals.append(Goal(f"cp {cp}: ranks that stored ranges starve", sum(load.starved for load in stored), 0.0))
    starved = sum(entry["starved"] for entry in entries if entry["way"] == "greedy")
    lines.append(f"  the plain loop leaves {starved} ranks without work while there is some")
    return {"loads": entries}, goals, "\n".join(lines)


def byte_part(quick: bool) -> Part:
    """Bytes of the routed exchange beside all-gather, counted for every layout, and on real ranks."""
    length, packs = (4_096, 3) if quick else (36_864, 4)
    rows = [figures.with_vision(mixed_row(length, seed)) for seed in range(packs)]
    entries, goals = [], []
    lines = [f"  {f'routed / all-gather, {packs} x {length:,} tokens':<42}" + "".join(f"{n:>16}" for n in LAYOUTS)]
    for cp in DEGREES:
        cells = []
        for name, layout in LAYOUTS.items():
            counted = [figures.feature_bytes(figures.routes_of(row, layout, cp), WIDTH * 4) for row in rows]
            routed, gathered = (sum(getattr(one, kind) for one in counted) for kind in ("routed", "gathered"))
            busiest = max(one.busiest_routed / one.busiest_gathered for one in counted)
            entries.append({"cp": cp, "layout": name, "share": routed / gathered, "busiest_share": busiest})
            cells.append(f"{routed / gathered:.3f} ({busiest:.3f})")
            goals.append(Goal(f"cp {cp}, {name}: bytes routed over all-gather, times cp", routed / gathered * cp, 1.05))
        lines.append(f"  {f'cp {cp}, all (busiest rank, worst)':<42}" + "".join(f"{cell:>16}" for cell in cells))
    real, more = _real_bytes(rows[0] if quick else figures.with_vision(mixed_row(8_192, seed=1)))
    return {"bytes": entries, "bytes_on_ranks": real}, goals + more, "\n".join(lines)


def _real_bytes(row: PackedBatch) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Traffic of real ranks beside the count from routes."""
    entries, goals = [], []
    for cp in REAL_DEGREES:
        with RankPool(cp) as pool:
            ranks = pool.run(figures.feature_traffic, row, WIDTH, timeout=300.0)
        wrong = 0
        for name, layout in LAYOUTS.items():
            for exchange, expected in figures.expected_traffic(figures.routes_of(row, layout, cp), WIDTH).items():
                sent = sum(rank[name, exchange] for rank in ranks)
                wrong += sent != expected
                entries.append({"cp": cp, "layout": name, "exchange": exchange, "sent": sent, "counted": expected})
        what = f"{cp} real ranks: layouts and exchanges whose traffic is not the counted"
        goals.append(Goal(what, float(wrong), 0.0))
    return entries, goals


def write_photos(folder: Path, count: int) -> Path:
    """Photo-like PNG and JPEG files of 480 to 1,024 pixels with some detail, and the JSONL that names them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    lines = []
    for number in range(count):
        width, height = (int(side) for side in rng.integers(480, 1_025, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height))
        grain = rng.integers(-6, 7, (height, width, 1), dtype=np.int16)
        pixels = Image.fromarray(np.clip(np.asarray(coarse, np.int16) + grain, 0, 255).astype(np.uint8))
        name = f"{number}.{'png' if number % 4 == 0 else 'jpg'}"
        pixels.save(folder / "photos" / name, quality=90)
        record = {"content": [{"type": "image", "path": name}], "branches": ["what is it? a photo", "where? here"]}
        lines.append(json.dumps(record) + "\n")
    (folder / "photos.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "photos.jsonl"


def preprocessing_part(quick: bool) -> Part:
    """Images and megabytes a second of `tools/preprocess_data.py build` with 1 and 2 workers, start-up included."""
    count, rounds = (16, 1) if quick else (300, 3)
    wall: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        records = write_photos(Path(folder), count)
        files = [records, *(Path(folder) / "photos").iterdir()]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        for number in range(rounds):
            for workers in wall:
                begin, used = time.perf_counter(), _children_seconds()
                _build(records, Path(folder) / f"built_{number}_{workers}", workers)
                wall[workers].append(time.perf_counter() - begin)
                cpu[workers].append(_children_seconds() - used)
    lines = [f"  {f'{count} photos, {megabytes:.1f} MB':<42}{'images/s':>16}{'MB/s':>16}{'images/CPU s':>16}"]
    for workers, values in wall.items():
        seconds, busy = statistics.median(values), statistics.median(cpu[workers])
        cells = (count / seconds, megabytes / seconds, count / busy)
        lines.append(f"  {f'--workers {workers}':<42}" + "".join(f"{cell:>16.1f}" for cell in cells))
    found = {"images": count, "megabytes": megabytes, "seconds": wall, "cpu_seconds": cpu}
    return {"preprocessing": found}, [], "\n".join(lines)


def _build(records: Path, output: Path, workers: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("preprocess_data.py")), "build", "--tokenizer", "byte"]
    command += ["--input", str(records), "--output", str(output), "--workers", str(workers)]
    command += ["--unit-bytes", str(-(-records.stat().st_size // UNITS)), "--seq-length", "16384"]
    command += ["--image-root", str(records.parent / "photos"), "--max-crops-per-pack", "128"]
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": root})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pack_part(quick: bool) -> Part:
    """Packs under two budgets beside what no packing can go below."""
    entries, goals = [], []
    for budgets in figures.BUDGETS:
        for count in (1_000,) if quick else (1_000, 4_000):
            ratios = [
                figures.packs_over_bound(figures.mixed_documents(np.random.default_rng(seed), count), budgets)
                for seed in range(1 if quick else 3)
            ]
            entries.append({"tokens": budgets[0], "crops": budgets[1], "documents": count, "ratios": ratios})
            where = f"{count:,} documents into {budgets[0]:,} tokens and {budgets[1]} crops"
            goals.append(Goal(f"{where}: packs over the lower bound", max(ratios), 1.05))
    return {"packs": entries}, goals, ""


PARTS = {"loads": load_part, "bytes": byte_part, "preprocessing": preprocessing_part, "packs": pack_part}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description="Figures of images beside their goals.")
    parser.add_argument("--quick", action="store_true", help="few packs and photos: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"quick": arguments.quick, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    goals: list[Goal] = []
    for name in (part for part in PARTS if part in arguments.only):
        found, reached, table = PARTS[name](arguments.quick)
        result |= found
        goals += reached
        lines = [f"\n{name}", table, *(goal.line() for goal in reached)]
        print("\n".join(line for line in lines if line), flush=True)
    result["goals"] = [{**dataclasses.asdict(goal), "met": goal.met} for goal in goals]
    print(f"\n{sum(goal.met for goal in goals)} of {len(goals)} goals met")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
