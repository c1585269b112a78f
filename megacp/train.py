"""Train: `python -m megacp.train --nproc 8 --data-path DIR ...`, under torchrun, or without either
on one process.

Parse the flags, check them, meet the other ranks, agree with them, train. Files of
`megacp.training.start` do the rest: they print help, start the processes of `--nproc`, and name the
commands that plan another layout. `--nproc` checks the flags in one process and then starts ranks
of this machine, so that a refusal is the last message of a run. `--dry-run` prints grid, stages,
memory and messages for any world size and stops.

Exit status: 0 finished, 1 a failure with its traceback, 2 refused with one message, 3 stopped early
after saving (by a signal or --exit-duration), 130 interrupted before there was anything to save.
torchrun --max-restarts would start the run again for a 3, so it is 0 there.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megacp.training.start.interrupts import INTERRUPTED, leave_at_ctrl_c

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
from megacp.engine.config.run import RunConfig, with_values
from megacp.storage.place import place_of
from megacp.training.checkpoint.outcome import reason_of
from megacp.training.checkpoint.weights import Weights
from megacp.training.loop.equal_start import AlikeError, require_equal_start, statement
from megacp.training.loop.sources import Sources, open_sources, with_stored_length
from megacp.training.loop.stored import goes_on_from, resumes, with_stored_model
from megacp.training.loop.trainer import Trainer
from megacp.training.monitor.console import ends_with_its_reader, say, warn
from megacp.training.start import launch
from megacp.training.start.help import asks_for_help, show_help
from megacp.training.start.layout import SavedBy, other_layout
from megacp.training.start.processes import ranks_asked, start_and_wait
from megacp.training.start.script import train as train
from megacp.training.start.status import REFUSED, STOPPED

_SECONDS_OF_A_REFUSED_RANK = 60.0
"""How long a rank that cannot run waits for the others, to refuse the run together with them."""
_SECONDS_FOR_THE_FIRST = 5.0
"""torchrun ends all ranks of a machine when the first one exits: the others leave the one that
speaks the time to.
"""


@dataclass(frozen=True)
class Plan:
    """What this rank would run."""

    config: RunConfig
    sources: Sources
    shape: GridShape
    weights: Weights | None = None
    """Weights of --load-hf."""


def prepare_run(
    config: RunConfig, world_size: int, device_type: str | None = None
) -> tuple[RunConfig, Sources]:
    """The checked config with its vocabulary resolved, and the packs. Raises ValueError with all
    reasons.

    `device_type` is what the ranks compute on, `cpu` or `cuda`; None leaves it open, as another
    machine's is.
    """
    require(config, world_size, backend_problems(config, device_type))
    with contextlib.suppress(
        ValueError, OSError
    ):  # as many open files as may be without asking anybody
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_sources(config)


def dry_run(config: RunConfig) -> str:
    """The report of a layout for any world size, of a config that fits its datasets where it names
    any.
    """
    world_size = config.world_size or config.model_ranks
    if config.model.vocab_size == 0 or config.data.data_path is not None:
        config, _ = prepare_run(config, world_size)
    else:
        require(config, world_size, backend_problems(config, None))
    return describe(config, world_size)


def plan_of(arguments: Sequence[str], world: launch.World) -> Plan | None:
    """What these flags ask of this rank; None when they ask for a report, which is printed. Raises
    ValueError.
    """
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
        if advice := _other_layout(config, arguments, world):
            raise ValueError(f"{error}\n{advice}") from error
        raise
    ours, theirs = sources.tokenizer_sha256, weights.tokenizer_sha256 if weights is not None else ""
    if ours and theirs and ours != theirs:
        raise ValueError(
            f"--data-path {shown_path(config.data.data_path)} was built with the tokenizer "
            f"{ours[:12]}, --load-hf "
            f"{config.checkpoint.load_hf} has {theirs[:12]}: build it again with the --tokenizer "
            "of that folder"
        )
    if weights is not None and sources.image_rules is not None:
        where = f"--data-path {shown_path(config.data.data_path)}"
        if misfits := weights.image_misfits(where, sources.image_rules):
            raise ValueError("\n".join(misfits))
    return Plan(config, sources, config.grid_shape(world.size), weights)


def _other_layout(config: RunConfig, arguments: Sequence[str], world: launch.World) -> str:
    """Return how to plan another layout, if the one of a refused config does not allow the number
    of ranks.
    """
    ranks = world.size
    if config.dry_run:
        ranks = config.world_size or config.model_ranks
    before = goes_on_from(config)
    if before is None:
        return other_layout(config, ranks, arguments, None)
    folder, manifest, _ = before
    return other_layout(config, ranks, arguments, SavedBy(folder, manifest.world_size))


def _started(
    config: RunConfig, given: Collection[str], rank: int
) -> tuple[RunConfig, Weights | None, str]:
    """The config with the model of --load-hf, its weights, and a note; a run that goes on reads
    nothing there.
    """
    folder = config.checkpoint.load_hf
    if folder is None or config.checkpoint.load is not None:  # both are refused by `require`
        return config, None, ""
    if resumes(config):
        note = (
            f"--auto-resume goes on from {config.checkpoint.save}: --load-hf {folder} is not read"
        )
        return (
            with_values(config, dict.fromkeys(("load_hf", "vision_from_hf", "load_adapter"))),
            None,
            note,
        )
    # an optional extra: a run without the flag imports no file of megacp.huggingface
    from megacp.huggingface.convert.start import open_start

    return open_start(config, given)


def _parsed(arguments: Sequence[str], world: launch.World) -> RunConfig:
    """The config. A value of the wrong type is a ValueError where other ranks must hear of it."""
    if asks_for_help(arguments):
        with ends_with_its_reader():
            show_help(arguments)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    world = launch.World()
    try:
        count, arguments = ranks_asked(sys.argv[1:] if argv is None else argv)
        if count and "--dry-run" in arguments:
            arguments = [*arguments, "--world-size", str(count)]
        elif count and not asks_for_help(arguments):
            with contextlib.redirect_stdout(io.StringIO()):  # the ranks print it again
                plan_of(arguments, launch.World(size=count, local_size=count))
            return start_and_wait(arguments, count)
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
        report = launch.report_failure(
            error, "the start", grid.world
        )  # left for ranks that see no reason of their own
        if launch.was_hit(
            error
        ):  # the loss of a rank is no refusal: whoever restarts the run should try again
            error.add_note(report)
            raise
        reasons = [line.partition(" failed in ")[2] for line in report.splitlines()]
        return _refused(
            str(error), world, alike=len(reasons) == world.size and len({*reasons}) == 1
        )
    except Exception as error:
        error.add_note(launch.report_failure(error, "the start", grid.world))
        raise
    return trainer.run()


def trainer_of(plan: Plan, grid: ProcessGrid) -> Trainer:
    """The trainer; what an export needs of a Hugging Face folder is put beside the run's
    checkpoints.
    """
    trainer = Trainer(plan.config, grid, plan.sources, plan.weights)
    if plan.weights is not None and grid.rank == 0 and plan.config.checkpoint.save is not None:
        plan.weights.keep(place_of(plan.config.checkpoint.save))
    return trainer


def _refused(problem: str, world: launch.World, alike: bool) -> int:
    """Print the message, once on each machine where all ranks have it `alike`; the first rank
    speaks first.
    """
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
