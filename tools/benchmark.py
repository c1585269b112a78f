"""Speed, memory and traffic of training steps on this machine's CPU, every layout in one run (`make bench`).

    python tools/benchmark.py [--quick] [--json FILE]

Each layout keeps its own processes and the layouts take turns, one step each, so that a slow minute of the machine
slows them all; the table shows medians. Ratios are over one process with one thread and over one process with two
threads. Ranks have one thread. Bytes sent stand beside the formulas of megacp/measure/traffic.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.config.run import RunConfig, Value, with_values
from megacp.data.synthetic.mock import MockRules
from megacp.distributed.spawn import RankPool
from megacp.measure.steps import StepMeasure, measure_rank
from megacp.planner.report import human_bytes

TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
SIZES: dict[str, Value] = {
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 4096,
    "seq_length": 1024,
    "global_batch_size": 4,
    "dtype": "float32",
}
QUICK_SIZES: dict[str, Value] = {**SIZES, "num_layers": 2, "vocab_size": 1024, "seq_length": 256}
LONG: dict[str, Value] = {"seq_length": 4096, "global_batch_size": 1}
BASE, BASE_TWO_THREADS = "one process, 1 thread", "one process, 2 threads"


@dataclass
class Case:
    """One layout, its processes and what was measured on them."""

    name: str
    ranks: int
    values: dict[str, Value]
    threads: int = 1
    steps: list[list[StepMeasure]] = field(default_factory=list)

    def tokens_per_second(self) -> float:
        """Median over the steps after the first."""
        return statistics.median(step[0].tokens / max(m.seconds for m in step) for step in self.steps[1:])


def cases(groups: Sequence[str]) -> dict[str, list[Case]]:
    """All layouts, in groups that are compared with each other."""
    table = {
        "short": [
            Case(BASE, 1, {}),
            Case(BASE_TWO_THREADS, 1, {}, threads=2),
            Case("dp 2", 2, {}),
            Case("tp 2", 2, {TP: 2}),
            Case("pp 2", 2, {PP: 2}),
            Case("cp 2", 2, {CP: 2}),
        ],
        "long": [
            Case(BASE, 1, LONG),
            Case(BASE_TWO_THREADS, 1, LONG, threads=2),
            Case("cp 2, p2p", 2, {**LONG, CP: 2}),
            Case("cp 2, all_gather", 2, {**LONG, CP: 2, "cp_comm_type": "all_gather"}),
        ],
        "four": [
            Case(BASE, 1, {}),
            Case("cp 4", 4, {CP: 4}),
            Case("tp 2 x cp 2", 4, {TP: 2, CP: 2}),
        ],
    }
    return {name: table[name] for name in groups}


def run_group(group: Sequence[Case], sizes: dict[str, Value], rounds: int, mask: str) -> None:
    """Warm up every layout once, then let them take turns."""
    with ExitStack() as stack:
        pools = [stack.enter_context(RankPool(case.ranks, case.threads)) for case in group]
        for number in range(rounds + 1):
            for case, pool in zip(group, pools, strict=True):
                config = with_values(RunConfig(), {**sizes, **case.values})
                rules = MockRules(config.model.vocab_size, config.data.seq_length, mask, seed=1)
                begin = time.perf_counter()
                case.steps.append(pool.run(measure_rank, config, rules))
                kind = "warm-up" if number == 0 else f"round {number}"
                print(f"  {case.name}: {kind} {time.perf_counter() - begin:.2f} s", file=sys.stderr)


def summary(group: Sequence[Case]) -> list[dict[str, Any]]:
    """One row of plain values per layout."""
    speed = {case.name: case.tokens_per_second() for case in group}
    rows = []
    for case in group:
        last = case.steps[-1]
        sent = [
            {axis: [m.sent.get(axis, 0), count] for axis, count in dataclasses.asdict(m.formula).items() if count}
            for m in last
        ]
        rows.append(
            {
                "layout": case.name,
                "ranks": case.ranks,
                "threads": case.threads,
                "tokens_per_second": speed[case.name],
                "over_one_thread": speed[case.name] / speed[BASE],
                "over_two_threads": speed[case.name] / speed[BASE_TWO_THREADS] if BASE_TWO_THREADS in speed else None,
                "seconds": [max(m.seconds for m in step) for step in case.steps[1:]],
                "cpu_seconds": statistics.median(max(m.cpu_seconds for m in step) for step in case.steps[1:]),
                "peak_memory": [m.memory for m in last],
                "loss": last[0].loss,
                "bytes_sent_and_formula": sent,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text: speed, ratios, memory of the fullest rank, then the bytes of every axis beside the formula."""
    lines = [f"  {'layout':<24}{'tokens/s':>10}{'/1 thread':>11}{'/2 threads':>12}{'CPU s/rank':>12}{'peak/rank':>12}"]
    for row in rows:
        second = "" if row["over_two_threads"] is None else f"{row['over_two_threads']:.2f}"
        lines.append(
            f"  {row['layout']:<24}{row['tokens_per_second']:>10,.0f}{row['over_one_thread']:>11.2f}{second:>12}"
            f"{row['cpu_seconds']:>12.2f}{human_bytes(max(row['peak_memory'])):>12}"
        )
    for row in rows:
        for rank, axes in enumerate(row["bytes_sent_and_formula"]):
            parts = [
                f"{axis} {sent:,} " + ("= formula" if sent == formula else f"(formula {formula:,})")
                for axis, (sent, formula) in axes.items()
            ]
            if parts:
                lines.append(f"  sent by rank {rank} of {row['layout']}: {', '.join(parts)}")
    return "\n".join(lines)


def write_text(path: Path, megabytes: float) -> tuple[int, list[str]]:
    """The standard library's sources as JSONL, over and over up to the size; bytes of text and the first texts."""
    root = Path(sysconfig.get_path("stdlib"))
    texts, size = [], 0
    for source in sorted(root.rglob("*.py")):
        if "site-packages" in source.parts:
            continue
        text = source.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            texts.append(text)
            size += len(text.encode())
        if size > megabytes * 1e6:
            break
    copies = max(1, math.ceil(megabytes * 1e6 / size))
    with path.open("w", encoding="utf-8") as file:
        for text in texts * copies:
            file.write(json.dumps({"text": text}) + "\n")
    return size * copies, texts


def preprocessing(megabytes: float, rounds: int) -> list[dict[str, Any]]:
    """MB of text per second of `tools/preprocess_data.py build` with 1 and 2 workers, start-up included."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tool = Path(__file__).with_name("preprocess_data.py")
    with tempfile.TemporaryDirectory(prefix="megacp_bench_") as folder:
        text = Path(folder, "text.jsonl")
        size, texts = write_text(text, megabytes)
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator(texts[:100], trainer)
        bpe.save(f"{folder}/tokenizer.json")
        seconds: dict[tuple[str, int], list[float]] = {}
        for number in range(rounds):
            for kind in ("byte", "tokenizer.json"):
                for workers in (1, 2):
                    output = f"{folder}/{kind}_{workers}_{number}"
                    tokenizer = kind if kind == "byte" else f"{folder}/{kind}"
                    command = [sys.executable, str(tool), "build", "--input", str(text), "--output", output]
                    command += ["--tokenizer", tokenizer, "--seq-length", "1024", "--workers", str(workers)]
                    command += ["--oversize", "split"]
                    begin = time.perf_counter()
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
                    seconds.setdefault((kind, workers), []).append(time.perf_counter() - begin)
    return [
        {"tokenizer": kind, "workers": workers, "megabytes_per_second": size / 1e6 / statistics.median(times)}
        for (kind, workers), times in seconds.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure training steps and preprocessing on this machine's CPU.")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: does it work (20 seconds)")
    parser.add_argument("--rounds", type=int, metavar="N", help="steps measured of each layout (default 3, quick 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("short", "long", "four", "preprocess"),
        default=["short", "long", "preprocess"],
        help="parts to run: 2 ranks on 1,024 tokens, cp 2 on 4,096, 4 ranks, the preprocessor (default: all but four)",
    )
    arguments = parser.parse_args(argv)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    sizes = QUICK_SIZES if arguments.quick else SIZES
    load = os.getloadavg()[0]
    result: dict[str, Any] = {"sizes": sizes, "rounds": rounds, "cores": os.cpu_count(), "load_before": load}
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start, medians of {rounds} steps")
    for name, group in cases([part for part in arguments.only if part != "preprocess"]).items():
        run_group(group, sizes, rounds, mask="causal")
        result[name] = summary(group)
        print(f"\n{name}: {group[0].steps[0][0].tokens:,} tokens a step\n{table(result[name])}", flush=True)
    if "preprocess" in arguments.only:
        result["preprocess"] = preprocessing(2.0 if arguments.quick else 120.0, rounds=1 if arguments.quick else 2)
        print("\npreprocessing (MB of text per second, start-up included)")
        for row in result["preprocess"]:
            print(f"  {row['tokenizer']:<16}{row['workers']} workers {row['megabytes_per_second']:>8.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    else:
        print("\n" + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
