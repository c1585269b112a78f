"""Take over the config of a checkpoint in a run that loads it.

A run that loads weights needs no model flags: the checkpoint contains them. A given flag that
contradicts the checkpoint is an error that names the flag.
"""

from __future__ import annotations

from collections.abc import Collection

from megacp.engine.config.run import RunConfig, fields, flag, flatten, with_values
from megacp.engine.config.yaml_file import from_yaml
from megacp.storage.place import Place
from megacp.training.checkpoint.commit import LoadedCheckpoint, peek
from megacp.training.checkpoint.directory import CONFIG_FILE, CheckpointManifest, holds_checkpoints

NOT_THE_FUNCTION = {
    "init_method_std",
    "hidden_dropout",
    "hf_model_type",
    "lora_dropout",
    "vision_lr_multiplier",
    "connector_lr_multiplier",
    "vision_planned_crops",
}
"""Model fields that may change on resume: the weights still define the same function. The frozen
parts may not change, because the checkpoint has no optimizer state for a frozen part.
"""
FREEZING = {"freeze"}
"""Fields that may also change if only the weights are loaded."""
LORA = {"lora_rank", "lora_alpha", "lora_targets"}
"""Fields that may be added if only the weights are loaded and they have no low-rank pairs."""
FINETUNING_EPOCHS = 3.0
"""Default --train-epochs of a run with --load-hf and packs."""
FINETUNING_RATE = 1e-5
"""Default --lr of a run that starts from weights only; a higher rate would ruin the weights."""
FINETUNING_RATE_OF_PAIRS = 1e-4
"""Default --lr of a run that starts from weights only and trains low-rank pairs."""


def stored_config(loaded: LoadedCheckpoint) -> RunConfig:
    """Return the config of a checkpoint.

    Raise ValueError, naming its file, if a value is not valid for a run.
    """
    return from_yaml(loaded.config_yaml, source=str(loaded.path / CONFIG_FILE))


def other_function(before: RunConfig, now: RunConfig, weights_only: bool) -> list[str]:
    """Return the fields in which two configs differ such that the same weights define different
    functions.
    """
    free = set(NOT_THE_FUNCTION)
    if weights_only:
        free |= _new_to(before)
    old = flatten(before)
    new = flatten(now)
    # The number of positions may be changed by a flag, but omitting the flag does not remove it.
    if new["max_position_embeddings"] is not None:
        free |= {"max_position_embeddings"}
    return [
        name
        for name in new
        if name not in free and _is_of_the_model(name) and old[name] != new[name]
    ]


def _new_to(before: RunConfig) -> set[str]:
    """Return the fields that a run may change if it loads only the weights of `before`."""
    return FREEZING | (LORA if before.model.lora_rank == 0 else set())


def resumes(config: RunConfig) -> bool:
    """Return whether --auto-resume finds a checkpoint in --save to resume from."""
    checkpoint = config.checkpoint
    return (
        checkpoint.auto_resume
        and checkpoint.save is not None
        and holds_checkpoints(checkpoint.save)
    )


def goes_on_from(config: RunConfig) -> tuple[Place, CheckpointManifest, str] | None:
    """Return `peek` of the checkpoint that a run resumes from; None if it starts at step 0."""
    checkpoint = config.checkpoint
    if resumes(config):  # takes precedence over --load
        place = checkpoint.save
    elif checkpoint.finetune:
        place = None
    else:
        place = checkpoint.load
    return peek(place) if place is not None else None


def progress(config: RunConfig) -> tuple[int, int]:
    """Return the steps and samples done before a run resumes; 0 and 0 if it starts at step 0."""
    found = goes_on_from(config)
    if found is None:
        return 0, 0
    _, manifest, _ = found
    return manifest.step, manifest.extra.get("consumed_samples", 0)


def with_stored_model(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, str]:
    """Fill in the model of the checkpoint that a run loads; return the config and a note.

    Flags in `given` are not overwritten. Without a checkpoint the config does not change and the
    note is empty. A run that starts from weights only keeps its own dropout, learning-rate
    multipliers and frozen parts. Raise ValueError that names each flag that contradicts the
    checkpoint.
    """
    checkpoint = config.checkpoint
    goes_on = resumes(config)
    # a resumed run continues from --save, even with --finetune; --load was only its first start
    place = checkpoint.save if goes_on else checkpoint.load
    found = peek(place) if place is not None else None
    if found is None:
        return config, ""
    # only the config is read here; the tensors are loaded after the model has been built
    folder, _, text = found
    stored = from_yaml(text, source=str(folder / CONFIG_FILE))
    return with_model_of(config, stored, folder, given, checkpoint.finetune and not goes_on)


def with_model_of(
    config: RunConfig, stored: RunConfig, folder: Place, given: Collection[str], weights_only: bool
) -> tuple[RunConfig, str]:
    """Fill in the model of `stored`, read from `folder`, and a learning rate.

    Return the config and a note for the log. Flags in `given` are not overwritten. If only the
    weights are loaded, the rate is a default for finetuning instead of the stored one. Raise
    ValueError that names each flag that contradicts `stored`.
    """
    own = set(given)
    if weights_only:
        # the checkpoint still determines the type of an exported model
        own |= (NOT_THE_FUNCTION | _new_to(stored)) - {"hf_model_type"}
    before = flatten(stored)
    now = flatten(config)
    taken = {}
    for name in now:
        is_stored = _is_of_the_model(name) or name == "image_attention"
        # an equal value would not be worth a note
        if is_stored and name not in own and before[name] != now[name]:
            taken[name] = before[name]
    config = with_values(config, taken)
    # the given flags remain: they must not change what the weights compute
    wrong = other_function(stored, config, weights_only)
    if wrong:
        raise ValueError("\n".join(misfit(folder, name, before[name], now[name]) for name in wrong))
    words = ", ".join(f"{flag(name)} {words_of(value)}" for name, value in taken.items())
    notes = [f"the model is that of {folder}: {words}"] if taken else []
    if weights_only:
        rate = FINETUNING_RATE_OF_PAIRS if config.model.lora_rank else FINETUNING_RATE
        why = "the default for finetuning"
    else:
        rate = stored.training.lr
        why = f"from {folder}"
    if "lr" not in given and rate != config.training.lr:
        config = with_values(config, {"lr": rate})
        notes.append(f"--lr {rate:g} ({why}), because --lr is not set")
    return config, "\n".join(notes)


def misfit(folder: Place, name: str, before: object, now: object) -> str:
    """Return the message that a checkpoint and a run differ in a field."""
    return f"{folder} has {flag(name)} {before}, this run {now}"


def _is_of_the_model(name: str) -> bool:
    """Return whether a field is part of the model's definition, which includes its data type."""
    # "room" is the section of the config that a field belongs to
    return name == "dtype" or fields()[name].room in ("model", "vision")


def words_of(value: object) -> str:
    """Return a flag's value as the user would type it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
