"""Train: `python -m megacp.train --nproc 8 --data-path DIR ...`, under torchrun, or without either on one process.

Parse, check everything, agree with all other ranks, train. `--nproc` checks all in one process and then starts ranks of
this machine; torchrun's report would stand below what they say. `--dry-run` prints grid, stages and memory of any world
size and stops.

Exit status: 0 finished, 1 a failure with its traceback, 2 refused with one message, 3 stopped early after saving (by a
signal or --exit-duration), 130 interrupted before there was anything to save. torchrun --max-restarts would start the
run again for a 3, so it is 0 there.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from megacp.training.start.interrupts import INTERRUPTED, handles, leave_at_ctrl_c

# torch is imported below, which takes seconds in which a user may press Ctrl-C
if __name__ == "__main__" or sys.argv[0].endswith("megacp-train"):
    leave_at_ctrl_c()

from megacp.distributed.grid import ProcessGrid
from megacp.distributed.shape import GridShape
from megacp.dry_run.report import describe
from megacp.engine.backends.select import backend_problems
from megacp.engine.checks import require
from megacp.engine.config.blend import shown_path
from megacp.engine.config.cli import OneLineParser, given_flags, given_names, parse
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.storage.place import place_of
from megacp.training.checkpoint.outcome import reason_of
from megacp.training.checkpoint.weights import Weights
from megacp.training.loop.equal_start import AlikeError, require_equal_start, statement
from megacp.training.loop.sources import Sources, open_sources, with_stored_length
from megacp.training.loop.stopping import FAILED, STOPPED
from megacp.training.loop.stored import goes_on_from, resumes, with_stored_model
from megacp.training.loop.trainer import Trainer
from megacp.training.monitor.console import ends_with_its_reader, say, warn
from megacp.training.start import launch
from megacp.training.start.layout import SavedBy, other_layout

REFUSED = 2
_SECONDS_OF_A_REFUSED_RANK = 60.0
"""How long a rank that cannot run waits for the others, to refuse the run together with them."""
_SECONDS_FOR_THE_FIRST = 5.0
"""torchrun ends all ranks of a machine when the first one exits: the others leave the one that speaks the time to."""
_SECONDS_OF_OTHERS = 60.0
"""How long the ranks of --nproc may still speak after one has failed; a rank in a collective of NCCL waits for ever."""
_HELP, _HELP_ALL = ("-h", "--help"), "--help-all"
_FIRST_FLAGS = set(
    "data-path valid-data-path seq-length load-hf load-adapter load finetune save save-interval auto-resume num-layers "
    "hidden-size lora-rank tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
    "cp-comm-type cp-layout train-iters train-epochs global-batch-size lr lr-warmup-iters dtype recompute-granularity "
    "eval-interval dry-run world-size".split()
)
"""What --help shows; --help-all shows the rest too."""


@dataclass(frozen=True)
class Plan:
    """What this rank would run."""

    config: RunConfig
    sources: Sources
    shape: GridShape
    weights: Weights | None = None
    """Weights of --load-hf."""


def prepare_run(config: RunConfig, world_size: int, device_type: str | None = None) -> tuple[RunConfig, Sources]:
    """The checked config with its vocabulary resolved, and the packs. Raises ValueError with all reasons.

    `device_type` is what the ranks compute on, `cpu` or `cuda`; None leaves it open, as another machine's is.
    """
    require(config, world_size, backend_problems(config, device_type))
    with contextlib.suppress(ValueError, OSError):  # as many open files as may be without asking anybody
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_sources(config)


def dry_run(config: RunConfig) -> str:
    """The report of a layout for any world size, of a config that fits its datasets where it names any."""
    world_size = config.world_size or config.model_ranks
    if config.model.vocab_size == 0 or config.data.data_path is not None:
        config, _ = prepare_run(config, world_size)
    else:
        require(config, world_size, backend_problems(config, None))
    return describe(config, world_size)


def plan_of(arguments: Sequence[str], world: launch.World) -> Plan | None:
    """What these flags ask of this rank; None when they ask for a report, which is printed. Raises ValueError."""
    given = given_names(arguments)
    config, note = with_stored_model(_parsed(arguments, world), given)
    config, weights, other = _started(config, given, world.rank)
    config, length = with_stored_length(config, given, given_flags(arguments))
    if world.rank == 0:
        for line in (note, other, length):
            if line:
                say(line)
    try:
        if config.dry_run:
            report = dry_run(config)
            with ends_with_its_reader():
                say(report)
            return None
        config, sources = prepare_run(config, world.size, launch.device_type(world))
    except ValueError as error:
        ranks = world.size
        if config.dry_run:
            ranks = config.world_size or config.model_ranks
        before = goes_on_from(config)
        saved_by = SavedBy(before[0], before[1].world_size) if before is not None else None
        if advice := other_layout(config, ranks, arguments, saved_by):
            raise ValueError(f"{error}\n{advice}") from error
        raise
    ours, theirs = sources.tokenizer_sha256, weights.tokenizer_sha256 if weights is not None else ""
    if ours and theirs and ours != theirs:
        raise ValueError(
            f"--data-path {shown_path(config.data.data_path)} was built with the tokenizer {ours[:12]}, --load-hf "
            f"{config.checkpoint.load_hf} has {theirs[:12]}: build it again with the --tokenizer of that folder"
        )
    if weights is not None and sources.image_rules is not None:
        where = f"--data-path {shown_path(config.data.data_path)}"
        if misfits := weights.image_misfits(where, sources.image_rules):
            raise ValueError("\n".join(misfits))
    return Plan(config, sources, config.grid_shape(world.size), weights)


def _started(config: RunConfig, given: Collection[str], rank: int) -> tuple[RunConfig, Weights | None, str]:
    """The config with the model of --load-hf, its weights, and a note; a run that goes on reads nothing there."""
    folder = config.checkpoint.load_hf
    if folder is None or config.checkpoint.load is not None:  # both are refused by `require`
        return config, None, ""
    if resumes(config):
        note = f"--auto-resume goes on from {config.checkpoint.save}: --load-hf {folder} is not read"
        return with_values(config, dict.fromkeys(("load_hf", "vision_from_hf", "load_adapter"))), None, note
    # an optional extra: a run without the flag imports no file of megacp.huggingface
    from megacp.huggingface.convert.start import open_start

    return open_start(config, given)


def _parsed(arguments: Sequence[str], world: launch.World) -> RunConfig:
    """The config. A value of the wrong type is a ValueError where other ranks must hear of it."""
    if _HELP_ALL in arguments or {*_HELP} & {*arguments}:
        with ends_with_its_reader():
            _show_help(arguments)
        raise SystemExit(0)
    if "--version" in arguments:
        OneLineParser().parse_args(["--version"])
    if world.size == 1:
        return parse(arguments)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return parse(arguments)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(captured.getvalue().strip()) from None


def _show_help(arguments: Sequence[str]) -> None:
    """Print the flags by their groups: all of them, or those that most runs have."""
    others = [argument for argument in arguments if argument not in (*_HELP, _HELP_ALL)]
    if _HELP_ALL in arguments:
        parse([*others, "--help"])
    whole = io.StringIO()  # which gets plain text: a title after one blank, a flag after two
    with contextlib.redirect_stdout(whole), contextlib.suppress(SystemExit):
        parse([*others, "--help"])
    title, is_shown, before = "", True, "usage"
    for line in whole.getvalue().splitlines():
        if (flag := re.match(r"  --([\w-]+)", line)) is not None:
            is_shown = flag[1] in _FIRST_FLAGS
            if is_shown and title:  # with the first flag of its group
                print(f"\n{title}")
                title = ""
        elif not before.strip() and line.startswith(" "):
            title, is_shown = line.strip(), False
        if is_shown and line.strip():
            print(line.rstrip())
        before = line
    print("\n--nproc N starts N ranks on this machine, after a check in one process; --help-all shows all flags")


def _nproc(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The ranks that `--nproc N` asks this process to start, 0 for none, and the other arguments, checked for them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nproc", type=int, default=0)
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if found.nproc == 0 or {*_HELP, _HELP_ALL} & {*rest}:
        return 0, rest
    if launch.world_from_environment().size > 1:
        raise ValueError(f"--nproc {found.nproc} starts ranks by itself: leave torchrun out, or the flag")
    if "--dry-run" in rest:
        return 0, [*rest, "--world-size", str(found.nproc)]
    with contextlib.redirect_stdout(io.StringIO()):  # the ranks say it again
        plan_of(rest, launch.World(size=found.nproc, local_size=found.nproc))
    return found.nproc, rest


def _run_ranks(arguments: Sequence[str], count: int) -> int:
    """Start the ranks, pass signals on and wait; the exit status.

    A Ctrl-C reaches them from the terminal, or as SIGTERM. Once all ranks handle it they save and stop. Before that no
    step has begun: all are killed, as a rank that waits for one that has gone would report a failure.
    """
    _store, environments = launch.ranks_of_one_machine(count)
    ranks: list[subprocess.Popen[bytes]] = []
    ended_by: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked = signal.SIGTERM if number == signal.SIGINT else signal.Signals(number)
        running = [one for one in ranks if one.poll() is None]
        if len(ranks) < count or not all(handles(one.pid, asked) for one in running):
            ended_by.append(number)
            asked = signal.SIGKILL
        for one in running:
            one.send_signal(asked)

    hangup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else set()  # as under nohup
    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} | hangup:
        signal.signal(number, pass_on)
    command = [sys.executable, "-m", "megacp.train", *arguments]
    for environment in environments:
        # ranks ignore Ctrl-C until they train: it would be a traceback of each
        ranks.append(subprocess.Popen(command, env=environment, preexec_fn=_ignore_ctrl_c))
    if ended_by:  # by a signal that came between two starts
        pass_on(ended_by[0], None)
    status = _wait_for(ranks, ended_by)
    if ended_by:
        warn("interrupted before the first step")
        return 128 + ended_by[0]
    return status


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]], ended_by: Sequence[int] = ()) -> int:
    """Wait until all ranks have ended; the status of the first one that failed, else the highest.

    `ended_by`: signals at which all were killed, which is no failure of theirs.
    """
    first: tuple[int, int] | None = None  # status and rank of the first failure
    deadline, ended = math.inf, list[tuple[int, int]]()
    while len(ended) < len(ranks):
        time.sleep(0.05)
        ended = [(status, rank) for rank, one in enumerate(ranks) if (status := one.poll()) is not None]
        failed = [(status, rank) for status, rank in ended if status not in (0, STOPPED)]
        if failed and first is None:  # one that was killed has a negative status
            first, deadline = min(failed), time.monotonic() + _SECONDS_OF_OTHERS
        for one in ranks if time.monotonic() > deadline else ():
            one.kill()
    status, rank = first or max(ended)
    if status < 0 and not ended_by:
        warn(f"error: rank {rank} was ended by {signal.Signals(-status).name}")
    return status if status >= 0 else FAILED


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """The command line of values by field name; a list is what follows its flag, False its `no_` form."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words += [flag(name), *map(str, value)] if isinstance(value, (list, tuple)) else [f"{flag(name)}={value}"]
    return words


def train(values: Mapping[str, Any], nproc: int = 1) -> int:
    """Train from a script or a notebook: flags by name, `{"data_path": "data/chat", "lr": 1e-5}`; 0, or 3 as above.

    Ranks are processes of their own, and what they say is printed here: nothing of a run stays in this process. Ctrl-C
    saves and stops it. ValueError where it is refused, RuntimeError where it fails.
    """
    command = [sys.executable, "-m", "megacp.train", *(["--nproc", str(nproc)] if nproc > 1 else []), *flags_of(values)]
    pipe, joined, last = subprocess.PIPE, subprocess.STDOUT, collections.deque[str](maxlen=50)  # lines, for an error
    with subprocess.Popen(command, stdout=pipe, stderr=joined, text=True, errors="replace") as run:
        for _ in range(2):  # the first ends with a Ctrl-C
            try:
                for line in run.stdout or ():
                    print(line, end="", flush=True)
                    last.append(line)
            except KeyboardInterrupt:
                run.terminate()
    said = "".join(last).rpartition("error: ")[2].strip()
    if run.returncode not in (0, STOPPED):
        raise (ValueError if run.returncode == REFUSED else RuntimeError)(said)
    return run.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    world = launch.World()
    try:
        count, arguments = _nproc(sys.argv[1:] if argv is None else argv)
        if count:
            return _run_ranks(arguments, count)
        world = launch.world_from_environment()
        plan = _plan_or_refuse(arguments, world)
        if plan is None:
            return 0
        rendezvous = _agree(plan, world)
    except ValueError as error:
        return _refused(str(error), world, alike=isinstance(error, AlikeError))
    status = _train(plan, rendezvous, world)
    launch.stop()
    return 0 if status == STOPPED and launch.would_restart() else status


def _plan_or_refuse(arguments: Sequence[str], world: launch.World) -> Plan | None:
    """`plan_of`; what is wrong here is reported to all ranks, and ends them all."""
    try:
        return plan_of(arguments, world)
    except ValueError as error:
        problem = str(error)
    except OSError as error:  # a disk or a directory that this machine alone cannot read
        problem = reason_of(error)
    _refuse_together(world, problem)


def _refuse_together(world: launch.World, problem: str) -> NoReturn:
    """Raise ValueError with this rank's problem, or with what all ranks together have to say."""
    try:
        rendezvous = launch.rendezvous(world, _SECONDS_OF_A_REFUSED_RANK)
    except ValueError as silence:
        if isinstance(silence, AlikeError):
            raise
        raise ValueError(problem) from None  # the others did not come; the problem here is certain
    require_equal_start(rendezvous, None, problem)
    raise AssertionError("a rank with a problem was let in")


def _agree(plan: Plan, world: launch.World) -> launch.Rendezvous:
    """Meet the other ranks; ValueError on all alike unless all would run the same."""
    rendezvous = launch.rendezvous(world, 60.0 * plan.config.parallel.distributed_timeout_minutes)
    stated = statement(plan.config, plan.sources, launch.device_type(world))
    known = plan.weights.fingerprint if plan.weights is not None else "none"
    require_equal_start(rendezvous, {**stated, "the fingerprint of --load-hf": known})
    return rendezvous


def _train(plan: Plan, rendezvous: launch.Rendezvous, world: launch.World) -> int:
    """Join the grid and train; the exit status."""
    minutes = plan.config.parallel.distributed_timeout_minutes
    grid = launch.join(rendezvous, plan.shape, minutes, 6.0 * minutes)
    try:
        trainer = trainer_of(plan, grid)
    except ValueError as error:
        report = launch.report_failure(error, "the start", grid.world)  # left for ranks that see no reason of their own
        if launch.was_hit(error):  # the loss of a rank is no refusal: whoever restarts the run should try again
            error.add_note(report)
            raise
        reasons = [line.partition(" failed in ")[2] for line in report.splitlines()]
        return _refused(str(error), world, alike=len(reasons) == world.size and len({*reasons}) == 1)
    except Exception as error:
        error.add_note(launch.report_failure(error, "the start", grid.world))
        raise
    return trainer.run()


def trainer_of(plan: Plan, grid: ProcessGrid) -> Trainer:
    """The trainer; what an export needs of a Hugging Face folder is put beside the run's checkpoints."""
    trainer = Trainer(plan.config, grid, plan.sources, plan.weights)
    if plan.weights is not None and grid.rank == 0 and plan.config.checkpoint.save is not None:
        plan.weights.keep(place_of(plan.config.checkpoint.save))
    return trainer


def _refused(problem: str, world: launch.World, alike: bool) -> int:
    """Print the message, once on each machine where all ranks have it `alike`; the first rank speaks first."""
    if world.local_rank > 0:
        time.sleep(_SECONDS_FOR_THE_FIRST)
    if world.local_rank == 0 or not alike:
        place = "" if alike else f" on rank {world.rank}"
        warn(f"error{place if world.rank else ''}: {problem}")
    return REFUSED


def program() -> NoReturn:
    """The process: `main`, and an end that waits for nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the starter: `>&-`
            setattr(sys, name, open(os.devnull, "w"))
    status = 1
    try:
        status = main()
    except KeyboardInterrupt:  # a second Ctrl-C, which does not wait for the save
        warn("interrupted")
        status = INTERRUPTED
    except Exception:
        warn(traceback.format_exc().rstrip())
    launch.hard_exit(status)


if __name__ == "__main__":
    program()
