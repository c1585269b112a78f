"""Measure the memory of model parts on one rank, and cache the results.

A measurement runs the part on tensors without data (megacp/dry_run/parts.py). It needs torch and
takes a few hundredths of a second. The user's cache stores the result under a hash of its inputs:
the settings that the part is built from, and the source code. A search over a thousand layouts
needs about a hundred measurements.
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

# All settings outside the model configuration that determine a part and its memory.
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


@functools.lru_cache(2**14)
def _measured_as(config: RunConfig, defers: bool) -> RunConfig:
    """Return the default configuration, changed only in settings that a part depends on."""
    given = flatten(config)
    values = {name: given[name] for name in _SETTINGS}
    # strategies that do not shard parameters differ only outside the parts
    if not config.parallel.sharding.parameters:
        del values["data_parallel_sharding_strategy"]
    if config.parallel.context_parallel_size > 1:
        transport = transport_of(config)
        values["cp_comm_type"] = transport.name
        values["cp_layout"] = config.parallel.cp_layout
        # `auto` is measured with the best layout of the transport
        if config.parallel.chooses_layout:
            values["cp_layout"] = transport.best_layout or transport.layouts[0]
    # only a schedule that defers weight gradients changes what a block saves
    if defers:
        values["pipeline_schedule"] = config.parallel.pipeline_schedule
    return with_values(RunConfig(model=config.model, vision=config.vision), values)


def as_one_rank(config: RunConfig) -> RunConfig:
    """Return the configuration without context parallelism, with rows of one cp rank's tokens."""
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
    """Return the default configuration, changed only in settings that the head depends on.

    Settings of attention and blocks have their defaults.
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
    """Return the memory of a decoder block.

    If `defers`, the schedule defers the block's weight gradients (zero bubble).
    """
    return _found("block", _measured_as(config, defers), (layer,))


def head_memory(config: RunConfig) -> PartMemory:
    """Return the memory of the final norm, the output head and the loss.

    The result is zero if the vocabulary size is unknown.
    """
    if config.model.vocab_size == 0:
        return NOTHING
    return _found("head", _head_measured_as(config), ())


def vision_memory(config: RunConfig, crops: int, pooled: int) -> PartMemory:
    """Return the memory of the vision tower and connector for some crops and pooled tokens."""
    if crops == 0 or pooled == 0:
        return NOTHING
    return _found("vision", _vision_measured_as(config), (crops, pooled))


@functools.lru_cache(2**14)
def _vision_measured_as(config: RunConfig) -> RunConfig:
    """Return the default configuration, changed only in settings that vision memory depends on.

    Each rank encodes separate images, so the length of a row does not matter.
    """
    values: dict[str, Value] = {
        "seq_length": RunConfig().data.seq_length,
        "expert_model_parallel_size": 1,
    }
    return _measured_as(with_values(as_one_rank(config), values), False)


@functools.cache
def _found(part: str, config: RunConfig, sizes: tuple[int, ...]) -> PartMemory:
    inputs = json.dumps([part, sizes, flatten(config)], sort_keys=True, default=str)
    key = _hash(inputs.encode())
    known = _remembered()
    if key not in known:
        # import torch only if a measurement is missing
        from megacp.dry_run import parts

        known[key] = getattr(parts, part)(config, *sizes)
        _remember(key, known[key])
    return known[key]


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


@functools.cache
def _file() -> Path:
    """Return the cache file for this source code and version of torch."""
    ran = f"{files.source_digest()} {importlib.metadata.version('torch')}"
    return cache_folder("measured") / f"{_hash(ran.encode())}.jsonl"


@functools.cache
def _remembered() -> dict[str, PartMemory]:
    """Return the measurements in the cache file.

    Lines that are damaged or truncated are skipped, and their parts are measured again.
    """
    found = {}
    try:
        lines = _file().read_bytes().splitlines()
    except OSError:
        lines = []
    for line in lines:
        # a checksum comes first
        check, _, text = line.partition(b" ")
        if check != _check(text):
            continue
        key, *sizes = json.loads(text)
        found[key] = PartMemory(*sizes)
    return found


def _check(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()


def _remember(key: str, memory: PartMemory) -> None:
    """Append a measurement to the cache file; errors such as a full disk are ignored.

    A single write appends the line, because several processes may append at the same time.
    """
    text = json.dumps([key, *memory]).encode()
    try:
        # concurrent processes append to the same file
        handle = os.open(_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return
    try:
        os.write(handle, _check(text) + b" " + text + b"\n")
    except OSError:
        return
    finally:
        os.close(handle)
