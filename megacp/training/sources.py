"""The packs of a run: opens the datasets, takes from them what the config leaves open, refuses what does not fit.

Key property: done before any process group exists, from manifests alone. Rejected: finding out in the first step that
ids exceed the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacp.config.run import RunConfig, with_values
from megacp.data.loader import LoaderOptions, PackSource
from megacp.data.mock import MockDataset
from megacp.data.store import PackedDataset


@dataclass(frozen=True)
class Sources:
    """Training and validation packs, and a fingerprint that changes with the training data."""

    train: PackSource
    valid: PackSource | None
    fingerprint: str
    tokenizer_sha256: str = ""
    """Of the training data; empty for mock packs."""


def open_sources(config: RunConfig) -> tuple[RunConfig, Sources]:
    """The config with its vocabulary resolved, and the packs. Raises ValueError with all reasons at once."""
    if config.data.data_path is None:
        config = config if config.model.vocab_size else with_values(config, {"vocab_size": 256})
        mock = MockDataset(vocab_size=config.model.vocab_size, seq_length=config.data.seq_length)
        return config, Sources(mock, None, f"mock/{config.model.vocab_size}/{config.data.seq_length}")
    train = PackedDataset(config.data.data_path)
    valid = PackedDataset(config.data.valid_data_path) if config.data.valid_data_path else None
    if config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": train.manifest.tokenizer.vocab_size})
    reasons = _misfits("--data-path", config.data.data_path, train, config)
    if valid is not None:
        reasons += _misfits("--valid-data-path", str(config.data.valid_data_path), valid, config)
        if valid.manifest.tokenizer.sha256 != train.manifest.tokenizer.sha256:
            reasons.append("--valid-data-path was built with another tokenizer than --data-path")
    if reasons:
        raise ValueError("\n".join(reasons))
    return config, Sources(train, valid, train.fingerprint, train.manifest.tokenizer.sha256)


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
    if manifest.seq_length != config.data.seq_length:
        reasons.append(
            f"{flag} {path} was packed for rows of {manifest.seq_length} tokens, "
            f"--seq-length is {config.data.seq_length}; set --seq-length {manifest.seq_length} or build it again"
        )
    return reasons


def loader_options(config: RunConfig, packs: int) -> LoaderOptions:
    """How the loader reads for a config in rows of `packs` packs; equal on all ranks."""
    return LoaderOptions(
        micro_batch_size=packs,
        global_batch_size=config.training.global_batch_size,
        seed=config.training.seed,
        attention_mask=config.data.attention_mask,
        prefetch=2 if config.data.num_workers else 0,
        num_threads=max(1, config.data.num_workers),
    )
