"""Measures the speed of `tools/preprocess_data.py build` on text with 1 and 2 workers, including
its start-up.

The real command runs in a separate process. All variants take turns, and the table shows medians.
If megatron-core is installed, the text is also tokenized as in Megatron. In contrast to Megatron,
our command also packs, hashes and syncs its output.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import megacp
from bench.report import Part, Seconds, take_turns, timed
from megacp.dry_run.report import table

WORKERS = (1, 2)
OURS: dict[str, tuple[str, ...]] = {
    "ours, bytes": ("--tokenizer", "byte"),
    "ours": (),
    "ours, the library's engine": ("--tokenizer-engine", "reference"),
}
"""Ways to build a dataset of text -> their flags. Without --tokenizer, a way uses a
`tokenizer.json`.
"""
MEGATRON = {"Megatron's loop": 1, "Megatron's loop, 64 texts a call": 64}
"""Name of the way -> number of texts per tokenizer call."""
PEER = Path(__file__).parents[1] / "tools" / "peers" / "preprocess_megatron.py"


def text_part(quick: bool) -> Part:
    """Measure MB of text per second by tokenizer and engine, and for Megatron's loop."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with tempfile.TemporaryDirectory(prefix="megacp_bench_") as name:
        folder = Path(name)
        size, texts = _write_text(folder / "text.jsonl", 2.0 if quick else 120.0)
        # Train a small tokenizer on the first files, for all ways.
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
        files = folder / "text.jsonl", folder / "tokenizer.json"
        ways = {
            _way(name, n): _ours(files, n, flags) for name, flags in OURS.items() for n in WORKERS
        }
        if importlib.util.find_spec("megatron"):
            ways |= {
                _way(name, n): _megatron(files, n, batch)
                for name, batch in MEGATRON.items()
                for n in WORKERS
            }
        seconds = take_turns(ways, rounds=1 if quick else 2)
    speed = {
        way: size / 1e6 / statistics.median(one.wall for one in times)
        for way, times in seconds.items()
    }
    names = [name for name in (*OURS, *MEGATRON) if _way(name, WORKERS[0]) in speed]
    rows = [["text, MB/s", *(f"{n} workers" for n in WORKERS)]]
    rows += [[name, *(f"{speed[_way(name, n)]:.1f}" for n in WORKERS)] for name in names]
    found = [{"way": way, "megabytes_per_second": value} for way, value in speed.items()]
    return Part({"preprocess": found}, table=table(rows))


def _write_text(path: Path, megabytes: float) -> tuple[int, list[str]]:
    """Write the standard library's sources as JSONL, repeated until they have the given size.

    Return the size of the text in bytes, and the texts before repetition.
    """
    texts, size = [], 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = (
            ""
            if "site-packages" in source.parts
            else source.read_text(encoding="utf-8", errors="ignore")
        )
        if text.strip():
            texts.append(text)
            size += len(text.encode())
        if size > megabytes * 1e6:
            break
    # Repeat the sources until the text has the requested size.
    copies = max(1, math.ceil(megabytes * 1e6 / size))
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts) * copies, encoding="utf-8"
    )
    return size * copies, texts


def _way(name: str, workers: int) -> str:
    return f"{name}, {workers} workers"


def _ours(files: tuple[Path, Path], workers: int, flags: Sequence[str]) -> Callable[[], Seconds]:
    """Return a function that builds a dataset of text and measures all processes' CPU time."""
    flags = flags if "--tokenizer" in flags else ("--tokenizer", str(files[1]), *flags)

    def build() -> Seconds:
        output = tempfile.mkdtemp(dir=files[0].parent) + "/built"
        program = "import sys; from megacp.prepare.command import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "build", "--input", files[0], "--output", output]
        return _run(
            [*command, "--workers", workers, *flags, "--seq-length", 1024, "--oversize", "split"]
        )[1]

    return build


def _megatron(files: tuple[Path, Path], workers: int, batch: int) -> Callable[[], Seconds]:
    """Return a function that runs Megatron's loop, which prints its wall time without imports."""

    def build() -> Seconds:
        output = tempfile.mkdtemp(dir=files[0].parent) + "/built"
        command = [
            sys.executable,
            PEER,
            "--input",
            files[0],
            "--output",
            output,
            "--tokenizer",
            files[1],
        ]
        printed, seconds = _run([*command, "--workers", workers, "--batch", batch])
        return Seconds(float(printed), seconds.cpu)

    return build


def _run(command: Sequence[object]) -> tuple[str, Seconds]:
    """Run a command, and return its output and its duration.

    Raise RuntimeError with the end of its error stream if it fails.
    """
    words = [str(word) for word in command]
    root = Path(megacp.__file__).parents[1]  # finds a checkout that is not installed
    run = functools.partial(subprocess.run, words, cwd=root, capture_output=True, text=True)
    done, seconds = timed(run, _children_seconds)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout, seconds


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
