"""Every sample once: runs die 40 times, and end as if they had not: `make test-once`.

    python -m tests.faults.once --seed 7 --deaths 40

Two tiny models with experts are trained, one with a gated delta rule and one with Mamba-2 in half
of its layers. After every death, the run is restarted on up to 8 ranks and another grid, drawn from
the grids that a run accepts. Deaths are of the kinds in docs/faults.md, at random moments, some of
them before the first step after the previous death. At the end, the run is compared with an
undisturbed run of one process:

* the packs of each step, as the ranks have seen them: every sample once, none lost, none twice;
* the steps and samples in the run's log;
* the loss of each step, and the last checkpoint with both moments of AdamW, to 1e-8 in float64.

Each life prints a line. The last lines show the time from a death to the next step. The exit status
is 1 if anything differs, if a life ends differently from what its fault explains, or if no life can
resume.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megacp.distributed.grid import single_axis
from megacp.engine.backends.select import backend_problems
from megacp.engine.checks import check
from megacp.engine.config.cli import parse
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.prepare.packs.writer import Segment
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.checkpoint.directory import committed
from megacp.training.start.script import flags_of
from megacp.verify.spawn import preloaded
from tests.faults import witness
from tests.faults.processes import ROOT
from tests.faults.witness import PLAN, RECOVERY, SEQ_LENGTH, Plan
from tests.training.data.datasets import write_dataset

TOLERANCE = 1e-8
BATCH = 12
"""Packs per step, so that dp may be 1, 2, 3, 4 or 6."""
EPOCHS = 2
STEPS_PER_DEATH = 1.5
"""Steps of a run per death. A life seldom gets further than this number of steps."""
ENDS_WITHIN = 600.0
"""Seconds after which a life hangs, if it has been struck or should finish."""
QUICK, PATIENT = 0.25, 4.0
"""--distributed-timeout-minutes of a life whose ranks must detect a missing rank by it, and of other
lives.
"""
PR_SET_CHILD_SUBREAPER = 36
"""Linux's name of a process option (prctl.h): the process becomes the parent of ranks whose launcher
has been killed.
"""

MODEL: dict[str, Value] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "vocab_size": 64,
    "hidden_dropout": 0.1,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.001,
    "moe_aux_loss_coeff": 0.01,
    "linear_attention_freq": "2",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MODELS: dict[str, dict[str, Value]] = {
    "gated delta rule": {**MODEL, "linear_attention_rule": "gated_delta"},
    "Mamba-2": {**MODEL, "linear_attention_rule": "mamba2"},
}
TRAINING: dict[str, Value] = {
    "seq_length": SEQ_LENGTH,
    "global_batch_size": BATCH,
    "train_epochs": float(EPOCHS),
    # With an epsilon of 1e-8 AdamW divides gradients that are all but 0 by themselves, rounding and
    # all: the difference of two grids then grows from 1e-15 to 1e-7 in 34 steps that nothing
    # disturbs. With these two it stays at 1e-15.
    "adam_eps": 1e-4,
    "lr": 0.003,
    "lr_warmup_iters": 4,
    "dtype": "float64",
    "keep_last": 4,
}


@dataclass(frozen=True)
class Kind:
    """A way to die."""

    statuses: tuple[int, ...]
    """Allowed exit statuses of the launcher."""
    moments: tuple[str, ...]
    """The moment at which it strikes."""
    waits: bool = False
    """Whether the other ranks notice only after --distributed-timeout-minutes."""
    at_once: bool = False
    """Whether it strikes at the start of its moment, not some tenths of a second later."""
    names_rank: bool = False
    """Whether the messages of the other ranks name the rank."""
    of_many: bool = False
    """Whether it needs a launcher, and more than one rank."""


ANYTIME = (*RECOVERY, "step", "step", "step", "save")
KILLED = -signal.SIGKILL
TOLD = (3, 1, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Statuses of a stopped life: 3 after saving, or another one if training had not begun."""
KINDS: dict[str, Kind] = {
    "a rank is killed": Kind((1,), ANYTIME, names_rank=True),
    "a rank freezes": Kind(
        (1,), ("start", "step"), waits=True, at_once=True, names_rank=True, of_many=True
    ),
    "a rank hangs": Kind(
        (1,), ("join", "step"), waits=True, at_once=True, names_rank=True, of_many=True
    ),
    "a rank raises": Kind((1,), ("read", "resume", "step", "save"), at_once=True, names_rank=True),
    "a rank is told to stop": Kind(TOLD, ("resume", "step", "save")),
    "the launcher is told to stop": Kind(TOLD, ("resume", "step", "save"), of_many=True),
    "the terminal hangs up": Kind(TOLD, ("resume", "step", "save")),
    "Ctrl-C": Kind(TOLD, ("resume", "step", "save")),
    "the launcher is killed": Kind((KILLED,), ANYTIME, of_many=True),
    "the machine is lost": Kind((KILLED,), ANYTIME),
    "the disk is full": Kind((1,), ("save",), names_rank=True),
    "a rank is killed in writing": Kind((1,), ("save",), names_rank=True),
    "rank 0 is killed before the rename": Kind((1,), ("save",), names_rank=True),
    "rank 0 is killed before `latest`": Kind((1,), ("save",), names_rank=True),
    "a rank has another flag": Kind((2,), ("start",), names_rank=True, of_many=True),
    "a pack is damaged": Kind((1, 2), ("step",)),
    "a second run comes": Kind((KILLED,), ("step",)),
}
DAMAGES = ("cut", "flipped", "removed")
"""Damage to a file of the newest checkpoint while no rank runs."""


def write_packs(folder: Path, count: int, seed: int) -> None:
    """Write packs of three documents; the first tokens of a pack are its number."""
    numbers = np.random.default_rng(seed)
    packs = []
    for pack in range(count):
        cuts = np.sort(numbers.choice(np.arange(4, SEQ_LENGTH - 4), 2, replace=False))
        tokens = numbers.integers(0, witness.BASE, SEQ_LENGTH)
        tokens[: witness.DIGITS] = witness.name_of(pack)
        packs.append([Segment(document) for document in np.split(tokens, cuts)])
    write_dataset(folder, [packs], vocab_size=64, seq_length=SEQ_LENGTH)


def drawn_grid(moments: random.Random, base: RunConfig) -> tuple[int, dict[str, Value]]:
    """Draw a number of ranks, mostly 8, and flags of layout, schedule, sharding and saving that a
    run accepts.
    """
    for _ in range(10_000):
        world = moments.choice([8, 8, 8, 8, 8, 6, 4, 4, 3, 2, 1])
        values: dict[str, Value] = {
            "tensor_model_parallel_size": moments.choice([1, 1, 2, 4]),
            "pipeline_model_parallel_size": moments.choice([1, 1, 2, 3, 4]),
            "context_parallel_size": moments.choice([1, 1, 2, 3, 4]),
            "expert_model_parallel_size": moments.choice([1, 2, 4, 8]),
            "num_virtual_stages_per_pipeline_rank": moments.choice([1, 1, 2]),
            "pipeline_schedule": moments.choice(["1f1b", "zero_bubble"]),
            "cp_comm_type": moments.choice(["p2p", "all_gather", "a2a", "kv_exchange"]),
            "cp_layout": moments.choice(["zigzag", "zigzag_document", "contiguous", "balanced"]),
            "dynamic_context_parallel": False,
            "data_parallel_sharding_strategy": moments.choice(
                ["optim", "optim_grads", "optim_grads_params"]
            ),
            "num_distributed_optimizer_instances": moments.choice([1, 1, 2]),
            "micro_batch_size": moments.choice([1, 1, 2]),
            "recompute_granularity": moments.choice(["none", "none", "selective", "full"]),
            "activation_offload": moments.choice([0.0, 0.0, 0.5]),
            "ddp_bucket_size": moments.choice([2000, 25_000_000]),
            "async_save": moments.choice([False, True]),
            "save_interval": moments.choice([1, 2, 2, 3]),
        }
        if moments.random() < 0.2:  # which asks for one transport and one layout
            dynamic = {
                "dynamic_context_parallel": True,
                "cp_comm_type": "kv_exchange",
                "cp_layout": "balanced",
            }
            values.update(dynamic)
        config = with_values(base, values)
        reasons = [*check(config, world), *backend_problems(config, "cpu")]
        if not reasons:
            return world, values
    raise AssertionError(f"no grid is legal: {reasons}")


def in_words(world: int, values: Mapping[str, Value]) -> str:
    """Describe a grid in a few words."""
    shape = with_values(RunConfig(), values).grid_shape(world)
    sizes = {"dp": shape.dp, "pp": shape.pp, "cp": shape.cp, "tp": shape.tp}
    parts = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    parts.append(f"ep {values['expert_model_parallel_size']}")
    if shape.cp > 1 or values["dynamic_context_parallel"]:
        parts.append(f"{values['cp_comm_type']} {values['cp_layout']}")
    if values["dynamic_context_parallel"]:
        parts.append("dynamic")
    if shape.pp > 1:
        parts.append(
            f"{values['pipeline_schedule']} of {values['num_virtual_stages_per_pipeline_rank']}"
        )
    if values["data_parallel_sharding_strategy"] != "optim":
        parts.append(str(values["data_parallel_sharding_strategy"]))
    return f"{world} rank{'s' if world > 1 else ''}: {', '.join(parts)}"


@dataclass
class Life:
    """A start of the program, and its outcome."""

    folder: Path
    world: int
    plan: Plan
    flags: list[str]
    words: str = ""
    """Its grid, for the printed line."""
    begun: float = 0.0
    """The time of its start."""
    process: int = 0
    """The launcher; its id is also the number of the process group."""
    status: int | None = None
    """Exit status of the launcher."""
    struck: float | None = None
    """The time of the fault, if this process causes it."""
    ended: float = 0.0
    """The time at which its last process had ended."""
    is_told: bool = False
    """Whether its ranks were stopped after their launcher had ended."""
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The lines of each process."""

    def start(self) -> None:
        """Start launcher and ranks in a new process group."""
        self.folder.mkdir()
        environment = {
            **os.environ,
            PLAN: self.plan.write(),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment["PYTHONPATH"] = str(ROOT)
        launcher = ["--nproc", str(self.world)] if self.world > 1 else []
        arguments = [*launcher, *self.flags]
        self.begun = time.time()
        with open(self.folder / "said.txt", "ab") as said:
            if not self.plan.forked:
                command = [sys.executable, "-m", "tests.faults.witness", *arguments]
                started = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=said, stderr=said, process_group=0
                )
                self.process = started.pid
                return
            assert threading.active_count() == 1, "a process with threads cannot be forked"
            self.process = os.fork()
            if self.process == 0:
                os.setpgid(0, 0)
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.environ.clear()
                os.environ.update(environment)
                sys.argv = ["megacp.train", *arguments]
                witness.main()
            with contextlib.suppress(OSError):  # it may have done so, or have ended
                os.setpgid(self.process, self.process)

    def said(self) -> str:
        """Return the output of all its processes."""
        return (self.folder / "said.txt").read_text(errors="replace")

    def read(self) -> None:
        """Read the lines of its witnesses; a kill may have truncated the last one."""
        for path in self.folder.glob("*.jsonl"):
            lines = path.read_text().splitlines()
            self.records[path.stem] = [json.loads(line) for line in lines if line.endswith("}")]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of an event from all its processes, in the order of time."""
        lines = [
            line
            for of_process in self.records.values()
            for line in of_process
            if line["event"] == name
        ]
        return sorted(lines, key=lambda line: line["time"])

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Wait until all its processes have ended, or for an earlier event.

        Raise AssertionError if it hangs. Ranks that are left are ended as an operator would: ranks
        of a killed launcher are stopped, and a rank that hangs is killed after the other ranks.
        """
        deadline = time.monotonic() + ENDS_WITHIN
        while left := self._left():
            if until is not None and until():
                return
            if self.status is not None and not self.is_told:
                self.is_told = True
                send(left, signal.SIGTERM)
            if (
                self.plan.fault in KINDS
                and KINDS[self.plan.fault].waits
                and len(left) <= 2
                and "strikes" in self.notes()
            ):
                send([pid for pid in left if pid != self.process], signal.SIGKILL)
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"{self.folder.name} hangs:\n{self.said()[-6000:]}")
            time.sleep(0.05)
        self.ended = time.time()
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.read()

    def notes(self) -> str:
        """Return the events of the rank in the plan up to now."""
        path = self.folder / f"rank_{self.plan.rank}.jsonl"
        return path.read_text() if path.exists() else ""

    def _left(self) -> list[int]:
        """Return its running processes. Record the exit status of the launcher, and of its orphans."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-self.process, os.WNOHANG))[0]:
                if found[0] == self.process:
                    self.status = os.waitstatus_to_exitcode(found[1])
        return processes_of_group(self.process)

    def end(self) -> None:
        """Kill its remaining processes."""
        if self.process == 0 or self.ended > 0.0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        while self._left():
            time.sleep(0.05)


def send(processes: Sequence[int], number: int) -> None:
    """Send a signal to all running processes."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def processes_of_group(group: int) -> list[int]:
    """Return the running processes of a group, except for the launcher's children that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, its_group = path.read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


@dataclass
class Run:
    """A run of one model: its lives, and the undisturbed run for comparison."""

    name: str
    folder: Path
    deaths: int
    moments: random.Random
    lives: list[Life] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.steps = round(STEPS_PER_DEATH * self.deaths) + 4
        self.packs = (
            self.steps * BATCH - BATCH // 2
        ) // EPOCHS  # the last step is short of half its packs
        self.data, self.save, self.clean = (
            self.folder / name for name in ("data", "save", "clean")
        )
        write_packs(self.data, self.packs, self.moments.randrange(1 << 30))
        values = {
            **MODELS[self.name],
            **TRAINING,
            "data_path": str(self.data),
            "seed": self.moments.randrange(1 << 30),
        }
        self.flags = flags_of(values)
        self.base = parse([*self.flags, "--save", str(self.save), "--auto-resume"])
        self.undisturbed = Life(
            self.folder / "undisturbed",
            1,
            Plan(str(self.folder / "undisturbed")),
            [*self.flags, "--save", str(self.clean)],
        )

    # -- the lives -------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Return the step of the checkpoint from which the next life resumes; 0 without one."""
        if not committed(self.save):
            return 0
        return load_checkpoint(self.save, single_axis("world")).step

    def life(self, kind: str, forked: bool = True, recovery: bool = False) -> Life:
        """Run the next life on a drawn grid, with a fault of this kind; "" has none."""
        moments, number = self.moments, len(self.lives) + 1
        while True:
            world, grid = drawn_grid(moments, self.base)
            if world > 1 or not (kind and KINDS[kind].of_many):
                break
        folder = self.folder / f"life_{number:02d}"
        plan = Plan(str(folder), forked)
        timeout = PATIENT
        if kind:
            plan, timeout = self._planned(plan, kind, world, grid, recovery)
        grid["distributed_timeout_minutes"] = timeout
        flags = [*self.flags, *flags_of(grid), "--save", str(self.save), "--auto-resume"]
        return Life(folder, world, plan, flags, words=in_words(world, grid))

    def _planned(
        self, plan: Plan, kind: str, world: int, grid: dict[str, Value], recovery: bool
    ) -> tuple[Plan, float]:
        """Return the plan with a moment for the fault, and the minutes that ranks wait for a missing
        rank.
        """
        moments, begun, of = self.moments, self.step(), KINDS[kind]
        allowed = [one for one in of.moments if (one in RECOVERY) == recovery] or of.moments
        moment = moments.choice(allowed)
        if moment == "read" and begun == 0:
            moment = "resume"
        step = 0
        if moment in ("step", "save"):
            step = self._drawn_step(moment, begun, grid)
        rank = 0 if kind.startswith("rank 0") else moments.randrange(world)
        delay = 0.0 if of.at_once else moments.uniform(0.0, 0.4)
        planned = dataclasses.replace(
            plan, fault=kind, rank=rank, moment=moment, step=step, delay=delay
        )
        return planned, QUICK if is_found_late(planned) else PATIENT

    def _drawn_step(self, moment: str, begun: int, grid: dict[str, Value]) -> int:
        """Draw the step in which a life that resumes after step `begun` dies or saves."""
        # leave a checkpoint, so that the next life can resume
        if begun == 0:
            grid.update(save_interval=1, async_save=False)
            return 3
        if moment == "step":
            return min(begun + 1 + self.moments.randrange(4), max(begun + 1, self.steps - 2))
        interval = grid["save_interval"]
        assert isinstance(interval, int)
        step = (begun // interval + self.moments.choice([1, 1, 2])) * interval
        return min(step, self.steps)  # the last one is always saved

    def damage(self) -> str:
        """Damage a file of the newest checkpoint while no rank runs, if there are two intact ones.

        Return a description.
        """
        folders = committed(self.save)
        if len(folders) < 2 or self.step() != int(folders[0].name[5:12]):
            return ""
        path = Path(str(folders[0]), self.moments.choice(sorted(os.listdir(str(folders[0])))))
        how = self.moments.choice(DAMAGES)
        content = bytearray(path.read_bytes())
        place = self.moments.randrange(len(content))
        if how == "cut":
            path.write_bytes(content[:place])
        elif how == "flipped":
            content[place] ^= 1 << self.moments.randrange(8)
            path.write_bytes(content)
        else:
            path.unlink()
        return f"; then {path.name} of {folders[0].name} is {how}"

    def die(self, kind: str, forked: bool, recovery: bool) -> None:
        """Start a life and let it die."""
        life = self.life(kind, forked, recovery)
        tokens = next(self.data.glob("*/tokens.bin"))
        sound = tokens.read_bytes()
        if kind == "a pack is damaged":
            content = bytearray(sound)
            of_a_pack = len(sound) // self.packs  # bytes
            content[self.expected[life.plan.step][-1] * of_a_pack + of_a_pack // 2] ^= 1
            tokens.write_bytes(content)
            life.struck = time.time()
        self.lives.append(life)
        life.start()
        if kind == "a second run comes":
            life.wait(lambda: "trained" in life.notes())
            life.struck = time.time()
            send(processes_of_group(life.process), signal.SIGSTOP)
            self.refuse_second(life)
            send(processes_of_group(life.process), signal.SIGKILL)
        life.wait()
        tokens.write_bytes(sound)
        strikes = life.events("strikes")
        if strikes:
            life.struck = strikes[0]["time"]
        self.judge(life)

    def refuse_second(self, first: Life) -> None:
        """Start another run in the same directory, which must be refused."""
        folder = first.folder.with_name(f"{first.folder.name}_second")
        second = Life(
            folder, 2, Plan(str(folder)), [*self.flags, "--save", str(self.save), "--auto-resume"]
        )
        second.start()
        second.wait()
        assert second.status == 2, (
            f"a second run was not refused: {second.status}\n{second.said()[-3000:]}"
        )

    def judge(self, life: Life) -> None:
        """Raise AssertionError if a life did not end as its fault explains."""
        if life.status == 0 and self.is_finished():
            return
        kind, said = KINDS[life.plan.fault], life.said()
        allowed = {*kind.statuses}
        if life.world == 1:
            allowed.add(KILLED)
        if life.plan.moment == "start":  # ranks refuse to run if no other rank appears
            allowed.add(2)
        where = f"{life.folder}: {life.plan.fault}, {life.words}, rank {life.plan.rank}"
        assert life.struck is not None, (
            f"{where}: ended with status {life.status} before it\n{said[-6000:]}"
        )
        assert life.status in allowed, (
            f"{where}: status {life.status}, not one of {sorted(allowed)}\n{said[-6000:]}"
        )
        if kind.names_rank and life.world > 1:
            named = re.search(rf"\branks? (\d+, )*{life.plan.rank}\b", said)
            assert named, f"{where}: is not named\n{said[-6000:]}"

    def is_finished(self) -> bool:
        """Return whether the last step is saved."""
        return self.step() == self.steps

    def go(self, forked_for: int) -> None:
        """Live until all deaths have happened, then to the end."""
        self.undisturbed.start()
        self.undisturbed.wait()
        assert self.undisturbed.status == 0, self.undisturbed.said()
        self.expected = counted([self.undisturbed])
        kinds = [*KINDS]
        self.moments.shuffle(kinds)
        while len(kinds) < self.deaths:
            kinds.append(self.moments.choice([*KINDS]))
        for number, kind in enumerate(kinds[: self.deaths], 1):
            if self.is_finished():
                break
            in_recovery = number > 1 and self.moments.random() < 0.35
            self.die(kind, forked=number % forked_for != 0, recovery=in_recovery)
            damage = self.damage() if self.moments.random() < 0.25 else ""
            self.tell(damage)
        if not self.is_finished():
            last = self.life("")
            self.lives.append(last)
            last.start()
            last.wait()
            assert last.status == 0, f"the last life failed: {last.said()[-6000:]}"
            self.tell("")

    def tell(self, damage: str) -> None:
        """Print a line of the last life."""
        life, plan = self.lives[-1], self.lives[-1].plan
        steps = [line["step"] for line in life.events("trained")]
        trained = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
        end = "to the end"
        if plan.fault:
            at = f"{plan.moment} {plan.step}" if plan.step else plan.moment
            end = f"{plan.fault} (rank {plan.rank}, {at}){damage}"
        seconds = f"{life.ended - life.begun:.1f} s"
        start = "forked" if plan.forked else "started"
        print(
            f"life {len(self.lives):2}  {trained:15} {life.words}, {start}, {seconds}: {end}",
            flush=True,
        )

    # -- the comparison --------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Print a summary of the lives, and return the differences from the undisturbed run."""
        problems = []
        found = counted(self.lives)
        steps = range(1, self.steps + 1)
        if sorted(found) != [*steps]:
            problems.append(f"trained were the steps {sorted(found)}, not 1 to {self.steps}")
        times = Counter(pack for packs in found.values() for pack in packs)
        lost = sum(max(0, EPOCHS - times[pack]) for pack in range(self.packs))
        twice = sum(max(0, count - EPOCHS) for count in times.values())
        other = [step for step in steps if found.get(step) != self.expected[step]]
        if lost or twice or other:
            problems.append(f"{lost} samples lost, {twice} twice; other packs in the steps {other}")
        if not any(life.events("read") and life.events("trained") for life in self.lives):
            problems.append("no life has gone on from a checkpoint: take more deaths")
        log, clean = rows_that_count(self.save), rows_that_count(self.clean)
        for step in steps:
            samples = min(step * BATCH, self.packs * EPOCHS)
            if step not in log or log[step]["consumed_samples"] != samples:
                problems.append(
                    f"step {step} of the log is {log.get(step)}, it ends after {samples} samples"
                )
        loss = max(abs(log[step]["loss"] - clean[step]["loss"]) for step in steps if step in log)
        compared = {"losses": loss, **differences(self.save, self.clean)}
        for name, difference in compared.items():
            if not difference <= TOLERANCE:
                problems.append(f"{name} differ by {difference:.1e}, more than {TOLERANCE:.0e}")
        deaths = [life for life in self.lives if life.plan.fault and life.status != 0]
        if len(deaths) < self.deaths:
            problems.append(
                f"the run came to its end after {len(deaths)} of {self.deaths} deaths: take "
                "another seed"
            )
        early = sum(not life.events("trained") for life in deaths)
        lived = (
            f"{len(deaths)} deaths ({early} before a step) in {len(self.lives)} lives, "
            f"{self.steps} steps"
        )
        seen = f"{sum(times.values())} samples, {lost} lost, {twice} twice"
        close = ", ".join(
            f"{name} within {difference:.0e}" for name, difference in compared.items()
        )
        print(f"{self.name}: {lived}; {seen}; {close}", flush=True)
        return [f"{self.name}: {problem}" for problem in problems]

    def ends(self) -> Iterator[tuple[bool, float]]:
        """Return for each death whether ranks noticed by a timeout, and the seconds until the last
        of them had ended.
        """
        for life in self.lives:
            if life.struck is not None and life.plan.fault != "a pack is damaged":
                yield is_found_late(life.plan), life.ended - life.struck

    def recoveries(self) -> Iterator[tuple[int, bool, dict[str, float]]]:
        """Return for each life that reached a step: its ranks, whether they were forked, and the
        seconds of its parts.
        """
        for life in self.lives:
            trained = life.events("trained")
            last = {moment: [line["time"] for line in life.events(moment)] for moment in RECOVERY}
            if not trained or not last["read"] or life.world == 1:
                continue
            first = [line["time"] for line in trained if line["step"] == trained[0]["step"]]
            spawned = life.events("spawns")[0]["time"]
            ends = [spawned, *(max(times) for times in last.values()), max(first)]
            begins = [life.begun, *ends]
            parts = {
                name: end - begin for name, begin, end in zip(PARTS, begins, ends, strict=False)
            }
            yield life.world, life.plan.forked, parts


PARTS = (
    "the launcher's imports and checks",
    "the ranks' imports",
    "their checks and meeting",
    "groups and model",
    "reading the checkpoint",
    "the first step",
)
"""Parts of a life that reaches a step, in order."""


def is_found_late(plan: Plan) -> bool:
    """Return whether ranks notice only by --distributed-timeout-minutes, because none of their
    connections closes.
    """
    survives = plan.fault not in ("the machine is lost", "a rank has another flag")
    return KINDS[plan.fault].waits or (survives and plan.moment in ("start", "join"))


def counted(lives: Sequence[Life]) -> dict[int, list[int]]:
    """Return the packs of each step of the run, sorted, from the last life that trained it.

    A life resumes from a checkpoint and trains every later step again, so the last one counts.
    Raise AssertionError if ranks that share rows saw different packs.
    """
    found: dict[int, list[int]] = {}
    for life in lives:
        by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in life.events("trained"):
            by_step[line["step"]].append(line)
        for step, lines in by_step.items():
            if len(lines) < life.world:  # it died in this step
                found.pop(step, None)
                continue
            shares: dict[int, list[int]] = {}
            for line in lines:
                share = shares.setdefault(line["index"], line["packs"])
                assert share == line["packs"], (
                    f"{life.folder.name}, step {step}: ranks of one row read other packs"
                )
            assert len(shares) == lines[0]["size"], (
                f"{life.folder.name}, step {step}: only rows {sorted(shares)}"
            )
            found[step] = sorted(pack for packs in shares.values() for pack in packs)
    return found


def rows_that_count(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the training rows of a run's log by step. A row of kind `run` removes later steps above
    it.
    """
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "run":
            found = {step: other for step, other in found.items() if step <= row["step"]}
        elif row["kind"] == "train":
            found[row["step"]] = row
    return found


def differences(one: Path, other: Path) -> dict[str, float]:
    """Return the largest difference between the last checkpoints of two runs, by kind of tensor; inf
    if names differ.
    """
    world, found = single_axis("world"), {}
    mine, theirs = (load_checkpoint(folder, world) for folder in (one, other))
    for kind, name in (
        ("model", "weights"),
        ("optimizer.exp_avg", "moments"),
        ("optimizer.exp_avg_sq", "squares"),
    ):
        a, b = dict(mine.whole_tensors(kind)), dict(theirs.whole_tensors(kind))
        if a.keys() != b.keys() or not a or mine.step != theirs.step:
            found[name] = math.inf
            continue
        found[name] = max(float((a[key] - b[key]).abs().max()) for key in a)
    return found


def report(runs: Sequence[Run]) -> None:
    """Print the median time from a death to the next step, by part."""
    ends = [one for run in runs for one in run.ends()]
    at_once = [seconds for late, seconds in ends if not late]
    late = [seconds for late, seconds in ends if late]
    recoveries = [one for run in runs for one in run.recoveries()]
    if not at_once:
        return
    print(f"median seconds from a death to the next step, of {len(ends)} deaths:")
    print(f"  {statistics.median(at_once):5.1f}  until all ranks have ended")
    if late:
        flag = f"--distributed-timeout-minutes {QUICK:g}"
        print(
            f"  {statistics.median(late):5.1f}  the same for {len(late)} deaths that ranks find by "
            f"{flag}"
        )
    for forked, how in (
        (False, "started as a user starts them"),
        (True, "forked with everything imported"),
    ):
        chosen = [
            parts for world, is_forked, parts in recoveries if is_forked == forked and world == 8
        ]
        if chosen:
            total = statistics.median(sum(parts.values()) for parts in chosen)
            print(
                f"  {total:5.1f}  until 8 ranks have made a step, {how} ({len(chosen)} lives); by "
                "part:"
            )
            for name in PARTS:
                print(f"         {statistics.median(parts[name] for parts in chosen):5.1f}  {name}")


def main(arguments: Sequence[str]) -> int:
    """Run the lives of both models; return 0 if nothing was lost and nothing differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.once", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="of grids, kinds and moments")
    parser.add_argument("--deaths", type=int, default=40, help="of all models together")
    parser.add_argument("--model", default="", help="only the model whose name holds this word")
    parser.add_argument(
        "--forked-for", type=int, default=7, help="every Nth life is started as a user starts it"
    )
    parser.add_argument(
        "--keep", type=Path, help="keep logs, checkpoints and what ranks said in this folder"
    )
    given = parser.parse_args(arguments)
    logging.disable()  # checkpoints that this process passes over
    # nohup ignores the signal, but a hangup of the terminal is one way to die
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # ranks are forked, so modules imported here cost them no time
    for module in preloaded():
        importlib.import_module(module)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="megacp_once_"))
    models = [name for name in MODELS if given.model in name]
    begun = time.monotonic()
    problems, runs = list[str](), list[Run]()
    for name in models:
        moments = random.Random(f"{given.seed} {name}")
        run = Run(name, folder / name.replace(" ", "_"), given.deaths // len(models), moments)
        try:
            run.go(given.forked_for)
            problems += run.audit()
            runs.append(run)
        except AssertionError as problem:
            problems.append(f"{name}: {problem}")
        finally:
            for life in [run.undisturbed, *run.lives]:
                life.end()
    report(runs)
    print(f"{time.monotonic() - begun:.0f} s, seed {given.seed}")
    for problem in problems:
        print(f"FAILED  {problem}")
    if not given.keep and not problems:
        shutil.rmtree(folder)
    elif problems:
        print(f"all of it is in {folder}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
