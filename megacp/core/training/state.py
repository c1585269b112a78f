"""Saving and resuming a run: parameters, optimizer state, and the few integers that say how far it is.

Key property: dropout and data order are functions of seed, step and samples consumed, so no generator state is kept. On
the same grid a resumed run repeats an uninterrupted one bit for bit. Rejected: pickled loader and generator objects,
which tie a checkpoint to a number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from megacp.core.checkpoint.agree import on_rank_0
from megacp.core.checkpoint.commit import LoadedCheckpoint, load_checkpoint
from megacp.core.checkpoint.directory import traces_of_checkpoints
from megacp.core.checkpoint.manifest import MANIFEST_FILE
from megacp.core.checkpoint.names import TensorBox, boxes_to_load, boxes_to_save
from megacp.core.checkpoint.pending import Contents, PendingCheckpoint
from megacp.core.checkpoint.weights import Weights, bare_name, fill
from megacp.core.config.blend import shown_path
from megacp.core.config.run import RunConfig, flag, flatten
from megacp.core.config.yaml_file import to_yaml
from megacp.core.distributed.grid import Axis, patient
from megacp.core.storage.json_fields import LARGEST_COUNT, LARGEST_INT64, Fields
from megacp.core.storage.place import Place, place_of
from megacp.core.tensor_parallel.lora import is_of_a_pair
from megacp.core.training.step import ParallelModel
from megacp.core.training.stored import misfit, other_function, stored_config, words_of


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
    document_start: dict[str, Any] | None = None
    """`{"token": id}` that every document of the training data begins with, or `{"token": null}`; None: not known."""
    document_end: dict[str, Any] | None = None
    """`{"token": id}` that every document of the training data ends with, or `{"token": null}`; None: not known."""
    chat_template: dict[str, Any] | None = None
    """The templates that wrote the messages of the training data, by name; None: the house's own form, or not known."""
    health: dict[str, Any] | None = None
    """What `health.Health` remembers of earlier steps."""


@dataclass(frozen=True)
class Start:
    """Where a run starts from, equal on all ranks."""

    path: str | None = None
    """A checkpoint or a directory of them; None for step 0."""
    weights_only: bool = False
    """Take the weights alone, and start at step 0."""
    note: str = ""
    """What there is to say about the choice."""


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint said: how far the run is, where that stands, and which flags are not what they were."""

    progress: Progress
    path: Place
    changed: tuple[str, ...]


_OF_THE_RUN = {"save", "load", "train_iters", "log_file", "log_interval", "dry_run", "world_size"}
_OF_THE_RUN |= {
    "auto_resume",
    "finetune",
    "load_hf",
    "vision_from_hf",
    "ignore_field",
    "async_save",
    "exit_duration",
    "checkpoint_timeout_minutes",
}
"""Flags that differ between a run and its resumption as a matter of course."""


def starting_point(config: RunConfig, world: Axis) -> Start:
    """What the flags and the directory of --save together say; rank 0 looks. Collective over `world`.

    With --auto-resume a directory that ever held a checkpoint is resumed from, and `load` refuses it when none is
    whole: starting again at step 0 needs a directory without a trace of one.
    """
    checkpoint = config.checkpoint
    if checkpoint.auto_resume:
        assert checkpoint.save is not None
        if on_rank_0(world, lambda: bool(traces_of_checkpoints(str(checkpoint.save))), ValueError):
            return Start(checkpoint.save)
        places = {"--load": checkpoint.load, "--load-hf": checkpoint.load_hf}
        named = [f"{name} {place}" for name, place in places.items() if place]
        place = named[0] if named else "step 0, from scratch"
        note = f"--auto-resume: {checkpoint.save} holds no checkpoint at all, this run starts from {place}"
        return Start(checkpoint.load, checkpoint.finetune, note)
    return Start(checkpoint.load, checkpoint.finetune)


def saved_boxes(model: ParallelModel) -> list[TensorBox]:
    """What this rank writes of the weights and the optimizer's state."""
    if not model.parameters.saves:
        return []
    return boxes_to_save(model.parameters.parameter_slices(), model.optimizer.state_slices())


def begin_save(model: ParallelModel, progress: Progress, config: RunConfig, background: bool) -> PendingCheckpoint:
    """Begin a checkpoint of the run below `--save`; `commit` ends it. Collective over all ranks."""
    assert config.checkpoint.save is not None
    grid = model.grid
    sizes = {name: getattr(grid.shape, name) for name in ("tp", "cp", "dp", "pp")}
    extra = asdict(progress) | {"updates": model.optimizer.updates}
    return PendingCheckpoint(
        place_of(config.checkpoint.save),
        saved_boxes(model),
        Contents(progress.step, extra, to_yaml(config), sizes),
        patient(grid.world, 60.0 * config.checkpoint.checkpoint_timeout_minutes),
        background=background,
    )


def load(model: ParallelModel, progress: Progress, config: RunConfig, start: Start | None = None) -> Resumed:
    """Fill the model from `start` (default: `--load`), saved by any grid. Collective over all ranks.

    `progress` is that of a fresh run. Raises ValueError with all reasons when the checkpoint is of another model, of
    other data or another seed. Another model may have tensors of the same shapes. The run would be another one, or
    repeat some samples and miss others, without saying so. Weights alone may meet any data and need no optimizer state.
    """
    start = start or Start(config.checkpoint.load, config.checkpoint.finetune)
    assert start.path is not None
    loaded = load_checkpoint(start.path, patient(model.grid.world, 60.0 * config.checkpoint.checkpoint_timeout_minutes))
    reasons = [] if start.weights_only else _other_data(loaded, progress, config)
    stored = stored_config(loaded)
    before, now = flatten(stored), flatten(config)
    usual = _OF_THE_RUN if _length_is_free(config) else _OF_THE_RUN - {"train_iters"}
    differing = [name for name in now if now[name] != before[name] and name not in usual]
    function = other_function(stored, config, start.weights_only)
    reasons += [misfit(loaded.path, name, before[name], now[name]) for name in function]
    if reasons:
        raise ValueError("\n".join(reasons))
    begins = start.weights_only and stored.model.lora_rank == 0  # pairs of this run are new
    boxes = _cleared(model, is_of_a_pair if begins else None)
    state = {} if start.weights_only else model.optimizer.state_slices()
    stored_boxes = [box for box in boxes if not (begins and is_of_a_pair(bare_name(box)))]
    loaded.read(stored_boxes + boxes_to_load([], state))
    model.parameters.loaded(masters=not start.weights_only)
    if start.weights_only:
        model.optimizer.reset_masters()
        return Resumed(progress, loaded.path, other_meaning(loaded, progress))
    model.optimizer.set_updates(_extra(loaded).integer("updates", high=LARGEST_COUNT))
    changed = tuple(f"{flag(name)} {words_of(now[name])} (was {words_of(before[name])})" for name in differing)
    return Resumed(stored_progress(loaded), loaded.path, changed)


def load_weights(model: ParallelModel, weights: Weights, progress: Progress) -> Resumed:
    """Fill the model as `load` does with the weights of a checkpoint alone; no collective."""
    for box in _cleared(model, lambda name: name in weights.known_rows or is_of_a_pair(name)):
        if not is_of_a_pair(bare_name(box)):
            fill(box, weights.source, weights.known_rows.get(bare_name(box)))
    model.parameters.loaded(masters=False)
    model.optimizer.reset_masters()
    return Resumed(progress, weights.place, ())


def _cleared(model: ParallelModel, new: Callable[[str], bool] | None) -> list[TensorBox]:
    """The boxes of all weights, zero but for those of names that are `new`: they have their initial values."""
    held = boxes_to_load(model.parameters.parameters_held(), {}) if new else []
    initial = {(box.name, box.offsets): box.tensor.clone() for box in held if new and new(bare_name(box))}
    model.optimizer.clear()
    boxes = boxes_to_load(model.parameters.parameters_to_load(), {})
    for box in boxes:
        if (box.name, box.offsets) in initial:
            box.tensor.copy_(initial[box.name, box.offsets])
    return boxes


def stored_progress(loaded: LoadedCheckpoint) -> Progress:
    """What a checkpoint says of its run; weights alone say less. ValueError names file and field of a wrong value."""
    fields, hints = _extra(loaded), get_type_hints(Progress)
    progress = Progress(**{name: _value(fields, name, hints[name]) for name in hints if fields.has(name)})
    if "step" in loaded.extra and progress.step != loaded.step:
        raise ValueError(f"{_manifest_of(loaded)} has step {loaded.step}, its extra has step {progress.step}")
    return progress


def _value(fields: Fields, name: str, hint: Any) -> Any:
    """A field of the type that `Progress` declares for it."""
    if hint is int:
        return fields.integer(name, high=LARGEST_INT64 if name == "seed" else LARGEST_COUNT)
    return fields.line(name) if hint is str else fields.optional_object(name)


def first_token(progress: Progress, by_files: int | None) -> int | None:
    """The token id that begins a prompt as it began the documents of training; None is none.

    `by_files`: what the tokenizer's own files say, for weights that were not trained here.
    """
    if not (progress.tokenizer_sha256 and progress.data_fingerprint):  # an import has its tokenizer's and no data's
        return by_files
    return _token(progress.document_start or {}, "document_start")  # datasets of before had none


def last_token(progress: Progress, by_files: int | None) -> int | None:
    """The token id that ended the documents of training; None is none.

    `by_files`: that of the tokenizer's own files, for weights whose training is not known to have ended them otherwise.
    """
    return by_files if progress.document_end is None else _token(progress.document_end, "document_end")


def _token(kept: dict[str, Any], name: str) -> int | None:
    token = kept.get("token")
    if token is None or (type(token) is int and token >= 0):
        return token
    raise ValueError(f"the checkpoint's {name} has token {token!r:.80}, no token id")


def _extra(loaded: LoadedCheckpoint) -> Fields:
    return Fields(loaded.extra, "extra", f"{_manifest_of(loaded)}: ")


def _manifest_of(loaded: LoadedCheckpoint) -> Place:
    return loaded.path / MANIFEST_FILE


def _length_is_free(config: RunConfig) -> bool:
    """Whether --train-iters only says when to stop: without --lr-decay-iters it is also the length of the decay."""
    return config.training.lr_decay_iters is not None or config.training.lr_decay_style == "constant"


def _other_data(loaded: LoadedCheckpoint, progress: Progress, config: RunConfig) -> list[str]:
    """Why a run cannot go on with the samples of a checkpoint where that one stopped."""
    extra = loaded.extra
    if not {"updates", "data_fingerprint"} & set(extra):
        return [f"{loaded.path} holds weights without the state of a run: start from them by --finetune"]
    if missing := sorted({"updates", "step", "consumed_samples", "data_fingerprint", "seed"} - set(extra)):
        return [f"{_manifest_of(loaded)}: extra {', '.join(missing)} is missing"]
    stored = stored_progress(loaded)
    reasons = []
    if stored.data_fingerprint != progress.data_fingerprint:
        path = config.data.data_path
        what = "other datasets or weights" if isinstance(path, tuple) else "another dataset"
        reasons.append(f"{loaded.path} was trained on {what} than --data-path {shown_path(path)}")
    if stored.seed != progress.seed:
        reasons.append(f"{loaded.path} was trained with --seed {stored.seed}, this run has --seed {progress.seed}")
    return reasons


def other_meaning(loaded: LoadedCheckpoint, progress: Progress) -> tuple[str, ...]:
    """What tokens and images meant to the run that made the weights and do not mean to this one."""
    notes = []
    stored = stored_progress(loaded)
    before = stored.tokenizer_sha256
    if before and progress.tokenizer_sha256 and before != progress.tokenizer_sha256:
        now = progress.tokenizer_sha256[:12]
        notes.append(f"the tokenizer, now {now} (was {before[:12]}): do ids still mean the same?")
    pairs = {
        "begin": (stored.document_start, progress.document_start),
        "end": (stored.document_end, progress.document_end),
    }
    for what, (was, now_is) in pairs.items():
        if was is not None and now_is is not None and was != now_is:
            notes.append(f"documents {what} with token {now_is.get('token')} (was {was.get('token')})")
    if None not in (texts := (stored.chat_template, progress.chat_template)) and texts[0] != texts[1]:
        notes.append("messages of the data are written by another chat template than before")
    rules, new = stored.image_rules or {}, progress.image_rules or {}
    changed = [key for key in rules if key in new and rules[key] != new[key]]
    notes += [f"images are made with {key} {new[key]} (was {rules[key]})" for key in changed]
    return tuple(notes)
