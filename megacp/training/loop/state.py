"""Saving and resuming of a run: parameters, optimizer state, and the run's progress.

Dropout and data order depend only on the seed, the step and the consumed samples, so no generator
state is saved. On the same grid of CPU ranks, a resumed run is bitwise equal to an uninterrupted
run. On GPUs, it is not, because cuDNN's attention backward is not deterministic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megacp.distributed.grid import Axis
from megacp.engine.config.blend import shown_path
from megacp.engine.config.run import RunConfig, flag, flatten
from megacp.engine.config.yaml_file import to_yaml
from megacp.engine.data_parallel.boxes import TensorBox, boxes_to_load, boxes_to_save
from megacp.engine.models.init import Drawn
from megacp.engine.step.step import ParallelModel
from megacp.engine.tensor_parallel.lora import is_of_a_pair
from megacp.storage.place import Place
from megacp.training.checkpoint.commit import (
    Contents,
    LoadedCheckpoint,
    PendingCheckpoint,
    load_checkpoint,
)
from megacp.training.checkpoint.directory import holds_checkpoints
from megacp.training.checkpoint.outcome import on_all_ranks, on_rank_0
from megacp.training.checkpoint.weights import Weights, bare_name, fill, require_one_model
from megacp.training.loop.sources import Sources
from megacp.training.loop.stored import misfit, other_function, stored_config, words_of


@dataclass(frozen=True)
class RunState:
    """Progress of a run: everything that a resumed run needs in addition to tensors."""

    step: int = 0
    consumed_samples: int = 0
    data_fingerprint: str = ""
    seed: int = 0
    tokenizer_sha256: str = ""
    image_rules: dict[str, Any] | None = None
    """Rules that convert images to tokens, so that the checkpoint can be used with images even
    without its dataset.
    """
    document_start: dict[str, Any] | None = None
    """Token that begins every training document, as `{"token": id}`; `{"token": null}` if there is
    none; None if unknown.
    """
    document_end: dict[str, Any] | None = None
    """Token that ends every training document, as `{"token": id}`; `{"token": null}` if there is
    none; None if unknown.
    """
    chat_template: dict[str, Any] | None = None
    """Templates for the messages in the training data, by name; None for megacp's own format, or if
    unknown.
    """
    answer_forms: dict[str, int] | None = None
    """Number of answers in the training data by form, as in its manifest; None if unknown."""
    base: str | None = None
    """Folder of --load-hf from which the weights came; a resumed run keeps it."""
    health: dict[str, Any] | None = None
    """Result of `health.Health.state`."""


def fresh_state(config: RunConfig, sources: Sources, weights: Weights | None = None) -> RunState:
    """Return the state of a run at step 0, given the `weights` of --load-hf.

    If the packs have no images, the state keeps the image rules of the weights, which an export
    needs.
    """
    image_rules = sources.image_rules
    # with text packs, a vision-language model keeps the image rules from its folder
    if image_rules is None and weights is not None and weights.image_rules is not None:
        image_rules = dict(weights.image_rules)
    return RunState(
        data_fingerprint=sources.fingerprint,
        seed=config.training.seed,
        tokenizer_sha256=sources.tokenizer_sha256,
        image_rules=image_rules,
        document_start=sources.document_start,
        document_end=sources.document_end,
        chat_template=sources.chat_template,
        answer_forms=sources.answer_forms,
        base=config.checkpoint.load_hf,
    )


@dataclass(frozen=True)
class Start:
    """Starting point of a run, equal on all ranks."""

    path: str | None = None
    """Checkpoint, or directory with checkpoints; None to start at step 0 without a checkpoint."""
    weights_only: bool = False
    """Whether to load only the weights and start at step 0."""
    note: str = ""
    """Log line about the choice, or ""."""


@dataclass(frozen=True)
class Resumed:
    """State of a loaded checkpoint, its path, and a line per changed flag."""

    state: RunState
    path: Place
    changed: tuple[str, ...]


_OF_THE_RUN = {
    "save",
    "load",
    "train_iters",
    "train_epochs",
    "log_file",
    "log_interval",
    "dry_run",
    "world_size",
    "auto_resume",
    "finetune",
    "load_hf",
    "vision_from_hf",
    "load_adapter",
    "async_save",
    "exit_duration",
}
"""Flags that often change when a run is resumed, so such changes are not logged."""


def starting_point(config: RunConfig, world: Axis) -> Start:
    """Return where to start, based on the flags and the contents of --save. Collective.

    With --auto-resume, the run resumes from --save if the directory has ever contained a
    checkpoint. If none of its checkpoints is complete, `load` raises an error, because a new run
    must not overwrite an earlier run's files.
    """
    checkpoint = config.checkpoint
    if not checkpoint.auto_resume:
        return Start(checkpoint.load, checkpoint.finetune)
    assert checkpoint.save is not None
    # only rank 0 checks, because NFS may show different contents on different machines
    if on_rank_0(world, lambda: holds_checkpoints(str(checkpoint.save)), ValueError):
        return Start(checkpoint.save)
    if checkpoint.load is not None:
        origin = f"--load {checkpoint.load}"
    elif checkpoint.load_hf is not None:
        origin = f"--load-hf {checkpoint.load_hf}"
    else:
        origin = "step 0, from scratch"
    note = f"--auto-resume: no checkpoint in {checkpoint.save}, this run starts from {origin}"
    return Start(checkpoint.load, checkpoint.finetune, note)


def drawn_at(start: Start, weights: Weights | None) -> Drawn:
    """Return a function that decides by name whether to initialize a tensor.

    Tensors that are loaded at the start need no initial values. `weights` come from --load-hf.
    """
    if start.path is not None:
        # new LoRA adapters keep their initial values if the checkpoint has none
        return is_of_a_pair if start.weights_only else lambda name: False
    return lambda name: weights is None or name in weights.known_rows


def saved_boxes(model: ParallelModel) -> list[TensorBox]:
    """Return the part of the weights and the optimizer state that this rank saves."""
    held = [*model.parameters.parameter_slices(), *model.balance.slices()]
    return boxes_to_save(held, model.optimizer.state_slices(), model.parameters.counts)


def begin_save(
    model: ParallelModel, state: RunState, config: RunConfig, background: bool
) -> PendingCheckpoint:
    """Begin to save a checkpoint in `--save`, and return it; `commit` finishes it. Collective."""
    assert config.checkpoint.save is not None
    grid = model.grid
    sizes = {name: getattr(grid.shape, name) for name in ("tp", "cp", "dp", "pp")}
    # `sizes` is only informative: a checkpoint can be loaded on any grid
    extra = asdict(state) | {"updates": model.optimizer.updates}
    return PendingCheckpoint(
        config.checkpoint.save,
        saved_boxes(model),
        Contents(state.step, extra, to_yaml(config), sizes),
        grid.world,
        background=background,
    )


def load(
    model: ParallelModel, state: RunState, config: RunConfig, start: Start | None = None
) -> Resumed:
    """Load the checkpoint of `start` into the model, and return its state. Collective.

    `start` defaults to `--load`. The checkpoint may have been saved on any grid. `state` is the
    state of a new run. Raise ValueError with all reasons if the checkpoint has a different model,
    dataset or seed: a resumed run would then differ from the original run, or repeat some samples
    and omit others. If only the weights are loaded, any dataset and seed are accepted, and the
    checkpoint needs no optimizer state.
    """
    start = start or Start(config.checkpoint.load, config.checkpoint.finetune)
    assert start.path is not None
    # --save is a shared directory: `saving.Saver` has found its lock on every machine
    loaded = load_checkpoint(
        start.path, model.grid.world, is_shared=start.path == config.checkpoint.save
    )
    stored = stored_config(loaded)
    before = flatten(stored)
    now = flatten(config)
    was = stored_state(loaded)
    reasons = []
    if not start.weights_only:
        reasons += _other_run(loaded, was, state, config)
    function = other_function(stored, config, start.weights_only)
    reasons += [misfit(loaded.path, name, before[name], now[name]) for name in function]
    if reasons:
        raise ValueError("\n".join(reasons))
    if start.weights_only:
        # the optimizer is new: its master weights are copies of the loaded weights
        fresh_pairs = stored.model.lora_rank == 0  # this run adds the LoRA adapters, if any
        boxes = _cleared(model, is_of_a_pair if fresh_pairs else None)
        if fresh_pairs:  # keep their initial values
            boxes = [box for box in boxes if not is_of_a_pair(bare_name(box))]
        loaded.read(boxes)
        model.parameters.loaded(masters=False)
        model.optimizer.reset_masters()
        image_rules = state.image_rules or was.image_rules
        state = dataclasses.replace(state, base=was.base, image_rules=image_rules)
        return Resumed(state, loaded.path, other_meaning(loaded, state))
    # to resume, read weights and optimizer state (which includes master weights) together
    weights = _cleared(model, None)
    loaded.read(weights + boxes_to_load([], model.optimizer.state_slices()))
    model.parameters.loaded(masters=True)
    model.optimizer.set_updates(loaded.extra["updates"])
    # Without --lr-decay-iters, a changed --train-iters also changes the decay: log it.
    decays = config.training.lr_decay_iters is None and config.training.lr_decay_style != "constant"
    usual = _OF_THE_RUN - {"train_iters"} if decays else _OF_THE_RUN
    changed = []
    for name in now:
        if now[name] != before[name] and name not in usual:
            change = f"{flag(name)} {words_of(now[name])} (was {words_of(before[name])})"
            changed.append(change)
    return Resumed(stored_state(loaded), loaded.path, tuple(changed))


def _other_run(
    loaded: LoadedCheckpoint, was: RunState, state: RunState, config: RunConfig
) -> list[str]:
    """Return reasons why a run with `state` cannot resume from a checkpoint with state `was`."""
    if not {"updates", "data_fingerprint"} <= set(loaded.extra):
        return [
            f"{loaded.path} contains only weights, but no state of a run to resume: add --finetune "
            "to start from the weights"
        ]
    reasons = []
    path = config.data.data_path
    if was.data_fingerprint != state.data_fingerprint:
        other = (
            "different datasets or weights" if isinstance(path, tuple) else "a different dataset"
        )
        reasons.append(
            f"{loaded.path} was trained on {other} than --data-path {shown_path(path)}: resume "
            "with the same data, or use --load with --finetune to start at step 0 with its weights"
        )
    if was.seed != state.seed:
        reasons.append(
            f"{loaded.path} was trained with --seed {was.seed}, but this run has --seed "
            f"{state.seed}: resume with the same seed"
        )
    return reasons


def load_weights(model: ParallelModel, weights: Weights, state: RunState) -> Resumed:
    """Load the weights of --load-hf into the model, and return the state. Collective."""
    require_one_model(weights.files, model.grid.world)
    boxes = _cleared(model, lambda name: name in weights.known_rows)

    def read() -> None:
        try:
            for box in boxes:
                fill(box, weights.source, weights.known_rows.get(bare_name(box)))
        except ValueError as error:
            raise ValueError(f"--load-hf {weights.place}: {error}") from error

    # ranks read different tensors, so share an error on one rank with all ranks
    on_all_ranks(model.grid.world, read, ValueError)
    model.parameters.loaded(masters=False)
    model.optimizer.reset_masters()
    return Resumed(state, weights.place, ())


def _cleared(model: ParallelModel, new: Callable[[str], bool] | None) -> list[TensorBox]:
    """Return the boxes of all weights, set to zero before they are loaded.

    Weights for whose names `new` returns True keep their initial values.
    """
    initial = {}
    if new is not None:
        for box in boxes_to_load(model.parameters.parameters_held(), {}):
            if new(bare_name(box)):
                initial[box.name, box.offsets] = box.tensor.clone()
    # `clear` also zeroes the parameters, so the initial values are copied back
    model.optimizer.clear()
    boxes = boxes_to_load([*model.parameters.parameters_to_load(), *model.balance.slices()], {})
    for box in boxes:
        if (box.name, box.offsets) in initial:
            box.tensor.copy_(initial[box.name, box.offsets])
    return boxes


def stored_state(loaded: LoadedCheckpoint) -> RunState:
    """Return the state in a checkpoint; without an optimizer, some values may be defaults."""
    # other versions of megacp may have stored additional values: ignore unknown names
    names = {field.name for field in dataclasses.fields(RunState)}
    return RunState(**{name: value for name, value in loaded.extra.items() if name in names})


def first_token(state: RunState, by_files: int | None) -> int | None:
    """Return the id of the token that begins training documents and prompts; None if there is none.

    `by_files` is the id from the tokenizer's files, for weights that megacp has not trained.
    """
    # an imported checkpoint has a tokenizer, but no training data
    if not (state.tokenizer_sha256 and state.data_fingerprint):
        return by_files
    return (state.document_start or {}).get("token")


def last_token(state: RunState, by_files: int | None) -> int | None:
    """Return the id of the token that ends the training documents; None if there is none.

    `by_files` is the id from the tokenizer's files, for weights with unknown training data.
    """
    if state.document_end is None:
        return by_files
    return state.document_end.get("token")


def other_meaning(loaded: LoadedCheckpoint, state: RunState) -> tuple[str, ...]:
    """Return notes about tokenizer, template and image rules that differ from the stored run."""
    stored = stored_state(loaded)
    notes = []
    for name in (
        "tokenizer_sha256",
        "document_start",
        "document_end",
        "chat_template",
        "image_rules",
    ):
        was = getattr(stored, name)
        now = getattr(state, name)
        if not was or not now or was == now:  # equal, or unknown on one side
            continue
        if name == "chat_template":  # too long to show
            if was["default"] != now["default"]:
                notes.append("the data uses a different chat template than before")
        elif isinstance(was, dict):
            for key in was:
                if key in now and was[key] != now[key]:
                    notes.append(f"{name} {key}: now {now[key]}, was {was[key]}")
        else:
            notes.append(f"{name}: now {now}, was {was}")
    return tuple(notes)
