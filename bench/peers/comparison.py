"""Compares our training steps with other trainers on the same weights and tokens: speed, losses and
memory.

On each grid, all trainers run side by side and take turns, one step each. A slow phase of the
machine therefore affects all of them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.grids import GRIDS, Peer, sizes
from bench.peers.processes import PeerFailure, PeerRanks, PeerStep
from bench.report import Goal, Part
from bench.steps import CP, PP, TP, StepMeasure, measure_rank
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.dry_run.report import table
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.yaml_file import to_yaml
from megacp.engine.data_parallel.boxes import boxes_to_save
from megacp.engine.step.step import ParallelModel
from megacp.storage.wording import human_bytes
from megacp.training.checkpoint.commit import Contents, PendingCheckpoint
from megacp.training.data.mock import MockRules, mock_batch
from megacp.training.loop.state import RunState
from megacp.verify.spawn import RankPool

OURS = "megacp"
_IGNORED = -100
"""Label that torch's cross-entropy ignores."""
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try:
        return m.version(name) if u.find_spec(name) else None
    except m.PackageNotFoundError:
        return "?"
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""

Steps = Sequence[StepMeasure] | Sequence[PeerStep]
ToHuggingFace = Callable[[Path, Path], None]
"""A function that converts a megacp checkpoint (first) to a new Hugging Face folder (second)."""


@dataclass(frozen=True)
class Opponents:
    """The peers, an interpreter that has their packages, and the folder of their scripts."""

    python: str
    scripts: Path
    peers: Mapping[str, Peer]


def versions(python: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of packages in an interpreter; None for missing packages."""
    done = subprocess.run(
        [python, "-c", _PROBE, *names], capture_output=True, text=True, check=True, timeout=120
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def save_rank(rank: int, world_size: int, config: RunConfig, folder: Path) -> None:
    """Write the initial weights of a run as a megacp checkpoint, in one process."""
    model = ParallelModel(config, build_grid(GridShape(), rank))
    boxes = boxes_to_save(model.parameters.parameter_slices(), {}, model.parameters.counts)
    world = model.grid.world
    PendingCheckpoint(
        folder, boxes, Contents(0, asdict(RunState()), to_yaml(config)), world
    ).commit()


def write_tokens(config: RunConfig, rules: MockRules, steps: int, path: Path) -> None:
    """Write tokens and labels [steps, sequences, length] of the mock packs that `Subject.measure`
    uses.
    """
    # Packs are numbered across steps, so each step has new tokens.
    count = config.training.global_batch_size
    packs = [[mock_batch([step * count + i], rules) for i in range(count)] for step in range(steps)]
    tokens = np.array([[pack.tokens for pack in step] for step in packs])
    labels = [
        [np.where(pack.loss_weights > 0, pack.labels, _IGNORED) for pack in step] for step in packs
    ]
    np.savez(path, tokens=tokens, labels=np.array(labels))


@dataclass(frozen=True)
class Turn:
    """One step of one trainer."""

    steps: Steps

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.steps[0].tokens / max(rank.wall for rank in self.steps)

    @property
    def loss(self) -> float:
        """Loss of the step, from the first rank that has it."""
        return next((rank.loss for rank in self.steps if rank.loss is not None), float("nan"))


class Column:
    """All trainers on one grid, which run side by side."""

    def __init__(
        self, name: str, quick: bool, rounds: int, opponents: Opponents, to_hf: ToHuggingFace
    ) -> None:
        self.name, self.grid = name, GRIDS[name]
        self.rounds, self.opponents, self.to_hf = rounds, opponents, to_hf
        self.config = with_values(RunConfig(), {**sizes(quick), **self.grid.values})
        self.rules = MockRules(
            self.config.model.vocab_size, self.config.data.seq_length, "causal", seed=1
        )
        self.failures: dict[str, str] = {}

    def run(self, installed: Sequence[str]) -> dict[str, list[Turn]]:
        """Return the turns of every trainer, including the warm-up."""
        turns: dict[str, list[Turn]] = {}
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="megacp_peers_") as name:
            folder = Path(name)
            ways = {OURS: self._ours(stack)} | self._theirs(stack, folder, installed)
            for number in range(self.rounds + 1):
                for trainer, way in list(ways.items()):
                    try:
                        turns.setdefault(trainer, []).append(Turn(way(number)))
                    except PeerFailure as failure:
                        self.failures[trainer] = str(failure)
                        ways.pop(trainer)
                        turns.pop(trainer)
                        continue
                    last = turns[trainer][-1]
                    print(
                        f"  {self.name}, {trainer}: {number} of {self.rounds}, {last.speed:,.0f}",
                        file=sys.stderr,
                    )
        return turns

    def _ours(self, stack: ExitStack) -> Callable[[int], Steps]:
        pool = stack.enter_context(RankPool(self.grid.ranks))
        return lambda number: pool.run(measure_rank, self.config, self.rules)

    def _theirs(
        self, stack: ExitStack, folder: Path, installed: Sequence[str]
    ) -> dict[str, Callable[[int], Steps]]:
        peers = {name: self.opponents.peers[name] for name in installed}
        peers = {name: peer for name, peer in peers.items() if self.name in peer.cells}
        if not peers:
            return {}
        work = self._work(folder)
        started = {
            name: stack.enter_context(self._start(peer, work, folder / name))
            for name, peer in peers.items()
        }
        # All peers start in parallel; wait for each of them.
        for name, ranks in list(started.items()):
            try:
                ranks.ready()
            except PeerFailure as failure:
                self.failures[name] = str(failure)
                del started[name]
        return {name: ranks.step for name, ranks in started.items()}

    def _work(self, folder: Path) -> dict[str, Any]:
        """Write the weights and tokens for all peers; return the input for their scripts."""
        with RankPool(1) as pool:
            pool.run(
                save_rank, with_values(self.config, {TP: 1, PP: 1, CP: 1}), folder / "checkpoint"
            )
        self.to_hf(folder / "checkpoint", folder / "weights")
        write_tokens(self.config, self.rules, self.rounds + 1, folder / "tokens.npz")
        training = self.config.training
        adamw = {
            "lr": training.lr,
            "beta1": training.adam_beta1,
            "beta2": training.adam_beta2,
            "eps": training.adam_eps,
            "weight_decay": training.weight_decay,
            "clip_grad": training.clip_grad,
        }
        paths = {"weights": str(folder / "weights"), "tokens": str(folder / "tokens.npz")}
        return {**paths, "adamw": adamw, "axes": self.grid.axes()}

    def _start(self, peer: Peer, work: Mapping[str, Any], folder: Path) -> PeerRanks:
        command = [self.opponents.python, str(self.opponents.scripts / peer.script)]
        return PeerRanks(
            command, self.grid.ranks, {**work, "options": dict(peer.cells[self.name])}, folder
        )


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures of one trainer on one grid.

    The first turn is a warm-up, of which only the loss is used.
    """
    timed = turns[1:]
    return {
        "tokens_per_second": statistics.median(one.speed for one in timed),
        "seconds": [max(rank.wall for rank in one.steps) for one in timed],
        "cpu_seconds": statistics.median(sum(rank.cpu for rank in one.steps) for one in timed),
        "peak_memory": [rank.memory for rank in turns[-1].steps],
        "losses": [one.loss for one in turns],
    }


def over_best(found: Mapping[str, Mapping[str, Any]]) -> tuple[float, str] | None:
    """Return the ratio of our tokens per second to the best peer's, and the peer's name.

    Return None if there is no peer.
    """
    speeds = {name: row["tokens_per_second"] for name, row in found.items() if name != OURS}
    if not speeds:
        return None
    best = max(speeds, key=lambda name: speeds[name])
    return found[OURS]["tokens_per_second"] / speeds[best], best


def other_losses(found: Mapping[str, Mapping[str, Any]], digits: int) -> list[str]:
    """Return a message for each peer whose first or last loss, as printed, differs from ours."""
    words = []
    for place, number in (("first", 0), ("last", -1)):
        printed = {name: f"{row['losses'][number]:.{digits}f}" for name, row in found.items()}
        differing = (name for name in printed if printed[name] != printed[OURS])
        words += [
            f"{place} loss of {name} {printed[name]}, ours {printed[OURS]}" for name in differing
        ]
    return words


SHOWN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "peak of the fullest rank": lambda row: human_bytes(max(row["peak_memory"])),
    "processor seconds, all ranks": lambda row: f"{row['cpu_seconds']:.2f}",
}
"""Blocks of the table -> function that formats a trainer's figure on a grid."""


def speed_table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a table with a column per grid and, in each block, a row per trainer.

    `found` maps grids to trainers to `figures`.
    """
    names = list(
        dict.fromkeys(name for rows in found.values() for name in rows if name != OURS)
    ) + [OURS]
    cells: list[list[str]] = []
    for title, shown in SHOWN.items():
        cells.append([title, *(found if not cells else [""] * len(found))])
        cells += [
            [name, *(shown(rows[name]) if name in rows else "-" for rows in found.values())]
            for name in names
        ]
        if title == "tokens/s":
            ratios = [over_best(rows) for rows in found.values()]
            cells.append(
                [
                    "over the best peer",
                    *("-" if ratio is None else f"{ratio[0]:.2f}" for ratio in ratios),
                ]
            )
    for title, number in (("our first loss", 0), ("our last loss", -1)):
        cells.append([title, *(f"{rows[OURS]['losses'][number]:.4f}" for rows in found.values())])
    return table(cells)


def peers_part(
    quick: bool,
    rounds: int,
    opponents: Opponents,
    to_hf: ToHuggingFace,
    grids: Sequence[str] = tuple(GRIDS),
) -> Part:
    """Measure all grids in order; on each grid, all trainers take turns."""
    names = sorted({name for peer in opponents.peers.values() for name in peer.needs} | {"torch"})
    there = versions(opponents.python, names)
    missing = {
        name: [need for need in peer.needs if there[need] is None]
        for name, peer in opponents.peers.items()
    }
    installed = [name for name, needs in missing.items() if not needs]
    lines = [
        f"{name} is absent, not installed: {', '.join(needs)}"
        for name, needs in missing.items()
        if needs
    ]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in grids:
        column = Column(name, quick, rounds, opponents, to_hf)
        found[name] = {trainer: figures(turns) for trainer, turns in column.run(installed).items()}
        # Print each grid immediately, so that its figures survive an interruption.
        print(f"{name}\n{speed_table({name: found[name]})}", file=sys.stderr, flush=True)
        lines += [
            f"{name}: {trainer} failed, {reason}" for trainer, reason in column.failures.items()
        ]
        lines += [f"{name}: {words}" for words in other_losses(found[name], 4)]
    shown = ", ".join(f"{name} {version}" for name, version in there.items() if version is not None)
    goals = []
    for name, rows in found.items():
        limit, ratio = GRIDS[name].goal, over_best(rows)
        if limit is not None and ratio is not None:
            goals.append(
                Goal(
                    f"{name}: our tokens/s over those of {ratio[1]}, the best peer",
                    ratio[0],
                    limit,
                    ">=",
                )
            )
    return Part(
        {"peers": found, "versions": there, "peer_notes": lines},
        goals,
        "\n".join([f"medians of {rounds} rounds; {shown}", speed_table(found), *lines]),
    )
