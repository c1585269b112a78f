"""Saving and resuming a run: parameters, optimizer state, and the few numbers that say how far it
is.

Dropout and data order are functions of seed, step and samples consumed, so no generator state is
kept. On the same grid of CPU ranks a resumed run repeats an uninterrupted one bit for bit; on GPUs
cuDNN's attention backward has no order.
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
    """How far a run is: all that a resumed run needs besides tensors."""

    step: int = 0
    consumed_samples: int = 0
    data_fingerprint: str = ""
    seed: int = 0
    tokenizer_sha256: str = ""
    image_rules: dict[str, Any] | None = None
    """Rules by which images became tokens: with them a checkpoint can be asked about images without
    its dataset.
    """
    document_start: dict[str, Any] | None = None
    """`{"token": id}` that every document of the training data begins with, or `{"token": null}`;
    None: not known.
    """
    document_end: dict[str, Any] | None = None
    """`{"token": id}` that every document of the training data ends with, or `{"token": null}`;
    None: not known.
    """
    chat_template: dict[str, Any] | None = None
    """The templates that wrote the messages of the training data, by name; None: the house's own
    form, or not known.
    """
    answer_forms: dict[str, int] | None = None
    """The forms in which answers of the training data were learned, as in its manifest; None: not
    known.
    """
    base: str | None = None
    """The --load-hf that its weights come from, also after it was resumed."""
    health: dict[str, Any] | None = None
    """What `health.Health` remembers of earlier steps."""


def fresh_state(config: RunConfig, sources: Sources, weights: Weights | None = None) -> RunState:
    """Return the state of a run at step 0; `weights` are those of --load-hf.

    Packs without images keep the rules of the weights, which an export writes again.
    """
    image_rules = sources.image_rules
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
    """Where a run starts from, equal on all ranks."""

    path: str | None = None
    """A checkpoint or a directory of them; None for step 0."""
    weights_only: bool = False
    """Take only the weights, and start at step 0."""
    note: str = ""
    """What there is to say about the choice."""


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint said: how far the run is, where that stands, and which flags are not what
    they were.
    """

    state: RunState
    path: Place
    changed: tuple[str, ...]


_OF_THE_RUN = set(
    "save load train_iters train_epochs log_file log_interval dry_run world_size auto_resume finetune load_hf "
    "vision_from_hf load_adapter async_save exit_duration".split()
)
"""Flags that differ between a run and its resumption as a matter of course."""


def starting_point(config: RunConfig, world: Axis) -> Start:
    """What the flags and the directory of --save together say; rank 0 looks. Collective over
    `world`.

    With --auto-resume a directory that ever held a checkpoint is resumed from, and `load` refuses
    it when none is whole: starting again at step 0 needs a directory without a trace of one.
    """
    checkpoint = config.checkpoint
    if not checkpoint.auto_resume:
        return Start(checkpoint.load, checkpoint.finetune)
    assert checkpoint.save is not None
    if on_rank_0(world, lambda: holds_checkpoints(str(checkpoint.save)), ValueError):
        return Start(checkpoint.save)
    named = [
        f"{name} {value}"
        for name, value in (("--load", checkpoint.load), ("--load-hf", checkpoint.load_hf))
    ]
    origin = next((text for text in named if not text.endswith("None")), "step 0, from scratch")
    note = (
        f"--auto-resume: {checkpoint.save} holds no checkpoint at all, this run starts from "
        f"{origin}"
    )
    return Start(checkpoint.load, checkpoint.finetune, note)


def drawn_at(start: Start, weights: Weights | None) -> Drawn:
    """Which tensors begin with their initial values: all but those that are read at the start, or
    of --load-hf.
    """
    if start.path is not None:
        return is_of_a_pair if start.weights_only else lambda name: False
    return lambda name: weights is None or name in weights.known_rows


def saved_boxes(model: ParallelModel) -> list[TensorBox]:
    """What this rank writes of the weights and the optimizer's state."""
    held = [*model.parameters.parameter_slices(), *model.balance.slices()]
    return boxes_to_save(held, model.optimizer.state_slices(), model.parameters.counts)


def begin_save(
    model: ParallelModel, state: RunState, config: RunConfig, background: bool
) -> PendingCheckpoint:
    """Begin a checkpoint of the run below `--save`; `commit` ends it. Collective over all ranks."""
    assert config.checkpoint.save is not None
    grid = model.grid
    sizes = {name: getattr(grid.shape, name) for name in ("tp", "cp", "dp", "pp")}
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
    """Fill the model from `start` (default: `--load`), saved by any grid. Collective over all
    ranks.

    `state` is that of a fresh run. Raises ValueError with all reasons when the checkpoint is of
    another model, of other data or another seed: the run would be another one, or repeat some
    samples and miss others, without saying so. A start from weights only may meet any data and need
    no optimizer state.
    """
    start = start or Start(config.checkpoint.load, config.checkpoint.finetune)
    assert start.path is not None
    # --save is one directory for all machines: `saving.Saver` has found its lock on each
    loaded = load_checkpoint(
        start.path, model.grid.world, is_shared=start.path == config.checkpoint.save
    )
    stored = stored_config(loaded)
    before, now = flatten(stored), flatten(config)
    was = stored_state(loaded)
    reasons = list[str]()
    if not start.weights_only and not {"updates", "data_fingerprint"} <= set(loaded.extra):
        reasons = [
            f"{loaded.path} holds weights without the state of a run: start from them by --finetune"
        ]
    elif not start.weights_only:
        path = config.data.data_path
        what = "other datasets or weights" if isinstance(path, tuple) else "another dataset"
        if was.data_fingerprint != state.data_fingerprint:
            reasons.append(
                f"{loaded.path} was trained on {what} than --data-path {shown_path(path)}"
            )
        if was.seed != state.seed:
            reasons.append(
                f"{loaded.path} was trained with --seed {was.seed}, this run has --seed "
                f"{state.seed}"
            )
    function = other_function(stored, config, start.weights_only)
    reasons += [misfit(loaded.path, name, before[name], now[name]) for name in function]
    if reasons:
        raise ValueError("\n".join(reasons))
    if start.weights_only:
        fresh_pairs = stored.model.lora_rank == 0  # pairs of this run are new
        boxes = _cleared(model, is_of_a_pair if fresh_pairs else None)
        loaded.read([box for box in boxes if not (fresh_pairs and is_of_a_pair(bare_name(box)))])
        model.parameters.loaded(masters=False)
        model.optimizer.reset_masters()
        state = dataclasses.replace(
            state, base=was.base, image_rules=state.image_rules or was.image_rules
        )
        return Resumed(state, loaded.path, other_meaning(loaded, state))
    loaded.read(_cleared(model, None) + boxes_to_load([], model.optimizer.state_slices()))
    model.parameters.loaded(masters=True)
    model.optimizer.set_updates(loaded.extra["updates"])
    # without --lr-decay-iters the length of the run is also that of the decay
    decays = config.training.lr_decay_iters is None and config.training.lr_decay_style != "constant"
    usual = _OF_THE_RUN - {"train_iters"} if decays else _OF_THE_RUN
    differing = [name for name in now if now[name] != before[name] and name not in usual]
    changed = tuple(
        f"{flag(name)} {words_of(now[name])} (was {words_of(before[name])})" for name in differing
    )
    return Resumed(stored_state(loaded), loaded.path, changed)


def load_weights(model: ParallelModel, weights: Weights, state: RunState) -> Resumed:
    """Fill the model as `load` does with only the weights of a checkpoint. Collective over all
    ranks.
    """
    require_one_model(weights.files, model.grid.world)
    boxes = _cleared(model, lambda name: name in weights.known_rows)

    def read() -> None:
        try:
            for box in boxes:
                fill(box, weights.source, weights.known_rows.get(bare_name(box)))
        except ValueError as error:
            raise ValueError(f"--load-hf {weights.place}: {error}") from error

    # ranks read different tensors, so what is wrong with one is an error of all
    on_all_ranks(model.grid.world, read, ValueError)
    model.parameters.loaded(masters=False)
    model.optimizer.reset_masters()
    return Resumed(state, weights.place, ())


def _cleared(model: ParallelModel, new: Callable[[str], bool] | None) -> list[TensorBox]:
    """The boxes of all weights, zero but for those of names that are `new`: they have their initial
    values.
    """
    held = boxes_to_load(model.parameters.parameters_held(), {}) if new else []
    initial = {
        (box.name, box.offsets): box.tensor.clone() for box in held if new and new(bare_name(box))
    }
    model.optimizer.clear()
    boxes = boxes_to_load([*model.parameters.parameters_to_load(), *model.balance.slices()], {})
    for box in boxes:
        if (box.name, box.offsets) in initial:
            box.tensor.copy_(initial[box.name, box.offsets])
    return boxes


def stored_state(loaded: LoadedCheckpoint) -> RunState:
    """What a checkpoint says of its run; a file of weights says less."""
    names = {field.name for field in dataclasses.fields(RunState)}
    return RunState(**{name: value for name, value in loaded.extra.items() if name in names})


def first_token(state: RunState, by_files: int | None) -> int | None:
    """The token id that begins a prompt as it began the documents of training; None is none.

    `by_files`: what the tokenizer's own files say, for weights that were not trained here.
    """
    if not (
        state.tokenizer_sha256 and state.data_fingerprint
    ):  # an import has its tokenizer's and no data's
        return by_files
    return (state.document_start or {}).get("token")


def last_token(state: RunState, by_files: int | None) -> int | None:
    """The token id that ended the documents of training; None is none.

    `by_files`: that of the tokenizer's own files, for weights whose training is not known to have
    ended them otherwise.
    """
    return by_files if state.document_end is None else state.document_end.get("token")


def other_meaning(loaded: LoadedCheckpoint, state: RunState) -> tuple[str, ...]:
    """What tokens and images meant to the run that made the weights and do not mean to this one."""
    stored = stored_state(loaded)
    notes = []
    for name in (
        "tokenizer_sha256",
        "document_start",
        "document_end",
        "chat_template",
        "image_rules",
    ):
        was, now = getattr(stored, name), getattr(state, name)
        if not was or not now or was == now:  # equal, or not known on one side
            continue
        if name == "chat_template":
            note = "messages of the data are written by another chat template than before"
            notes += [note] * (was["default"] != now["default"])
            continue
        pairs = (
            {key: (was[key], now[key]) for key in was if key in now}
            if isinstance(was, dict)
            else {"": (was, now)}
        )
        notes += [
            f"{name} {key}: now {b}, was {a}".replace(" :", ":")
            for key, (a, b) in pairs.items()
            if a != b
        ]
    return tuple(notes)
