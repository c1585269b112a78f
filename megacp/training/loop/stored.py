"""Model flags of a run that loads a checkpoint, taken from the checkpoint's config.

A run that loads weights needs no model flags, because the checkpoint contains them. A model flag
that contradicts the checkpoint is an error.
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
"""Model fields that may change when a run resumes, because they do not change what the weights
compute. Frozen parts may not change, because the checkpoint lacks their optimizer state.
"""
FREEZING = {"freeze"}
"""Fields that may also change if only the weights are loaded."""
LORA = {"lora_rank", "lora_alpha", "lora_targets"}
"""Fields that may also change if only the weights are loaded and there are no LoRA adapters."""
FINETUNING_RATE = 1e-5
"""Default --lr when only the weights are loaded; a much higher rate would damage the weights."""
FINETUNING_RATE_OF_PAIRS = 1e-4
"""Default --lr when only the weights are loaded and LoRA adapters are trained."""


def stored_config(loaded: LoadedCheckpoint) -> RunConfig:
    """Return the config of a checkpoint.

    Raise ValueError that includes the file name if a value is invalid.
    """
    return from_yaml(loaded.config_yaml, source=str(loaded.path / CONFIG_FILE))


def other_function(before: RunConfig, now: RunConfig, weights_only: bool) -> list[str]:
    """Return the fields whose differences make the same weights compute different results."""
    free = set(NOT_THE_FUNCTION)
    if weights_only:
        free |= _new_to(before)
    old = flatten(before)
    new = flatten(now)
    # A flag may change the number of positions, but a run without the flag keeps the stored number.
    if new["max_position_embeddings"] is not None:
        free |= {"max_position_embeddings"}
    return [
        name
        for name in new
        if name not in free and _is_of_the_model(name) and old[name] != new[name]
    ]


def _new_to(before: RunConfig) -> set[str]:
    """Return the fields that may change in a run that loads only the weights of `before`."""
    return FREEZING | (LORA if before.model.lora_rank == 0 else set())


def resumes(config: RunConfig) -> bool:
    """Return whether --auto-resume is set and --save contains a checkpoint to resume from."""
    checkpoint = config.checkpoint
    return (
        checkpoint.auto_resume
        and checkpoint.save is not None
        and holds_checkpoints(checkpoint.save)
    )


def goes_on_from(config: RunConfig) -> tuple[Place, CheckpointManifest, str] | None:
    """Return `peek` of the checkpoint to resume; None if the run starts at step 0."""
    checkpoint = config.checkpoint
    if resumes(config):  # takes precedence over --load
        place = checkpoint.save
    elif checkpoint.finetune:
        place = None
    else:
        place = checkpoint.load
    return peek(place) if place is not None else None


def progress(config: RunConfig) -> tuple[int, int]:
    """Return the completed steps and samples of a resumed run; 0 and 0 for a start at step 0."""
    found = goes_on_from(config)
    if found is None:
        return 0, 0
    _, manifest, _ = found
    return manifest.step, manifest.extra.get("consumed_samples", 0)


def with_stored_model(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, str]:
    """Return the config with the model of the checkpoint to load, and a note for the log.

    Fields in `given` are not overwritten. Without a checkpoint, the config does not change and the
    note is empty. If only the weights are loaded, the run keeps its own dropout, learning-rate
    multipliers and frozen parts. Raise ValueError that lists each flag that contradicts the
    checkpoint.
    """
    checkpoint = config.checkpoint
    goes_on = resumes(config)
    # a resumed run continues from --save; --load and --finetune applied only to its first start
    place = checkpoint.save if goes_on else checkpoint.load
    found = peek(place) if place is not None else None
    if found is None:
        return config, ""
    # read only the config; the tensors are loaded after the model has been built
    folder, _, text = found
    stored = from_yaml(text, source=str(folder / CONFIG_FILE))
    return with_model_of(config, stored, folder, given, checkpoint.finetune and not goes_on)


def with_model_of(
    config: RunConfig, stored: RunConfig, folder: Place, given: Collection[str], weights_only: bool
) -> tuple[RunConfig, str]:
    """Return the config with the model and the learning rate of `stored`, and a note for the log.

    `stored` was read from `folder`. Fields in `given` are not overwritten. If only the weights are
    loaded, the learning rate is the default for finetuning instead of the stored rate. Raise
    ValueError that lists each flag that contradicts `stored`.
    """
    own = set(given)
    if weights_only:
        # the type of an exported model still comes from the checkpoint
        own |= (NOT_THE_FUNCTION | _new_to(stored)) - {"hf_model_type"}
    before = flatten(stored)
    now = flatten(config)
    taken = {}
    for name in now:
        is_stored = _is_of_the_model(name) or name == "image_attention"
        # equal values need no note
        if is_stored and name not in own and before[name] != now[name]:
            taken[name] = before[name]
    config = with_values(config, taken)
    # the given fields are kept, so check that they do not change what the weights compute
    wrong = other_function(stored, config, weights_only)
    if wrong:
        raise ValueError("\n".join(misfit(folder, name, before[name], now[name]) for name in wrong))
    words = ", ".join(f"{flag(name)} {words_of(value)}" for name, value in taken.items())
    notes = [f"model flags from {folder}: {words}"] if taken else []
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
    """Return a message about a field that differs between a checkpoint and a run."""
    return f"{folder} has {flag(name)} {before}, but this run has {now}"


def _is_of_the_model(name: str) -> bool:
    """Return whether a field is part of the model's definition, which includes its dtype."""
    # "room" is the config section that contains a field
    return name == "dtype" or fields()[name].room in ("model", "vision")


def words_of(value: object) -> str:
    """Return a flag's value as typed on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
