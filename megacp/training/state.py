"""Saving and resuming a run: parameters, optimizer state, and the few integers that say how far it is.

Key property: dropout and data order are functions of (seed, step, samples consumed), so there is no generator state to
keep, and a resumed run repeats an uninterrupted one bit for bit on the same grid. Rejected: pickled loader and
generator objects, which tie a checkpoint to a number of ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacp.checkpoint.commit import load_checkpoint, save_checkpoint
from megacp.checkpoint.names import boxes_to_load, boxes_to_save
from megacp.config.run import RunConfig, fields, flag, flatten
from megacp.config.yaml_file import from_yaml, to_yaml
from megacp.training.step import Trainee


@dataclass(frozen=True)
class Progress:
    """How far a run is: all that a resumed run needs besides tensors."""

    step: int = 0
    consumed_samples: int = 0
    data_fingerprint: str = ""
    seed: int = 0
    tokenizer_sha256: str = ""
    image_rules: dict[str, Any] | None = None
    """By which images became tokens: with them a checkpoint can be asked about images without its dataset."""


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint said: how far the run is, where that stands, and which flags are not what they were."""

    progress: Progress
    path: Path
    changed: tuple[str, ...]


_NOT_THE_FUNCTION = {"make_vocab_size_divisible_by", "init_method_std", "hidden_dropout"}
_NOT_THE_FUNCTION |= {"vision_lr_multiplier", "connector_lr_multiplier", "vision_planned_crops"}
"""Fields of the model that may change on resume: the weights still mean the same function. What is frozen may not: the
checkpoint has no optimizer state for a tower that was.
"""
_OF_THE_RUN = {"save", "load", "train_iters", "log_file", "log_interval", "dry_run", "world_size"}
"""Flags that differ between a run and its resumption as a matter of course."""


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


def load(trainee: Trainee, progress: Progress, config: RunConfig) -> Resumed:
    """Fill the trainee from `--load`, saved by any grid. Collective over all ranks.

    `progress` is that of a fresh run. Raises ValueError with all reasons when the checkpoint is of another model, also
    one whose tensors have the same shapes, of other data or another seed: the run would be another one, or repeat some
    samples and miss others, without saying so.
    """
    assert config.checkpoint.load is not None
    loaded = load_checkpoint(config.checkpoint.load, trainee.grid.world)
    extra = loaded.extra
    reasons = []
    if extra["data_fingerprint"] != progress.data_fingerprint:
        reasons.append(f"{loaded.path} was trained on another dataset than --data-path {config.data.data_path}")
    if extra["seed"] != progress.seed:
        reasons.append(f"{loaded.path} was trained with --seed {extra['seed']}, this run has --seed {progress.seed}")
    before, now = flatten(from_yaml(loaded.config_yaml)), flatten(config)
    differing = [name for name in now if now[name] != before[name] and name not in _OF_THE_RUN]
    function = [
        name for name in differing if fields()[name].room in ("model", "vision") and name not in _NOT_THE_FUNCTION
    ]
    reasons += [f"{loaded.path} has {flag(name)} {before[name]}, this run {now[name]}" for name in function]
    if reasons:
        raise ValueError("\n".join(reasons))
    trainee.optimizer.clear()
    loaded.read(boxes_to_load(trainee.buckets.whole_parameters(), trainee.optimizer.state_slices()))
    trainee.optimizer.set_updates(extra["updates"])
    kept = {name: extra[name] for name in asdict(progress) if name in extra}
    changed = tuple(f"{flag(name)} {now[name]} (was {before[name]})" for name in differing)
    return Resumed(Progress(**kept), loaded.path, changed)
