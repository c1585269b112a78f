"""Saving and resuming a run: parameters, optimizer state, and the few integers that say how far it is.

Key property: dropout and data order are functions of (seed, step, samples consumed), so there is no generator state to
keep, and a resumed run repeats an uninterrupted one bit for bit on the same grid. Rejected: pickled loader and
generator objects, which tie a checkpoint to a number of ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from megacp.checkpoint.commit import load_checkpoint, save_checkpoint
from megacp.checkpoint.names import boxes_to_load, boxes_to_save
from megacp.config.run import RunConfig
from megacp.config.yaml_file import to_yaml
from megacp.training.step import Trainee


@dataclass(frozen=True)
class Progress:
    """How far a run is: all that a resumed run needs besides tensors."""

    step: int = 0
    consumed_samples: int = 0
    data_fingerprint: str = ""
    seed: int = 0


def save(trainee: Trainee, progress: Progress, config: RunConfig) -> Path:
    """Commit a checkpoint of the run below `--save`; returns its directory. Collective over all ranks."""
    assert config.checkpoint.save is not None
    grid = trainee.grid
    extra = asdict(progress) | {"updates": trainee.optimizer.updates}
    return save_checkpoint(
        config.checkpoint.save,
        progress.step,
        boxes_to_save(trainee.buckets.parameter_slices(), trainee.optimizer.state_slices()),
        extra=extra,
        config_yaml=to_yaml(config),
        world=grid.world,
        keep_last=config.checkpoint.keep_last,
        grid={name: getattr(grid.shape, name) for name in ("tp", "cp", "dp", "pp")},
    )


def load(trainee: Trainee, progress: Progress, config: RunConfig) -> tuple[Progress, Path]:
    """Fill the trainee from `--load`, saved by any grid; where the run goes on and which checkpoint it was. Collective.

    `progress` is that of a fresh run. Raises ValueError when the checkpoint is of other data or another seed: the run
    would repeat some samples and miss others without saying so.
    """
    assert config.checkpoint.load is not None
    loaded = load_checkpoint(config.checkpoint.load, trainee.grid.world)
    extra = loaded.extra
    reasons = []
    if extra["data_fingerprint"] != progress.data_fingerprint:
        reasons.append(f"{loaded.path} was trained on another dataset than --data-path {config.data.data_path}")
    if extra["seed"] != progress.seed:
        reasons.append(f"{loaded.path} was trained with --seed {extra['seed']}, this run has --seed {progress.seed}")
    if reasons:
        raise ValueError("; ".join(reasons))
    trainee.optimizer.clear()
    loaded.read(boxes_to_load(trainee.buckets.whole_parameters(), trainee.optimizer.state_slices()))
    trainee.optimizer.set_updates(extra["updates"])
    kept = {name: extra[name] for name in asdict(progress)}
    return Progress(**kept), loaded.path
