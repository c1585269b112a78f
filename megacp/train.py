"""Train: `torchrun --nproc-per-node 8 -m megacp.train --data-path DIR ...`, or without torchrun on one process.

Key property: parse, check everything, then call one thing. With `--dry-run` it prints grid, stages and memory of any
world size on one process and stops. Exit status: 0 finished, 1 a failure with its traceback, 2 refused with one
message, 3 stopped early (by a signal or --exit-duration) after saving; torchrun --max-restarts would start the run
again for a 3, so there it is 0. Rejected: checks spread over the run, which end it after minutes of start-up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from megacp.backends.apex import describe_apex
from megacp.backends.select import backend_problems
from megacp.config.checks import require
from megacp.config.cli import given_names, parse
from megacp.config.run import RunConfig
from megacp.distributed import launch
from megacp.models.build import grid_shape, stage_layers
from megacp.ops.attention import kernel_problem
from megacp.planner.report import describe
from megacp.training.sources import Sources, open_sources
from megacp.training.stopping import STOPPED
from megacp.training.stored import with_stored_model
from megacp.training.trainer import Trainer

REFUSED = 2
SECONDS_FOR_RANK_0 = 5.0
"""torchrun ends all ranks when the first one exits: the others leave rank 0 the time to say what is wrong, and speak
only if they are still there, because rank 0 found nothing."""


def prepare(config: RunConfig, world_size: int, device_type: str | None = None) -> tuple[RunConfig, Sources]:
    """The checked config with its vocabulary resolved, and the packs. Raises ValueError with all reasons.

    `device_type` is what the ranks compute on, `cpu` or `cuda`; None leaves it open, as another machine's is.
    """
    training = config.training
    problem = device_type and kernel_problem(training.attention_kernel, device_type, training.dtype)
    problems = [*([problem] if problem else []), *backend_problems(config, device_type)]
    require(config, world_size, problems)
    config, sources = open_sources(config)
    require(config, world_size)
    return config, sources


def dry_run(config: RunConfig) -> str:
    """The report of a layout for any world size; a dataset is opened only when the vocabulary must come from it."""
    world_size = config.world_size or config.model_ranks
    require(config, world_size, backend_problems(config, None))
    if config.model.vocab_size == 0:
        config, _ = prepare(config, world_size)
    return f"{describe(config, world_size, stage_layers(config))}\n\n{describe_apex()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    rank = 0
    try:
        world = launch.world_from_environment()
        rank = world.rank
        arguments = sys.argv[1:] if argv is None else argv
        config, note = with_stored_model(parse(arguments), given_names(arguments))
        if note and rank == 0:
            print(note, flush=True)
        if config.dry_run:
            print(dry_run(config))
            return 0
        config, sources = prepare(config, world.size, launch.device_type(world))
        grid = launch.start(grid_shape(config, world.size), config.parallel.distributed_timeout_minutes)
        trainer = Trainer(config, grid, sources)
    except ValueError as error:
        if rank > 0:
            time.sleep(SECONDS_FOR_RANK_0)
        place = f" on rank {rank}" if rank else ""
        print(f"error{place}: {error}", file=sys.stderr, flush=True)
        return REFUSED
    status = trainer.run()
    launch.stop()
    return 0 if status == STOPPED and launch.would_restart() else status


if __name__ == "__main__":
    sys.exit(main())
