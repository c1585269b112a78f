"""Speed of `tools/preprocess_data.py build` on text and on photos with 1 and 2 workers, start-up included.

The real command runs in its own process; the numbers of workers take turns and medians are shown.
"""

from __future__ import annotations

import functools
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import megacp
from megacp.data.synthetic.records import write_photos, write_text
from megacp.measure.report import Part, Seconds, take_turns, timed
from megacp.planner.report import table

WORKERS = (1, 2)
UNITS = 4
"""Parts of the photos' records that workers take."""


def text_part(quick: bool) -> Part:
    """MB of text per second, by tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with tempfile.TemporaryDirectory(prefix="megacp_bench_") as name:
        folder = Path(name)
        size, texts = write_text(folder / "text.jsonl", 2.0 if quick else 120.0)
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts[:100], trainer)
        bpe.save(str(folder / "tokenizer.json"))
        ways: dict[str, Callable[[], Seconds]] = {}
        for kind, tokenizer in (("byte", "byte"), ("tokenizer.json", folder / "tokenizer.json")):
            flags = ("--tokenizer", tokenizer, "--seq-length", 1024, "--oversize", "split")
            ways |= {f"{kind}, {n} workers": _build(folder / "text.jsonl", n, *flags) for n in WORKERS}
        seconds = take_turns(ways, rounds=1 if quick else 2)
    rows, found = [["text, start-up included", "MB/s"]], []
    for (kind, workers), (way, times) in zip(
        product(("byte", "tokenizer.json"), WORKERS), seconds.items(), strict=True
    ):
        speed = size / 1e6 / statistics.median(one.wall for one in times)
        found.append({"tokenizer": kind, "workers": workers, "megabytes_per_second": speed})
        rows.append([way, f"{speed:.1f}"])
    return Part({"preprocess": found}, table=table(rows))


def photo_part(quick: bool) -> Part:
    """Images and megabytes per second, and images per processor second."""
    count, rounds = (16, 1) if quick else (300, 3)
    with tempfile.TemporaryDirectory() as name:
        records = write_photos(Path(name), count)
        megabytes = sum(file.stat().st_size for file in [records, *(Path(name) / "photos").iterdir()]) / 1e6
        flags = ["--tokenizer", "byte", "--unit-bytes", -(-records.stat().st_size // UNITS), "--seq-length", 16384]
        flags += ["--image-root", records.parent / "photos", "--max-crops-per-pack", 128]
        seconds = take_turns({f"{n} workers": _build(records, n, *flags) for n in WORKERS}, rounds)
    rows = [[f"{count} photos, {megabytes:.1f} MB", "images/s", "MB/s", "images/CPU s"]]
    for way, times in seconds.items():
        wall, cpu = (statistics.median(getattr(one, clock) for one in times) for clock in ("wall", "cpu"))
        rows.append([way, *(f"{speed:.1f}" for speed in (count / wall, megabytes / wall, count / cpu))])
    by_workers = list(zip(WORKERS, seconds.values(), strict=True))
    found = {
        "images": count,
        "megabytes": megabytes,
        "seconds": {workers: [one.wall for one in times] for workers, times in by_workers},
        "cpu_seconds": {workers: [one.cpu for one in times] for workers, times in by_workers},
    }
    return Part({"preprocessing": found}, table=table(rows))


def _build(records: Path, workers: int, *flags: object) -> Callable[[], Seconds]:
    """A call that builds a dataset of the records beside them; its processor time is that of all its processes."""

    def build() -> Seconds:
        output = tempfile.mkdtemp(dir=records.parent) + "/built"
        program = "import sys; from megacp.commands import preprocess; sys.exit(preprocess.main())"
        command = [sys.executable, "-c", program]
        command += ["build", "--input", str(records), "--output", output, "--workers", str(workers), *map(str, flags)]
        root = Path(megacp.__file__).parents[1]  # where a checkout is found that is not installed
        run = functools.partial(subprocess.run, command, cwd=root, capture_output=True, text=True)
        done, seconds = timed(run, _children_seconds)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return seconds

    return build


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
