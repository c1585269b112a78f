"""The packs of a run: opens the datasets, takes from them what the config leaves open, refuses what
does not fit.

All of it happens before any process group exists, from manifests alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megacp.attention.context_parallel.layout import BALANCED, LAYOUTS
from megacp.engine.config.blend import DataPath, named_folders, weighted_folders
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.engine.config.training import DataConfig, TrainingConfig
from megacp.engine.config.vision import VisionConfig
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.rank import DataRank
from megacp.storage.wording import counted
from megacp.training.data.blend import PackBlend, contradictions
from megacp.training.data.images import Decoder
from megacp.training.data.loader import ENDLESS, LoaderOptions, PackSource, step_batches
from megacp.training.data.manifest import DatasetManifest
from megacp.training.data.mock import MockDecoder, MockRules
from megacp.training.data.reader import OPEN_SHARDS, DataCache, PackedDataset
from megacp.training.data.vision.decoding import RulesDecoder, rules_from_dict
from megacp.training.data.vision.rules import VisionRules
from megacp.training.loop.images import mock_images
from megacp.training.loop.stored import progress


@dataclass(frozen=True)
class Sources:
    """Training and validation packs, and what sets them apart from others."""

    train: PackSource
    valid: PackSource | None
    fingerprint: str
    """Hash of the training data: equal on all ranks; a checkpoint keeps it, and a resumed run must
    have the same.
    """
    tokenizer_sha256: str = ""
    """Hash of the tokenizer of the training data; empty for mock packs."""
    decoder: Decoder | None = None
    """Turns the images of both datasets into patches; None when they are text."""
    image_rules: dict[str, Any] | None = None
    """Rules by which images became tokens, as in the manifests; None for text and mock packs."""

    @property
    def datasets(self) -> list[tuple[str, PackedDataset]]:
        """The datasets on disk, each with its flag."""
        both = {"--data-path": self.train, "--valid-data-path": self.valid}
        return [(flag, dataset) for flag, source in both.items() for dataset in _members(source)]

    @property
    def document_start(self) -> dict[str, Any] | None:
        """The token that begins every training document, as a checkpoint keeps it; None for mock
        packs.
        """
        return next(
            ({"token": one.manifest.tokenizer.begins_with} for one in _members(self.train)), None
        )

    @property
    def document_end(self) -> dict[str, int | None] | None:
        """The token that ends every training document, as a checkpoint keeps it; None for mock
        packs.
        """
        return next(({"token": one.manifest.ends_with} for one in _members(self.train)), None)

    @property
    def chat_template(self) -> dict[str, Any] | None:
        """The template that wrote the messages of the training data, as a checkpoint keeps it;
        counts add up.
        """
        found = dict[str, Any]()
        for one in _members(self.train):
            for name, value in (one.manifest.chat_template or {}).items():
                found[name] = found.get(name, 0) + value if isinstance(value, int) else value
        return found if found.get("default") else None

    @property
    def answer_forms(self) -> dict[str, int] | None:
        """The forms in which the training data's answers are learned, as in the manifests; counts
        add up.
        """
        found = dict[str, int]()
        for one in _members(self.train):
            for form, count in (one.manifest.answer_forms or {}).items():
                found[form] = found.get(form, 0) + count
        return found or None


def _members(source: PackSource | None) -> tuple[PackedDataset, ...]:
    """The datasets on disk that a source consists of."""
    if isinstance(source, PackBlend):
        return source.datasets
    return (source,) if isinstance(source, PackedDataset) else ()


def open_sources(config: RunConfig) -> tuple[RunConfig, Sources]:
    """The config with its vocabulary resolved, and the packs. Raises ValueError with all reasons at
    once.
    """
    if config.data.data_path is None:
        config = config if config.model.vocab_size else with_values(config, {"vocab_size": 256})
        images = mock_images(config)
        mask = "packed" if images is None else "image"
        mock = MockRules(config.model.vocab_size, config.data.seq_length, mask, images=images)
        known = f"mock/{config.model.vocab_size}/{config.data.seq_length}{'/images' if images is not None else ''}"
        return config, Sources(
            mock, None, known, decoder=MockDecoder(images) if images is not None else None
        )
    train, valid = _open_datasets(config.data)
    first = _members(train)[0].manifest
    if config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": first.tokenizer.vocab_size})
    reasons = []
    for flag, source in (("--data-path", train), ("--valid-data-path", valid)):
        for dataset in _members(source):
            reasons += _misfits(flag, str(dataset.directory), dataset, config)
    both = {"--data-path": _members(train), "--valid-data-path": _members(valid)}
    names, manifests = zip(
        *((flag, one.manifest) for flag, of in both.items() for one in of), strict=True
    )
    contradicting = contradictions(names, manifests) if valid is not None else []
    reasons += [
        text
        for text in contradicting
        if "--seq-length" not in text and "--pad-multiple" not in text
    ]
    rules = [one.manifest.image_rules for one in (*_members(train), *_members(valid))]
    values = next((one for one in rules if one is not None), None)
    if values is not None and importlib.util.find_spec("PIL") is None:
        reasons.append(
            "the dataset holds images, which need the package pillow: pip install 'megacp[data]'"
        )
    if reasons:
        raise ValueError("\n".join(reasons))
    decoder = RulesDecoder(rules_from_dict(values)) if values is not None else None
    return config, Sources(train, valid, train.fingerprint, first.tokenizer.sha256, decoder, values)


def whole_run(training: TrainingConfig, packs: int, step: int, consumed: int) -> tuple[int, int]:
    """Last step and last sample of a run over so many packs that has taken `consumed` samples in
    `step` steps.
    """
    if training.train_epochs is None:
        return training.train_iters, ENDLESS
    end = round(training.train_epochs * packs)
    return step + max(0, -(-(end - consumed) // training.global_batch_size)), end


_FEW_UPDATES = 20
"""Fewer change a model little, whatever its data."""


def with_stored_length(
    config: RunConfig, given: Collection[str], flags: Collection[str]
) -> tuple[RunConfig, str]:
    """The config with the row length of --data-path where no flag in `given` says it, with
    --train-epochs in steps, and a note, also of a new run that is short or warms up for most of its
    steps; both as they were where there is no such dataset, which is reported later. ValueError for
    no step, and for a length that `flags` of the command line, or else files, say twice.
    """
    try:
        manifests = [DatasetManifest.read(one) for one in named_folders(config.data.data_path)]
    except ValueError:
        manifests = []
    training = config.training
    found = dict[str, Value]()  # flags that the dataset says
    if (
        manifests
        and "seq_length" not in given
        and manifests[0].seq_length != config.data.seq_length
    ):
        found["seq_length"] = manifests[0].seq_length
    epochs = training.train_epochs
    lengths = {"train_epochs", "train_iters"}
    if epochs is not None and lengths <= {*given}:
        if len(lengths & {*flags}) != 1:
            both = f"--train-epochs {epochs:g} and --train-iters {training.train_iters}"
            raise ValueError(f"{both} are two lengths of the run: give one of them")
        if "train_iters" in flags:  # in place of a file's epochs
            epochs = None
            config = with_values(config, {"train_epochs": None})
    if manifests and epochs is not None:
        packs = sum(one.num_packs for one in manifests)
        found["train_iters"] = steps = whole_run(training, packs, *progress(config))[0]
        if steps == 0:
            raise ValueError(
                f"--train-epochs {epochs:g} of the {packs} packs of --data-path is none: raise it"
            )
    flags_found = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.items())
    notes = [f"{flags_found}, as --data-path was packed"] if found else []
    config = with_values(config, found)
    steps, warmup = config.training.train_iters, config.training.warmup_updates
    if manifests and (steps < _FEW_UPDATES or warmup > steps / 2) and progress(config) == (0, 0):
        batch = training.global_batch_size
        few = f"{counted(steps, 'update')} of {counted(batch, 'pack')}, {warmup} of them to warm up"
        lower = ["--global-batch-size"] if batch > 1 else []
        lower += ["the warm-up"] if warmup else []
        ways = [f"lower {' or '.join(lower)}"] if lower else []
        ways.append("raise --train-epochs or --train-iters")
        notes.append(f"this run makes {few}, which teaches a model little: {', or '.join(ways)}")
    return config, "\n".join(notes)


def _open_datasets(
    data: DataConfig,
) -> tuple[PackedDataset | PackBlend, PackedDataset | PackBlend | None]:
    """The training and the validation packs. ValueError says what is wrong with both."""
    opened: list[PackedDataset | PackBlend | None] = []
    reasons: list[str] = []
    cache = DataCache()
    for flag, path in (
        ("--data-path", data.data_path),
        ("--valid-data-path", data.valid_data_path),
    ):
        try:
            opened.append(_opened(flag, path, cache) if path else None)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("\n".join(reasons))
    train, valid = opened
    assert train is not None, "asked for with a --data-path"
    return train, valid


def _opened(flag: str, path: DataPath, cache: DataCache) -> PackedDataset | PackBlend:
    """The packs of one flag. ValueError says what is wrong with each dataset, then what they do not
    agree in.
    """
    parts = weighted_folders(flag, path)
    datasets, reasons = [], []
    for part in parts:
        try:
            datasets.append(PackedDataset(part.folder, cache, max(1, OPEN_SHARDS // len(parts))))
        except ValueError as error:
            reasons.append(f"{flag} {part.folder}: {error}")
    reasons += [
        f"{flag} {one.directory} holds no packs"
        for one in datasets
        if len(parts) > 1 and not len(one)
    ]
    if reasons:
        raise ValueError("\n".join(reasons))
    if len(datasets) == 1:
        return datasets[0]
    try:
        return PackBlend(datasets, [part.weight for part in parts])
    except ValueError as error:
        raise ValueError(
            "\n".join(f"{flag}: {line}" for line in str(error).splitlines())
        ) from error


def _misfits(flag: str, path: str, dataset: PackedDataset, config: RunConfig) -> list[str]:
    reasons = []
    manifest = dataset.manifest
    if not len(dataset):
        reasons.append(f"{flag} {path} holds no packs")
    if manifest.tokenizer.vocab_size > config.model.embedding_rows:
        reasons.append(
            f"{flag} {path} has ids of a vocabulary of {manifest.tokenizer.vocab_size}, "
            f"--vocab-size {config.model.vocab_size} is smaller; leave it out to take the dataset's"
        )
    elif manifest.num_token_ids > config.model.embedding_rows:
        missing = manifest.num_token_ids - config.model.vocab_size
        reasons.append(
            f"{flag} {path} has image tokens up to id {manifest.num_token_ids - 1}, the embedding "
            "has "
            f"{config.model.embedding_rows} rows: give --additional-vocab-size of at least "
            f"{missing}"
        )
    if manifest.image_rules is not None:
        reasons += image_misfits(
            f"{flag} {path}", rules_from_dict(manifest.image_rules), config.vision
        )
    if manifest.seq_length != config.data.seq_length:
        reasons.append(
            f"{flag} {path} was packed for rows of {manifest.seq_length} tokens, "
            f"--seq-length is {config.data.seq_length}; set --seq-length {manifest.seq_length} or "
            "build it again"
        )
    return reasons + _filled_otherwise(f"{flag} {path}", manifest.pad_multiple, config.parallel)


def _filled_otherwise(where: str, filled: int, parallel: ParallelConfig) -> list[str]:
    """Why documents that were filled up to multiples of `filled` tokens do not fit the layout;
    empty if they do.
    """
    cp = parallel.context_parallel_size
    if parallel.chooses_layout or cp == 1 or filled == 1:
        return []
    layout = LAYOUTS[parallel.cp_layout]
    multiple = layout.slices * cp
    if not layout.fills_documents or filled % multiple == 0:
        return []
    return [
        f"{where} has documents padded to multiples of {filled}, --cp-layout {layout.name} at "
        f"--context-parallel-size {cp} needs multiples of {multiple}: build it with --pad-multiple "
        f"{multiple} (or 1, "
        f"then the layout fills up), or choose --cp-layout {BALANCED.name}"
    ]


def image_misfits(where: str, rules: VisionRules, vision: VisionConfig) -> list[str]:
    """Why images made by `rules`, found at `where`, do not fit a model; empty when they do."""
    if vision.vision_num_layers == 0:
        return [f"{where} holds images, but the model has no vision tower: set --vision-num-layers"]
    if rules.family != vision.vision_family:
        return [
            f"{where} was built with --vision-family {rules.family}, the model's tower is "
            f"{vision.vision_family}'s"
        ]
    misfit = rules.misfit(vision)
    return [] if misfit is None else [f"{where} {misfit} or build the dataset again"]


def loader_options(config: RunConfig, packs: int) -> LoaderOptions:
    """How the loader reads for a config in rows of `packs` packs; equal on all ranks."""
    return LoaderOptions(
        micro_batch_size=packs,
        global_batch_size=config.training.global_batch_size,
        seed=config.training.seed,
        attention_mask=config.data.attention_mask,
        image_attention=config.data.image_attention,
        num_threads=config.data.num_workers,
    )


_FIRST_ROWS = 4


def first_rows(config: RunConfig, sources: Sources) -> list[PackedBatch]:
    """The first rows of a run's order from its very beginning, of `--micro-batch-size` packs each.

    The same on every rank of every grid, also when a run is resumed.
    """
    packs = config.training.micro_batch_size
    options = dataclasses.replace(
        loader_options(config, packs), global_batch_size=_FIRST_ROWS * packs
    )
    return step_batches(sources.train, options, DataRank(), consumed=0)
