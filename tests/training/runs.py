"""Tiny training runs for the tests of the loop, of saving and of faults: flags, ranks and logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megacp.engine.config.cli import parse
from megacp.engine.config.run import RunConfig
from megacp.engine.step.step import ParallelModel
from megacp.train import main, prepare_run
from megacp.training.loop.state import RunState, begin_save
from megacp.training.loop.trainer import Trainer
from megacp.training.start.launch import run_store
from tests.ranks import grid, run_ranks

TINY = [
    *(
        "--num-layers",
        "4",
        "--hidden-size",
        "32",
        "--ffn-hidden-size",
        "48",
        "--num-attention-heads",
        "4",
    ),
    *(
        "--num-query-groups",
        "2",
        "--vocab-size",
        "61",
        "--seq-length",
        "64",
        "--global-batch-size",
        "4",
    ),
    *(
        "--train-iters",
        "4",
        "--lr",
        "0.01",
        "--lr-warmup-iters",
        "2",
        "--dtype",
        "float64",
        "--hidden-dropout",
        "0.1",
    ),
]
AXES = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model", "ep": "expert_model"}


def grid_flags(**sizes: int) -> list[str]:
    """Convert `tp=2` to `--tensor-model-parallel-size 2`."""
    return [
        text
        for axis, size in sizes.items()
        for text in (f"--{AXES[axis]}-parallel-size".replace("_", "-"), str(size))
    ]


def losses(folder: Path, name: str = "loss") -> dict[int, float]:
    """Return training losses, or another figure, by step, with all digits of the JSONL log."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if row["kind"] == "train"}


def train_on_rank(rank: int, world_size: int, asked: Sequence[str] | RunConfig) -> int:
    """Run `main` on the pool's process group, whose store may have reports of an earlier test.

    `asked` is a list of flags, or a parsed config: parsing costs each rank as much as a tiny step.
    """
    if world_size > 1:
        run_store().delete_key(f"megacp_failure/{rank}")
    config, sources = prepare_run(
        asked if isinstance(asked, RunConfig) else parse(asked), world_size
    )
    shape = config.grid_shape(world_size)
    place = grid(tp=shape.tp, cp=shape.cp, dp=shape.dp, pp=shape.pp, ep=shape.ep)
    return Trainer(config, place, sources).run()


def run(world_size: int, flags: Sequence[str]) -> None:
    """Train on `world_size` ranks; every rank must finish."""
    results = (
        run_ranks(train_on_rank, world_size, parse(flags)) if world_size > 1 else [main(flags)]
    )
    assert results == [0] * world_size


def save(model: ParallelModel, progress: RunState, config: RunConfig) -> Path:
    """Commit a checkpoint of the run below `--save`; return its directory. Collective."""
    return begin_save(model, progress, config, background=False).commit(config.checkpoint.keep_last)
