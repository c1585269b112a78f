"""Packs of a run: open the datasets, fill in config values from them, and check that they fit.

This happens before any process group exists, and reads only the manifests.
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
from megacp.engine.config.run import RunConfig, Value, flag, with_values
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
from megacp.training.loop import finetuning
from megacp.training.loop.images import mock_images
from megacp.training.loop.stored import progress


@dataclass(frozen=True)
class Sources:
    """Training and validation packs, and the properties that identify them."""

    train: PackSource
    valid: PackSource | None
    fingerprint: str
    """Hash of the training data, equal on all ranks. Checkpoints store it, and a resumed run must
    have the same hash.
    """
    tokenizer_sha256: str = ""
    """Hash of the training data's tokenizer; empty for mock packs."""
    decoder: Decoder | None = None
    """Decoder from images to patches for all datasets; None for text."""
    image_rules: dict[str, Any] | None = None
    """Rules that convert images to tokens, as in the manifests; None for text and mock packs."""

    @property
    def datasets(self) -> list[tuple[str, PackedDataset]]:
        """Datasets on disk, each with its flag."""
        found = [("--data-path", dataset) for dataset in _members(self.train)]
        found += [("--valid-data-path", dataset) for dataset in _members(self.valid)]
        return found

    @property
    def document_start(self) -> dict[str, Any] | None:
        """Token that begins every training document, as `{"token": id}`; None for mock packs.

        Checkpoints store this value.
        """
        for dataset in _members(self.train):
            return {"token": dataset.manifest.tokenizer.begins_with}
        return None

    @property
    def document_end(self) -> dict[str, int | None] | None:
        """Token that ends every training document, as `{"token": id}`; None for mock packs.

        Checkpoints store this value.
        """
        for dataset in _members(self.train):
            return {"token": dataset.manifest.ends_with}
        return None

    @property
    def chat_template(self) -> dict[str, Any] | None:
        """Chat template of the training data, with counts summed over the datasets.

        None if no dataset used a template. Checkpoints store this value.
        """
        found = dict[str, Any]()
        for one in _members(self.train):
            for name, value in (one.manifest.chat_template or {}).items():
                if isinstance(value, int):
                    value += found.get(name, 0)
                found[name] = value
        return found if found.get("default") else None

    @property
    def answer_forms(self) -> dict[str, int] | None:
        """Number of answers by form, summed over the training datasets' manifests."""
        found = dict[str, int]()
        for one in _members(self.train):
            for form, count in (one.manifest.answer_forms or {}).items():
                found[form] = found.get(form, 0) + count
        return found or None


def _members(source: PackSource | None) -> tuple[PackedDataset, ...]:
    """Return the datasets on disk in a source; an empty tuple for mock packs."""
    if isinstance(source, PackBlend):
        return source.datasets
    return (source,) if isinstance(source, PackedDataset) else ()


def open_sources(config: RunConfig) -> tuple[RunConfig, Sources]:
    """Open the packs; return the config with its vocabulary size resolved, and the packs.

    Raise ValueError with all reasons if the packs do not fit the config.
    """
    if config.data.data_path is None:  # a trial run without data
        return _mock_sources(config)
    # The first dataset determines the vocabulary; all others must have the same.
    train, valid = _open_datasets(config.data)
    first = _members(train)[0].manifest
    if config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": first.tokenizer.vocab_size})
    # Collect all reasons before raising, so that the user can fix them together.
    reasons = []
    for name, source in (("--data-path", train), ("--valid-data-path", valid)):
        for dataset in _members(source):
            reasons += _misfits(name, str(dataset.directory), dataset, config)
    if valid is not None:
        names = []
        manifests = []
        for flag, source in (("--data-path", train), ("--valid-data-path", valid)):
            for dataset in _members(source):
                names.append(flag)
                manifests.append(dataset.manifest)
        for text in contradictions(names, manifests):
            # `_misfits` has already compared these two with the config
            if "--seq-length" not in text and "--pad-multiple" not in text:
                reasons.append(text)
    # text datasets may be mixed with image datasets; all image datasets have the same rules
    rules = [one.manifest.image_rules for one in (*_members(train), *_members(valid))]
    values = next((one for one in rules if one is not None), None)
    if values is not None and importlib.util.find_spec("PIL") is None:
        reasons.append(
            "--data-path contains images, which need pillow: run pip install -e '.[data]'"
        )
    if reasons:
        raise ValueError("\n".join(reasons))
    decoder = RulesDecoder(rules_from_dict(values)) if values is not None else None
    return config, Sources(train, valid, train.fingerprint, first.tokenizer.sha256, decoder, values)


def _mock_sources(config: RunConfig) -> tuple[RunConfig, Sources]:
    """Return the config with its vocabulary size resolved, and mock packs."""
    if not config.model.vocab_size:
        config = with_values(config, {"vocab_size": 256})
    # the fingerprint must differ between different packs
    vocab_size = config.model.vocab_size
    seq_length = config.data.seq_length
    fingerprint = f"mock/{vocab_size}/{seq_length}"
    images = mock_images(config)
    if images is None:
        packs = MockRules(vocab_size, seq_length, "packed")
        return config, Sources(packs, None, fingerprint)
    packs = MockRules(vocab_size, seq_length, "image", images=images)
    return config, Sources(packs, None, f"{fingerprint}/images", decoder=MockDecoder(images))


def whole_run(training: TrainingConfig, packs: int, step: int, consumed: int) -> tuple[int, int]:
    """Return the last step and the end of the samples in a run on `packs` packs.

    The run has already consumed `consumed` samples in `step` steps.
    """
    if training.train_epochs is None:
        return training.train_iters, ENDLESS
    end = round(training.train_epochs * packs)  # 1.1 x 10 is not exactly 11 in floating point
    batch = training.global_batch_size
    steps_left = -(-(end - consumed) // batch)  # rounded up
    return step + max(0, steps_left), end


_FEW_UPDATES = 20
"""With fewer updates, a run hardly changes a model, whatever the data."""


def with_stored_length(
    config: RunConfig, given: Collection[str], flags: Collection[str], rows_at_once: int = 1
) -> tuple[RunConfig, str]:
    """Return the config with pack length and number of steps from --data-path, and notes.

    The pack length comes from the dataset unless it is among the fields in `given`. --train-epochs
    is converted to steps. A run with --load-hf uses the length and batch size from `finetuning`
    unless flags set them; `rows_at_once` is the number of rows that its ranks compute at once. The
    notes also warn about a new run that is very short or mostly warm-up. Without a readable
    dataset, the config does not change, and the error is reported later.

    Raise ValueError if the run has 0 steps, or if --train-epochs and --train-iters are both set on
    the command line (`flags`) or both in files.
    """
    try:  # an unreadable dataset is reported by `open_sources`
        manifests = [DatasetManifest.read(one) for one in named_folders(config.data.data_path)]
    except ValueError:
        manifests = []
    training = config.training
    found = dict[str, Value]()  # values that the dataset determines
    if (
        manifests
        and "seq_length" not in given
        and manifests[0].seq_length != config.data.seq_length
    ):
        found["seq_length"] = manifests[0].seq_length
    # The command line may set one of them, and so may the files; the command line wins.
    epochs = training.train_epochs
    lengths = {"train_epochs", "train_iters"}
    if epochs is not None and lengths <= {*given}:
        if len(lengths & {*flags}) != 1:
            both = f"--train-epochs {epochs:g} and --train-iters {training.train_iters}"
            raise ValueError(f"{both} both set the length of the run: use only one of them")
        if "train_iters" in flags:  # the command line overrides the epochs in a file
            epochs = None
            config = with_values(config, {"train_epochs": None})
    # A run from a model folder has defaults that fit its data, and resumes with the same ones.
    is_finetuning = "load_hf" in given or config.checkpoint.load_hf is not None
    if manifests and is_finetuning:
        if not lengths & {*given}:
            epochs = finetuning.EPOCHS
            found["train_epochs"] = epochs
        if "global_batch_size" not in given:
            tokens = sum(one.num_tokens for one in manifests)
            row_tokens = with_values(config, found).data.seq_length
            batch = finetuning.default_batch(tokens, row_tokens, rows_at_once)
            found["global_batch_size"] = batch
        training = with_values(config, found).training
    if manifests and epochs is not None:
        packs = sum(one.num_packs for one in manifests)
        steps, _ = whole_run(training, packs, *progress(config))
        found["train_iters"] = steps
        if steps == 0:
            asked = f"--train-epochs {epochs:g}"
            raise ValueError(f"{asked} of {packs} packs rounds to 0 samples: use a larger value")
    words = []
    for name, value in found.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        words.append(f"{flag(name)} {shown}")
    notes = [f"{', '.join(words)}, from the manifest of --data-path"] if found else []
    config = with_values(config, found)
    steps = config.training.train_iters
    warmup = config.training.warmup_updates
    # With few packs, a user may not notice that the defaults give only a handful of updates.
    is_short = steps < _FEW_UPDATES or warmup > steps / 2
    if manifests and is_short and progress(config) == (0, 0):
        batch = training.global_batch_size
        few = f"{counted(steps, 'update')} of {counted(batch, 'pack')}"
        if warmup:
            few += f", {warmup} of them to warm up"
        lower = []
        if batch > rows_at_once:
            lower.append("--global-batch-size")
        if warmup:
            lower.append("the warm-up")
        ways = [f"lower {' or '.join(lower)}"] if lower else []
        if batch == rows_at_once > 1:
            ways.append("share each row among ranks with --context-parallel-size")
        ways.append("raise --train-epochs or --train-iters")
        advice = ", or ".join(ways)
        notes.append(f"this run makes only {few}, too few to train a model: {advice}")
    return config, "\n".join(notes)


def _open_datasets(
    data: DataConfig,
) -> tuple[PackedDataset | PackBlend, PackedDataset | PackBlend | None]:
    """Open the training and validation packs; raise ValueError with the errors of both."""
    opened: list[PackedDataset | PackBlend | None] = []
    reasons: list[str] = []
    cache = DataCache()  # shared, because its size limit is meant for the whole run
    # Try to open both before raising, to report the errors of both.
    for name, path in (
        ("--data-path", data.data_path),
        ("--valid-data-path", data.valid_data_path),
    ):
        try:
            opened.append(_opened(name, path, cache) if path else None)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("\n".join(reasons))
    train, valid = opened
    assert train is not None, "the caller has checked --data-path"
    return train, valid


def _opened(flag: str, path: DataPath, cache: DataCache) -> PackedDataset | PackBlend:
    """Open the packs of one flag.

    Raise ValueError with the errors of all datasets or, if there are none, with contradictions
    between datasets.
    """
    parts = weighted_folders(flag, path)
    datasets = []
    reasons = []
    open_shards = max(1, OPEN_SHARDS // len(parts))  # datasets share the limit on open files
    for part in parts:
        try:
            datasets.append(PackedDataset(part.folder, cache, open_shards))
        except ValueError as error:
            reasons.append(f"{flag} {part.folder}: {error}")
    if len(parts) > 1:  # `_misfits` reports a single empty dataset
        for one in datasets:
            if not len(one):
                reasons.append(f"{flag} {one.directory} contains no packs")
    if reasons:
        raise ValueError("\n".join(reasons))
    if len(datasets) == 1:
        return datasets[0]
    try:
        return PackBlend(datasets, [part.weight for part in parts])
    except ValueError as error:
        lines = [f"{flag}: {line}" for line in str(error).splitlines()]
        raise ValueError("\n".join(lines)) from error


def _misfits(flag: str, path: str, dataset: PackedDataset, config: RunConfig) -> list[str]:
    """Return the reasons why a dataset does not fit the config; an empty list if it fits."""
    reasons = []
    where = f"{flag} {path}"
    manifest = dataset.manifest
    rows = config.model.embedding_rows
    if not len(dataset):
        reasons.append(f"{where} contains no packs")
    # On a GPU, a token id beyond the embedding would cause an illegal memory access.
    if manifest.tokenizer.vocab_size > rows:
        reasons.append(
            f"{where} has a vocabulary of {manifest.tokenizer.vocab_size} tokens, more than "
            f"--vocab-size {config.model.vocab_size}: omit --vocab-size to use the dataset's "
            "vocabulary size"
        )
    elif manifest.num_token_ids > rows:
        missing = manifest.num_token_ids - config.model.vocab_size
        reasons.append(
            f"{where} has image tokens up to id {manifest.num_token_ids - 1}, but the embedding "
            f"has {rows} rows: set --additional-vocab-size to at least {missing}"
        )
    if manifest.image_rules is not None:
        reasons += image_misfits(where, rules_from_dict(manifest.image_rules), config.vision)
    stored_length = manifest.seq_length
    if stored_length != config.data.seq_length:
        reasons.append(
            f"{where} was packed for rows of {stored_length} tokens, but --seq-length is "
            f"{config.data.seq_length}: set --seq-length {stored_length} or rebuild the dataset"
        )
    return reasons + _filled_otherwise(where, manifest.pad_multiple, config.parallel)


def _filled_otherwise(where: str, filled: int, parallel: ParallelConfig) -> list[str]:
    """Return why --cp-layout cannot use documents padded to multiples of `filled` tokens.

    The list is empty if it can.
    """
    cp = parallel.context_parallel_size
    # documents stored without padding fit any layout, which pads them itself
    if parallel.chooses_layout or cp == 1 or filled == 1:
        return []
    layout = LAYOUTS[parallel.cp_layout]
    multiple = layout.slices * cp
    if not layout.fills_documents or filled % multiple == 0:
        return []
    return [
        f"{where} has documents padded to multiples of {filled}, but --cp-layout {layout.name} at "
        f"--context-parallel-size {cp} needs multiples of {multiple}: rebuild the dataset with "
        f"--pad-multiple {multiple} (or with 1, so that the layout pads), or use --cp-layout "
        f"{BALANCED.name}"
    ]


def image_misfits(where: str, rules: VisionRules, vision: VisionConfig) -> list[str]:
    """Return the reasons why images processed with `rules` do not fit a model.

    `where` is the flag and path of the images' dataset, for the messages.
    """
    if vision.vision_num_layers == 0:
        return [
            f"{where} contains images, but the model has no vision tower: set --vision-num-layers"
        ]
    if rules.family != vision.vision_family:
        return [
            f"{where} was built with --vision-family {rules.family}, but the model has a "
            f"{vision.vision_family} tower"
        ]
    # the family is the same, but the patch sizes may differ
    misfit = rules.misfit(vision)
    return [] if misfit is None else [f"{where} {misfit} or rebuild the dataset"]


def loader_options(config: RunConfig, packs: int) -> LoaderOptions:
    """Return the loader's options for rows of `packs` packs. They are equal on all ranks."""
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
    """Return the first rows in a run's data order, with `--micro-batch-size` packs each.

    The rows are the same on every rank of every grid, even when the run is resumed.
    """
    # read one step of `_FIRST_ROWS` microbatches as a single replica
    packs = config.training.micro_batch_size
    options = dataclasses.replace(
        loader_options(config, packs), global_batch_size=_FIRST_ROWS * packs
    )
    return step_batches(sources.train, options, DataRank(), consumed=0)
