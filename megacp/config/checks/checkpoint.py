"""What the flags of checkpoints ask of each other, and of the directories they name.

Key property: a run never mixes its checkpoints with those of another one without having been told to go on with it.
Rejected: asking this of the saving code, which finds out after the first hours.
"""

from __future__ import annotations

from pathlib import Path

from megacp.config.checks.rules import Rule, registrar
from megacp.config.run import RunConfig, flag, flatten

CHECKPOINT_RULES: list[Rule] = []
_rule = registrar(CHECKPOINT_RULES)

_NEED_SAVE = ("save_interval", "keep_last", "async_save", "auto_resume")


@_rule(*_NEED_SAVE, "save")
def _saving_needs_a_place(config: RunConfig, world: int) -> str | None:
    values = flatten(config)
    given = [flag(name) + ("" if values[name] is True else f" {values[name]}") for name in _NEED_SAVE if values[name]]
    if not given or config.checkpoint.save is not None:
        return None
    return f"{', '.join(given)} needs --save, the directory for checkpoints"


@_rule("finetune", "load")
def _finetuning_needs_weights(config: RunConfig, world: int) -> str | None:
    if not config.checkpoint.finetune or config.checkpoint.load is not None:
        return None
    return "--finetune needs --load, the checkpoint whose weights it starts from"


@_rule("save", "load", "finetune", "auto_resume", "dry_run")
def _checkpoints_of_another_run(config: RunConfig, world: int) -> str | None:
    checkpoint = config.checkpoint
    save, load = checkpoint.save, checkpoint.load
    if save is None or config.dry_run or checkpoint.auto_resume or not any(Path(save).glob("step_*/manifest.json")):
        return None
    folder = Path(save).resolve()
    if load is not None and not checkpoint.finetune and folder in (Path(load).resolve(), Path(load).resolve().parent):
        return None
    return (
        f"--save {save} holds the checkpoints of a run: choose a new directory, or go on with that run by --load {save}"
    )
