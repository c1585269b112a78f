"""What the parts of a model hold on one rank, measured once and then remembered.

A measurement runs the part on tensors without numbers (megacp/dry_run/parts.py), which takes some
hundredths of a second and torch. Its results are kept in the user's cache under a hash of all it
depends on: the settings that the part is built from and the source code that ran. A search over a
thousand layouts needs about a hundred of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import zlib
from pathlib import Path

from megacp.dry_run.part_memory import NOTHING, PartMemory
from megacp.engine.config.run import RunConfig, Value, flatten, with_values
from megacp.engine.layers.attention import transport_of
from megacp.engine.layers.table import tokens_per_rank
from megacp.storage import files
from megacp.storage.cache import cache_folder

_SETTINGS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "moe_planned_imbalance",
    "sequence_parallel",
    "hierarchical_context_parallel_sizes",
    "data_parallel_sharding_strategy",
    "micro_batch_size",
    "dtype",
    "recompute_granularity",
    "mlp_chunk_tokens",
    "attention_kernel",
    "cross_entropy_chunk_tokens",
    "gradient_accumulation_fusion",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "seq_length",
)
"""Settings besides those of the model that the memory of a part depends on. A part is built from
nothing else.
"""


@functools.lru_cache(2**14)
def _measured_as(config: RunConfig, defers: bool) -> RunConfig:
    """Return a configuration that differs from the default only in what a part depends on."""
    given = flatten(config)
    values = {name: given[name] for name in _SETTINGS}
    if not config.parallel.sharding.parameters:
        del values["data_parallel_sharding_strategy"]
    if config.parallel.context_parallel_size > 1:
        transport = transport_of(config)
        values["cp_comm_type"] = transport.name
        values["cp_layout"] = config.parallel.cp_layout
        if config.parallel.chooses_layout:
            values["cp_layout"] = transport.best_layout or transport.layouts[0]
    if defers:
        values["pipeline_schedule"] = config.parallel.pipeline_schedule
    return with_values(RunConfig(model=config.model, vision=config.vision), values)


def as_one_rank(config: RunConfig) -> RunConfig:
    """Return the configuration of one rank that has the tokens of a context-parallel rank as a row
    of its own.
    """
    values: dict[str, Value] = {
        "context_parallel_size": 1,
        "hierarchical_context_parallel_sizes": None,
        "dynamic_context_parallel": False,
        "micro_batch_size": 1,
        "seq_length": tokens_per_rank(config),
    }
    return with_values(config, values)


@functools.lru_cache(2**14)
def _head_measured_as(config: RunConfig) -> RunConfig:
    """Return a configuration that keeps only what the head depends on: how attention works is not
    part of it.
    """
    default = RunConfig().training
    values: dict[str, Value] = {
        "recompute_granularity": default.recompute_granularity,
        "mlp_chunk_tokens": default.mlp_chunk_tokens,
        "attention_kernel": default.attention_kernel,
        "expert_model_parallel_size": 1,
    }
    return _measured_as(with_values(as_one_rank(config), values), False)


def block_memory(config: RunConfig, layer: int, defers: bool = False) -> PartMemory:
    """Return what a block of the decoder holds; `defers`: its weight gradients wait (zero
    bubble).
    """
    return _found("block", _measured_as(config, defers), (layer,))


def head_memory(config: RunConfig) -> PartMemory:
    """Return what the final norm, the output head and the loss hold; nothing while the vocabulary
    is unknown.
    """
    if config.model.vocab_size == 0:
        return NOTHING
    return _found("head", _head_measured_as(config), ())


def vision_memory(config: RunConfig, crops: int, pooled: int) -> PartMemory:
    """Return what tower and connector hold for so many crops and pooled tokens."""
    if crops == 0 or pooled == 0:
        return NOTHING
    return _found("vision", _vision_measured_as(config), (crops, pooled))


@functools.lru_cache(2**14)
def _vision_measured_as(config: RunConfig) -> RunConfig:
    """Return a configuration that keeps only what images depend on: each rank encodes its own,
    whatever the row is.
    """
    values: dict[str, Value] = {
        "seq_length": RunConfig().data.seq_length,
        "expert_model_parallel_size": 1,
    }
    return _measured_as(with_values(as_one_rank(config), values), False)


@functools.cache
def _found(part: str, config: RunConfig, sizes: tuple[int, ...]) -> PartMemory:
    key = _hash(json.dumps([part, sizes, flatten(config)], sort_keys=True, default=str).encode())
    known = _remembered()
    if key not in known:
        # imports torch
        from megacp.dry_run import parts

        known[key] = getattr(parts, part)(config, *sizes)
        _remember(key, known[key])
    return known[key]


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


@functools.cache
def _file() -> Path:
    """Return the file of the measurements that this source code has made."""
    ran = f"{files.source_digest()} {importlib.metadata.version('torch')}"
    return cache_folder("measured") / f"{_hash(ran.encode())}.jsonl"


@functools.cache
def _remembered() -> dict[str, PartMemory]:
    """Return the measurements of the file. A line that was damaged or cut off is left out, and
    measured again.
    """
    found = {}
    try:
        lines = _file().read_bytes().splitlines()
    except OSError:
        lines = []
    for line in lines:
        check, _, text = line.partition(b" ")
        if check != _check(text):
            continue
        key, *sizes = json.loads(text)
        found[key] = PartMemory(*sizes)
    return found


def _check(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()


def _remember(key: str, memory: PartMemory) -> None:
    """Add a line to the file, in one write, so that processes can add theirs at once; a full disk
    loses it.
    """
    text = json.dumps([key, *memory]).encode()
    try:
        handle = os.open(_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return
    try:
        os.write(handle, _check(text) + b" " + text + b"\n")
    except OSError:
        return
    finally:
        os.close(handle)
