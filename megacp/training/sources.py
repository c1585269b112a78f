"""The packs of a run: opens the datasets, takes from them what the config leaves open, refuses what does not fit.

Key property: all of it happens before any process group exists, from manifests alone. Rejected: finding out in the
first step that ids exceed the vocabulary.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megacp.batch import PackedBatch
from megacp.config.data import DataConfig
from megacp.config.run import RunConfig, with_values
from megacp.config.vision import VisionConfig
from megacp.data.images import Decoder
from megacp.data.loader import DataRank, LoaderOptions, PackSource, step_batches
from megacp.data.media.decoding import RulesDecoder
from megacp.data.media.geometry import ImageRules
from megacp.data.packed.data_cache import DataCache
from megacp.data.packed.manifest import DatasetManifest
from megacp.data.packed.reader import PackedDataset
from megacp.data.synthetic.images import MockDecoder
from megacp.data.synthetic.mock import MockDataset
from megacp.training.images import mock_images


@dataclass(frozen=True)
class Sources:
    """Training and validation packs, and by what they are told from others."""

    train: PackSource
    valid: PackSource | None
    fingerprint: str
    """Of the training data as this machine holds it: equal on all ranks of a run."""
    data_fingerprint: str
    """Of the training data as it was built: a checkpoint keeps it, and a resumed run must have the same."""
    tokenizer_sha256: str = ""
    """Of the training data; empty for mock packs."""
    decoder: Decoder | None = None
    """Turns the images of both datasets into patches; None when they are text."""
    image_rules: dict[str, Any] | None = None
    """By which images became tokens, as in the manifests; None for text and mock packs."""

    @property
    def datasets(self) -> dict[str, PackedDataset]:
        """Those on disk, by flag."""
        both = {"--data-path": self.train, "--valid-data-path": self.valid}
        return {name: source for name, source in both.items() if isinstance(source, PackedDataset)}

    @property
    def document_start(self) -> dict[str, Any] | None:
        """The token that begins every training document, as a checkpoint keeps it; None for mock packs."""
        if not isinstance(self.train, PackedDataset):
            return None
        return {"token": self.train.manifest.tokenizer.begins_with}

    @property
    def chat_template(self) -> dict[str, Any] | None:
        """The templates that wrote the messages of the training data, as a checkpoint keeps them."""
        return self.train.manifest.chat_template if isinstance(self.train, PackedDataset) else None

    @property
    def notes(self) -> list[str]:
        """What a run should know of its data before it starts, one line each."""
        return [
            f"{name} {dataset.directory} was {dataset.manifest.unchecked}"
            for name, dataset in self.datasets.items()
            if dataset.manifest.unchecked
        ]


def open_sources(config: RunConfig) -> tuple[RunConfig, Sources]:
    """The config with its vocabulary resolved, and the packs. Raises ValueError with all reasons at once."""
    if config.data.data_path is None:
        config = config if config.model.vocab_size else with_values(config, {"vocab_size": 256})
        images = mock_images(config)
        mock = MockDataset(config.model.vocab_size, config.data.seq_length, images=images)
        known, mocked = _mock_fingerprint(config), MockDecoder(images) if images is not None else None
        return config, Sources(mock, None, known, known, decoder=mocked)
    train, valid = _open_datasets(config.data)
    if config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": train.manifest.tokenizer.vocab_size})
    reasons = _misfits("--data-path", str(config.data.data_path), train, config)
    if valid is not None:
        reasons += _misfits("--valid-data-path", str(config.data.valid_data_path), valid, config)
        if valid.manifest.tokenizer.sha256 != train.manifest.tokenizer.sha256:
            reasons.append("--valid-data-path was built with another tokenizer than --data-path")
        elif valid.manifest.tokenizer.begins_with != train.manifest.tokenizer.begins_with:
            first = [dataset.manifest.tokenizer.begins_with for dataset in (train, valid)]
            reasons.append(
                f"documents of --data-path begin with token {first[0]}, those of --valid-data-path with {first[1]}: "
                "build both with the same --prepend-bos"
            )
        if valid.manifest.chat_template != train.manifest.chat_template:
            reasons.append("--valid-data-path was built with another --chat-template than --data-path")
        if None not in (rules := (train.manifest.image_rules, valid.manifest.image_rules)) and rules[0] != rules[1]:
            reasons.append("--valid-data-path was built with other image rules than --data-path")
    if any(dataset is not None and dataset.manifest.image_rules is not None for dataset in (train, valid)):
        reasons += _missing_packages()
    if reasons:
        raise ValueError("\n".join(reasons))
    values = train.manifest.image_rules or (valid.manifest.image_rules if valid is not None else None)
    decoder = RulesDecoder(ImageRules.from_dict(values)) if values is not None else None
    built, tokenizer = train.manifest.fingerprint, train.manifest.tokenizer.sha256
    return config, Sources(train, valid, train.fingerprint, built, tokenizer, decoder, values)


def with_stored_length(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, str]:
    """The config with the row length of --data-path where no flag in `given` says it, and a note; both as they were
    where there is no such dataset, which is told later.
    """
    if "seq_length" in given or config.data.data_path is None:
        return config, ""
    try:
        length = DatasetManifest.read(config.data.data_path).seq_length
    except ValueError:
        return config, ""
    if length == config.data.seq_length:
        return config, ""
    return with_values(config, {"seq_length": length}), f"--seq-length {length}, as --data-path was packed"


def _open_datasets(data: DataConfig) -> tuple[PackedDataset, PackedDataset | None]:
    """The training and the validation packs. ValueError tells what is wrong with both."""
    opened: list[PackedDataset | None] = []
    reasons = []
    cache = DataCache(data.data_cache_dir, data.data_cache_gib, data.data_block_mib)
    for name, path in (("--data-path", data.data_path), ("--valid-data-path", data.valid_data_path)):
        try:
            opened.append(PackedDataset(path, cache) if path else None)
        except ValueError as error:
            reasons.append(f"{name} {path}: {error}")
    if reasons:
        raise ValueError("\n".join(reasons))
    train, valid = opened
    assert train is not None, "asked for with a --data-path"
    return train, valid


def _missing_packages() -> list[str]:
    """Why images cannot be decoded here; empty when they can."""
    if importlib.util.find_spec("PIL") is not None:
        return []
    return ["the dataset holds images, which need the package pillow: pip install 'megacp[data]'"]


def _mock_fingerprint(config: RunConfig) -> str:
    text = f"mock/{config.model.vocab_size}/{config.data.seq_length}"
    return text + "/images" if config.vision.vision_num_layers else text


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
            f"{flag} {path} has image tokens up to id {manifest.num_token_ids - 1}, the embedding has "
            f"{config.model.embedding_rows} rows: give --additional-vocab-size of at least {missing}"
        )
    if manifest.image_rules is not None:
        reasons += image_misfits(f"{flag} {path}", ImageRules.from_dict(manifest.image_rules), config.vision)
    if manifest.seq_length != config.data.seq_length:
        reasons.append(
            f"{flag} {path} was packed for rows of {manifest.seq_length} tokens, "
            f"--seq-length is {config.data.seq_length}; set --seq-length {manifest.seq_length} or build it again"
        )
    cp, filled = config.parallel.context_parallel_size, manifest.pad_multiple
    if config.parallel.cp_layout == "zigzag_document" and cp > 1 and filled > 1 and filled % (2 * cp):
        reasons.append(
            f"{flag} {path} has documents padded to multiples of {filled}, --cp-layout zigzag_document at "
            f"--context-parallel-size {cp} needs multiples of {2 * cp}: build it with --pad-multiple {2 * cp} (or 1, "
            f"then the layout fills up), or choose --cp-layout balanced"
        )
    return reasons


def image_misfits(where: str, rules: ImageRules, vision: VisionConfig) -> list[str]:
    """Why images made by `rules`, found at `where`, do not fit a model; empty when they do."""
    if vision.vision_num_layers == 0:
        return [f"{where} holds images, but the model has no vision tower: set --vision-num-layers"]
    sizes = (rules.image_size, rules.patch_size)
    expected = (vision.vision_image_size, vision.vision_patch_size)
    if sizes == expected:
        return []
    return [
        f"{where} has crops of {sizes[0]} pixels with patches of {sizes[1]}, the model's have {expected[0]} and "
        f"{expected[1]}: set --vision-image-size {sizes[0]} --vision-patch-size {sizes[1]} or build the dataset again"
    ]


def loader_options(config: RunConfig, packs: int) -> LoaderOptions:
    """How the loader reads for a config in rows of `packs` packs; equal on all ranks."""
    return LoaderOptions(
        micro_batch_size=packs,
        global_batch_size=config.training.global_batch_size,
        seed=config.training.seed,
        attention_mask=config.data.attention_mask,
        image_attention=config.data.image_attention,
        prefetch=max(2, config.data.num_workers) if config.data.num_workers else 0,
        num_threads=max(1, config.data.num_workers),
    )


_FIRST_ROWS = 4


def first_rows(config: RunConfig, sources: Sources) -> list[PackedBatch]:
    """The first rows of a run's order from its very beginning, of `--micro-batch-size` packs each.

    The same on every rank of every grid, also when a run is resumed.
    """
    packs = config.training.micro_batch_size
    options = dataclasses.replace(loader_options(config, packs), global_batch_size=_FIRST_ROWS * packs)
    return step_batches(sources.train, options, DataRank(), consumed=0)
