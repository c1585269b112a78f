"""The config of a checkpoint, taken over by a run that loads it.

A run that loads weights needs no flag of the model, since the checkpoint holds them. A flag that is
given and says otherwise is refused by its name.
"""

from __future__ import annotations

from collections.abc import Collection

from megacp.engine.config.run import RunConfig, fields, flag, flatten, with_values
from megacp.engine.config.yaml_file import from_yaml
from megacp.storage.place import Place
from megacp.training.checkpoint.commit import LoadedCheckpoint, peek
from megacp.training.checkpoint.directory import CONFIG_FILE, CheckpointManifest, holds_checkpoints

NOT_THE_FUNCTION = {"init_method_std", "hidden_dropout", "hf_model_type"}
NOT_THE_FUNCTION |= {
    "lora_dropout",
    "vision_lr_multiplier",
    "connector_lr_multiplier",
    "vision_planned_crops",
}
"""Fields of the model that may change on resume: the weights still mean the same function. What is
frozen may not: the checkpoint has no optimizer state for a tower that was.
"""
FREEZING = {"freeze"}
"""What may change besides when only the weights are taken."""
LORA = {"lora_rank", "lora_alpha", "lora_targets"}
"""What a run adds to weights without low-rank pairs when only the weights are taken."""
FINETUNING_RATE, FINETUNING_RATE_OF_PAIRS = 1e-5, 1e-4
"""Rates of a run that starts from weights only, without --lr: that of a training from nothing
undoes them.
"""


def stored_config(loaded: LoadedCheckpoint) -> RunConfig:
    """The config of a checkpoint. Raises ValueError, naming its file, for values that no run can
    have.
    """
    return from_yaml(loaded.config_yaml, source=str(loaded.path / CONFIG_FILE))


def other_function(before: RunConfig, now: RunConfig, weights_only: bool) -> list[str]:
    """Names of the fields in which two configs differ so that the same weights are another
    function.
    """
    free = NOT_THE_FUNCTION | (_new_to(before) if weights_only else set())
    old, new = flatten(before), flatten(now)
    if (
        new["max_position_embeddings"] is not None
    ):  # may be another one, but is not lost because a flag was left out
        free |= {"max_position_embeddings"}
    return [
        name
        for name in new
        if name not in free and _is_of_the_model(name) and old[name] != new[name]
    ]


def _new_to(before: RunConfig) -> set[str]:
    """What a run may change that takes only the weights of `before`."""
    return FREEZING | (LORA if before.model.lora_rank == 0 else set())


def resumes(config: RunConfig) -> bool:
    """Whether --auto-resume finds in --save what it goes on from."""
    checkpoint = config.checkpoint
    return (
        checkpoint.auto_resume
        and checkpoint.save is not None
        and holds_checkpoints(checkpoint.save)
    )


def goes_on_from(config: RunConfig) -> tuple[Place, CheckpointManifest, str] | None:
    """What `peek` finds of the checkpoint that a run goes on from; None where it starts anew."""
    checkpoint = config.checkpoint
    place = checkpoint.save if resumes(config) else None if checkpoint.finetune else checkpoint.load
    return peek(place) if place is not None else None


def progress(config: RunConfig) -> tuple[int, int]:
    """Steps and samples of the checkpoint that a run goes on from; 0 and 0 where it starts anew."""
    found = goes_on_from(config)
    return (
        (found[1].step, found[1].extra.get("consumed_samples", 0)) if found is not None else (0, 0)
    )


def with_stored_model(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, str]:
    """The config with the model of the checkpoint it loads, as far as no flag in `given` says what
    it is; a note.

    Without a checkpoint to load it stays as it is, and the note is empty. A run that starts from
    weights only keeps its own dropout, learning rates of parts and frozen parts. Raises ValueError
    that names each flag which contradicts.
    """
    checkpoint = config.checkpoint
    goes_on = resumes(config)
    place = checkpoint.save if goes_on else checkpoint.load
    found = peek(place) if place is not None else None
    if found is None:
        return config, ""
    folder, _, text = found
    stored = from_yaml(text, source=str(folder / CONFIG_FILE))
    return with_model_of(config, stored, folder, given, checkpoint.finetune and not goes_on)


def with_model_of(
    config: RunConfig, stored: RunConfig, folder: Place, given: Collection[str], weights_only: bool
) -> tuple[RunConfig, str]:
    """The config with the model of `stored`, read from `folder`, and its rate or a finetuning's, as
    far as no flag in `given` says what they are; a note.

    Raises ValueError that names each flag which contradicts.
    """
    # what an exported model is called stays, unless a flag says otherwise
    own = set(given) | (
        (NOT_THE_FUNCTION | _new_to(stored)) - {"hf_model_type"} if weights_only else set()
    )
    before, now = flatten(stored), flatten(config)
    asked = (name for name in now if _is_of_the_model(name) or name == "image_attention")
    taken = {name: before[name] for name in asked if name not in own}
    taken = {
        name: value for name, value in taken.items() if value != now[name]
    }  # only these are worth a note
    config = with_values(config, taken)
    if wrong := other_function(stored, config, weights_only):
        raise ValueError("\n".join(misfit(folder, name, before[name], now[name]) for name in wrong))
    words = ", ".join(f"{flag(name)} {words_of(value)}" for name, value in taken.items())
    notes = [f"the model is that of {folder}: {words}"] if taken else []
    rate, why = stored.training.lr, f"that of {folder}"
    if weights_only:
        rate, why = (
            (FINETUNING_RATE_OF_PAIRS if config.model.lora_rank else FINETUNING_RATE),
            "for finetuning",
        )
    if "lr" not in given and rate != config.training.lr:
        config = with_values(config, {"lr": rate})
        notes.append(f"--lr {rate:g}, {why}, as no flag says it")
    return config, "\n".join(notes)


def misfit(folder: Place, name: str, before: object, now: object) -> str:
    """The message that a checkpoint and a run differ in a field."""
    return f"{folder} has {flag(name)} {before}, this run {now}"


def _is_of_the_model(name: str) -> bool:
    """Whether a field says what the weights are; their type does."""
    return name == "dtype" or fields()[name].room in ("model", "vision")


def words_of(value: object) -> str:
    """A flag's value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
