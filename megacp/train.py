"""Training command: `python -m megacp.train --nproc 8 --data-path DIR ...`.

Start it with `--nproc`, with torchrun, or directly for a single process. Each rank parses and
checks the flags, connects to the other ranks, checks that all ranks have the same configuration,
and trains. `megacp.training.start` prints help, starts the processes of `--nproc`, and suggests
another parallel layout.

With `--nproc`, one process first checks the flags and then starts the ranks on this machine, so
that an error message is the last output. `--dry-run` prints the grid, stages, memory and messages
for any world size, and exits.

Exit status:
* 0: the run finished.
* 1: the run failed, with a traceback.
* 2: the flags, files or data are wrong, as one message explains.
* 3: the run stopped early and saved (after a signal or --exit-duration). Under
  `torchrun --max-restarts`, which would restart the run, the status is 0.
* 130: the run was interrupted before there was anything to save.
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

# Importing torch below takes seconds, during which a user may press Ctrl-C.
if __name__ == "__main__" or sys.argv[0].endswith("megacp-train"):
    leave_at_ctrl_c()

from megacp.distributed.grid import ProcessGrid
from megacp.distributed.shape import GridShape
from megacp.dry_run.report import describe
from megacp.engine.backends.select import backend_problems
from megacp.engine.checks import require
from megacp.engine.config.blend import shown_path
from megacp.engine.config.cli import (
    OneLineParser,
    accepted_note,
    given_flags,
    given_names,
    parse,
)
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

# How long a rank with an invalid configuration waits for the other ranks to report a joint error.
_SECONDS_TO_REFUSE_TOGETHER = 60.0
# Delay before the other local ranks exit, so that the first can print: torchrun kills all ranks
# when one exits.
_SECONDS_FOR_RANK_0_TO_PRINT = 5.0


@dataclass(frozen=True)
class Plan:
    """A checked run, ready to start on a rank."""

    config: RunConfig
    sources: Sources
    shape: GridShape
    weights: Weights | None = None
    """Weights of --load-hf."""


def prepare_run(
    config: RunConfig, world_size: int, device_type: str | None = None
) -> tuple[RunConfig, Sources]:
    """Check a configuration, open its datasets, and return both.

    `device_type` is the type of the ranks' devices (`cpu` or `cuda`), or None if the run belongs to
    another machine. The returned configuration includes the vocabulary size of the datasets. Raise
    ValueError with all reasons why the run cannot start.
    """
    # Check the flags first, because this is cheap and the datasets may be large or remote.
    require(config, world_size, backend_problems(config, device_type))
    # Raise the soft limit on open files to the hard limit; this needs no privileges.
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_sources(config)


def dry_run(config: RunConfig) -> str:
    """Return the report of `--dry-run` for any world size.

    Datasets, if any, are opened and checked.
    """
    # Without --world-size, assume the smallest number of ranks that the layout allows.
    world_size = config.world_size or config.model_ranks
    if config.model.vocab_size == 0 or config.data.data_path is not None:
        config, _ = prepare_run(config, world_size)
    else:
        require(config, world_size, backend_problems(config, None))
    return describe(config, world_size)


def plan_of(arguments: Sequence[str], world: launch.World) -> Plan | None:
    """Return the plan for a run with these flags, or None after printing the `--dry-run` report.

    Raise ValueError if the run cannot start.
    """
    given = given_names(arguments)
    # Values that no flag sets come from a checkpoint, a model folder, or the datasets.
    config, model_note = with_stored_model(_parsed(arguments, world), given)
    config, weights, weights_note = _started(config, given, world.rank)
    ranks = world.size
    if config.dry_run:
        ranks = config.world_size or config.model_ranks
    rows_at_once = max(1, ranks // config.model_ranks) * config.training.micro_batch_size
    config, length_note = with_stored_length(config, given, given_flags(arguments), rows_at_once)
    if world.rank == 0:
        for line in (accepted_note(arguments), model_note, weights_note, length_note):
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
        # If the number of ranks does not fit the layout, explain how to plan another layout.
        advice = _other_layout(config, arguments, world)
        if advice:
            raise ValueError(f"{error}\n{advice}") from error
        raise
    if weights is not None:
        _require_same_preparation(config, sources, weights)
    return Plan(config, sources, config.grid_shape(world.size), weights)


def _require_same_preparation(config: RunConfig, sources: Sources, weights: Weights) -> None:
    """Raise ValueError if the datasets were not built for the model of --load-hf."""
    data_path = f"--data-path {shown_path(config.data.data_path)}"
    ours = sources.tokenizer_sha256
    theirs = weights.tokenizer_sha256
    # either hash may be unknown
    if ours and theirs and ours != theirs:
        raise ValueError(
            f"{data_path} was built with the tokenizer {ours[:12]}, but --load-hf "
            f"{config.checkpoint.load_hf} has {theirs[:12]}: rebuild the dataset with the "
            "--tokenizer of that folder"
        )
    if sources.image_rules is not None:
        misfits = weights.image_misfits(data_path, sources.image_rules)
        if misfits:
            raise ValueError("\n".join(misfits))


def _other_layout(config: RunConfig, arguments: Sequence[str], world: launch.World) -> str:
    """Return advice to plan another layout, or "" if the layout allows this number of ranks."""
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
    """Return the configuration with the model of --load-hf, its weights, and a note to print.

    A resumed run does not read the folder, and its weights are None.
    """
    folder = config.checkpoint.load_hf
    # `require` rejects --load-hf together with --load.
    if folder is None or config.checkpoint.load is not None:
        return config, None, ""
    if resumes(config):
        unused = dict.fromkeys(("load_hf", "vision_from_hf", "load_adapter"))
        note = f"--auto-resume continues {config.checkpoint.save}: --load-hf {folder} is not read"
        return with_values(config, unused), None, note
    # megacp.huggingface has optional dependencies, so import it only if the flag is set.
    from megacp.huggingface.convert.start import open_start

    return open_start(config, given)


def _parsed(arguments: Sequence[str], world: launch.World) -> RunConfig:
    """Return the parsed flags. For --help and --version, print the text and exit.

    If there are other ranks, raise ValueError for invalid flags instead of exiting, so that the
    error can be reported to these ranks.
    """
    if asks_for_help(arguments):
        with ends_with_its_reader():
            show_help(arguments)
        raise SystemExit(0)
    if "--version" in arguments:
        OneLineParser().parse_args(["--version"])
    if world.size == 1:
        return parse(arguments)
    # argparse prints an error and exits; capture its text for the joint message of all ranks
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return parse(arguments)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(captured.getvalue().strip()) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    world = launch.World()
    try:
        count, arguments = ranks_asked(sys.argv[1:] if argv is None else argv)
        if count and "--dry-run" in arguments:
            arguments = [*arguments, "--world-size", str(count)]
        elif count and not asks_for_help(arguments):
            # Check everything in this process first. Hide the notes, because the ranks print them.
            with contextlib.redirect_stdout(io.StringIO()):
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
    if status == STOPPED and launch.would_restart():
        return 0  # the run was asked to stop, so torchrun must not restart it
    return status


def _plan_or_refuse(arguments: Sequence[str], world: launch.World) -> Plan | None:
    """Return `plan_of`, or report this rank's problem to all ranks and end all of them."""
    try:
        return plan_of(arguments, world)
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        # A disk or folder may be unreadable only on this machine.
        problem = reason_of(error)
    _refuse_together(world, problem)


def _refuse_together(world: launch.World, problem: str) -> NoReturn:
    """Raise ValueError with the problems of all ranks, or of this rank if it finds no others."""
    try:
        rendezvous = launch.rendezvous(world, _SECONDS_TO_REFUSE_TOGETHER)
    except ValueError as silence:
        if isinstance(silence, AlikeError):
            raise
        # The other ranks could not be reached, so report only this rank's problem.
        raise ValueError(problem) from None
    require_equal_start(rendezvous, None, problem)
    raise AssertionError("a rank with a problem was accepted")


def _agree(plan: Plan, world: launch.World) -> launch.Rendezvous:
    """Connect to the other ranks; raise ValueError on all ranks if any would start differently."""
    rendezvous = launch.rendezvous(world, 60.0 * plan.config.parallel.distributed_timeout_minutes)
    stated = statement(plan.config, plan.sources, launch.device_type(world))
    fingerprint = "none" if plan.weights is None else plan.weights.fingerprint
    require_equal_start(rendezvous, {**stated, "the fingerprint of --load-hf": fingerprint})
    return rendezvous


def _train(plan: Plan, rendezvous: launch.Rendezvous, world: launch.World) -> int:
    """Join the grid, train, and return the exit status."""
    minutes = plan.config.parallel.distributed_timeout_minutes
    grid = launch.join(rendezvous, plan.shape, minutes, 6.0 * minutes)
    try:
        trainer = trainer_of(plan, grid)
    except ValueError as error:
        # Publish the reason for ranks that only notice that this rank has ended.
        report = launch.report_failure(error, "the start", grid.world)
        if launch.was_hit(error):
            # Another rank was lost. Treat this as a failure, so that torchrun restarts the run.
            error.add_note(report)
            raise
        reasons = [line.partition(" failed in ")[2] for line in report.splitlines()]
        alike = len(reasons) == world.size and len(set(reasons)) == 1
        return _refused(str(error), world, alike)
    except Exception as error:
        error.add_note(launch.report_failure(error, "the start", grid.world))
        raise
    return trainer.run()


def trainer_of(plan: Plan, grid: ProcessGrid) -> Trainer:
    """Return the trainer, after storing the files for an export next to the checkpoints."""
    trainer = Trainer(plan.config, grid, plan.sources, plan.weights)
    if plan.weights is not None and grid.rank == 0 and plan.config.checkpoint.save is not None:
        plan.weights.keep(place_of(plan.config.checkpoint.save))
    return trainer


def _refused(problem: str, world: launch.World, alike: bool) -> int:
    """Print why the run cannot start, and return the exit status.

    If all ranks have the same problem (`alike`), only the first rank of each machine prints it.
    """
    if world.local_rank > 0:  # the machine's first rank prints before the others
        time.sleep(_SECONDS_FOR_RANK_0_TO_PRINT)
    if world.local_rank == 0 or not alike:
        place = ""
        if world.rank and not alike:
            place = f" on rank {world.rank}"
        warn(f"error{place}: {problem}")
    return REFUSED


def program() -> NoReturn:
    """Run `main`, and exit the process without waiting for library threads."""
    for name in ("stdout", "stderr"):
        # The parent process can close a stream (`>&-`); it is then None in Python.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    status = 1
    try:
        status = main()
    except KeyboardInterrupt:  # a second Ctrl-C does not wait for the save
        warn("interrupted")
        status = INTERRUPTED
    except Exception:
        warn(traceback.format_exc().rstrip())
    # A normal exit would wait for library threads, which may hang after a failure.
    launch.hard_exit(status)


if __name__ == "__main__":
    program()
