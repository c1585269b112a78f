"""Bytes that a rank sends in a step, by the axis that it sends them over.

Every formula is here once: the dry run adds the bytes up, and megacp.plan divides them by the rates
of links. As the counters of `megacp.distributed` do, it counts the payload that leaves a rank: of n
ranks a gather sends n - 1 times the own part, a reduction twice (n - 1) / n of the whole.

Not counted, because they are small: numbers per token of the loss, norms of gradients, and counts
of rows for experts. `uncounted` names larger messages that no formula here covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.dry_run.memory import chunk_parts, shared_parts
from megacp.dry_run.packs import PackSample, one_row
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.attention import transport_of
from megacp.engine.layers.moe import exchange_bytes, planned_load
from megacp.engine.layers.stack import layers_of
from megacp.engine.layers.table import residual_bytes
from megacp.engine.models.costs import stage_layers, vocabulary_rows

KEPT_GATHERED = ("embedding", "head", "chunk")
"""Parts that full sharding keeps whole from a forward to its backward. Blocks are gathered again.
"""
KEY_MESSAGES = 3
"""How many times a layer sends `key_bytes`: in forward, again in backward, and their gradients."""


@dataclass(frozen=True)
class StageMessages:
    """Bytes that a rank of a pipeline stage sends in a step, by axis."""

    tp: float
    """Gathers and sums of the residual stream between tensor-parallel ranks."""
    cp: float
    """Heads, keys and values of attention."""
    ep: float
    """Rows of tokens to their experts and back, under the load that is planned for."""
    dp: float
    """Gathers of parameters and sums of gradients, over dp x cp or the ranks with the same experts.
    """
    pp: float
    """Hidden states, their gradients, and the gradient of a table that both end stages have."""

    @property
    def total(self) -> float:
        """Bytes over all axes."""
        return sum(vars(self).values())


def stream_bytes(config: RunConfig) -> float:
    """Return the bytes of one gather or scatter of a microbatch's residual stream over tp.

    An all-reduce sends twice as many.
    """
    p, tp = config.parallel, config.parallel.tensor_model_parallel_size
    tokens = config.training.micro_batch_size * config.data.seq_length // p.context_parallel_size
    return tokens * config.model.hidden_size * config.training.element_bytes * (tp - 1) / tp


def stream_messages(config: RunConfig, number: int) -> int:
    """Return how many times a block sends `stream_bytes` in forward and backward of one microbatch.

    Its input is gathered before attention and before the MLP, and their outputs are scattered. In
    backward gradients go the other way, and inputs are gathered again for the gradients of weights.
    Experts are not split over tp: only an MLP that all tokens pass next to them is.
    """
    model, t = config.model, config.training
    is_dense = not layers_of(model)[number].is_routed
    has_mlp = is_dense or bool(model.moe_shared_expert_intermediate_size)
    parts = 2 if has_mlp else 1
    shards_stream = config.parallel.sequence_parallel
    tiled = has_mlp and t.mlp_chunk_tokens > 0
    count = 2 * parts + 2 * parts
    if shards_stream and "text" not in config.frozen_parts:
        count += parts
    if t.recompute_mode.repeats_block:
        count += 2 * parts
    computed_whole = t.recompute_mode.repeats_block and is_dense
    if tiled and computed_whole:
        # the sum of the tiles is not computed again, which is a scatter or an all-reduce
        count -= 1 if shards_stream else 2
    elif tiled and shards_stream:  # tiles gather their input once more
        count += 1
    return count


def end_messages(config: RunConfig, stage: int) -> int:
    """Return how many times embedding and head of a stage send `stream_bytes` for a microbatch."""
    count = 0
    trains = "text" not in config.frozen_parts
    if stage == 0:
        # a scatter, and the gather of its backward; or an all-reduce, whose backward sends nothing
        count += 2 if trains or not config.parallel.sequence_parallel else 1
    if stage == config.parallel.pipeline_model_parallel_size - 1:
        count += 2
    return count


def swap_bytes(config: RunConfig) -> float:
    """Return the bytes of exchanging heads for tokens, and back, in a layer's forward."""
    heads, key_values, queries = _context(config)
    return (key_values + 2 * queries) * (heads - 1) / heads


def key_bytes(config: RunConfig, sample: PackSample) -> float:
    """Return the bytes of K/V that travel in a layer's forward.

    If a transport sends only needed rows, this is an upper bound: the rank that needs most counts.
    """
    p = config.parallel
    transport = transport_of(config)
    _, key_values, _ = _context(config)
    ranks = transport.key_ranks(
        p.context_parallel_size, p.hierarchical_context_parallel_sizes or ()
    )
    blocks: float = ranks - 1
    if ranks > 1 and transport.keys == "needed":
        blocks = sample.shared(config)[1]
    return key_values * blocks


def _context(config: RunConfig) -> tuple[int, int, int]:
    """Return the ranks that exchange heads, and the bytes of a rank's K/V and queries in a
    layer.
    """
    model, p = config.model, config.parallel
    tp, cp, size = (
        p.tensor_model_parallel_size,
        p.context_parallel_size,
        config.training.element_bytes,
    )
    tokens = config.training.micro_batch_size * config.data.seq_length // cp
    heads = transport_of(config).head_ranks(cp, p.hierarchical_context_parallel_sizes or ())
    groups = math.lcm(model.query_groups // tp, heads)  # K/V are copied until heads divide
    key_values = 2 * tokens * groups * model.head_dim * size
    queries = tokens * model.num_attention_heads * model.head_dim // tp * size
    return heads, key_values, queries


def expert_bytes(config: RunConfig, number: int) -> float:
    """Return the bytes of rows to experts and back, in a block's forward and backward."""
    if (
        not layers_of(config.model)[number].is_routed
        or config.parallel.expert_model_parallel_size == 1
    ):
        return 0.0
    return exchange_bytes(config) * planned_load(config)


def boundary_bytes(config: RunConfig) -> int:
    """Return the bytes of the hidden states of one microbatch between two pipeline stages."""
    return residual_bytes(config)


@dataclass(frozen=True)
class SharedMessages:
    """One gather of the parameters that some ranks share, and one sum of their gradients."""

    gather: float
    """Bytes. Frozen parameters are gathered only under full sharding."""
    scatter: float
    """Bytes."""
    moved: int
    """Parameters that are gathered."""
    ranks: int
    stride: int
    """How far apart the ranks are."""


def shared_messages(
    config: RunConfig, chunks: Sequence[range], world_size: int
) -> list[SharedMessages]:
    """Return the messages of a stage's parameters: first of all but experts, then of experts.

    Ranks of dp x cp share the former, ranks with the same experts the latter.
    """
    t = config.training
    found = []
    for parameters, trained, ranks, stride in shared_parts(config, chunks, world_size):
        moved = parameters if config.parallel.sharding.parameters else trained
        away = (ranks - 1) / ranks
        gather = moved * t.element_bytes * away
        scatter = trained * t.accumulation_bytes * away
        found.append(SharedMessages(gather, scatter, moved, ranks, stride))
    return found


def instance_bytes(config: RunConfig, chunks: Sequence[range], world_size: int) -> float:
    """Return the bytes of the sum of a stage's gradients over copies of the optimizer, in a
    step.
    """
    instances = config.parallel.num_distributed_optimizer_instances
    share = sum(count / ranks for _, count, ranks, _ in shared_parts(config, chunks, world_size))
    return 2 * share * config.training.accumulation_bytes * (instances - 1) / instances


def gathers_a_step(config: RunConfig, world_size: int, chunks: int) -> float:
    """Return how many times a stage of `chunks` chunks gathers its parameters in a step.

    Under full sharding a block is gathered for each forward and each backward. A pipeline keeps a
    chunk whole while it works on it: the only chunk all of a step, several chunks for the
    microbatches that they do in turn (an estimate).
    """
    p = config.parallel
    if not p.sharding.parameters:
        return 1.0
    microbatches = config.num_microbatches(world_size)
    if p.pipeline_model_parallel_size == 1:
        return 2.0 * microbatches
    turns = 1 - 1 / chunks
    return 1.0 + 2 * microbatches * turns / p.pipeline_model_parallel_size


def uncounted(config: RunConfig) -> list[str]:
    """Return what a configuration sends in addition to `step_messages`, in words."""
    p = config.parallel
    found = []
    has_states = any(layer.has_state for layer in layers_of(config.model))
    if has_states and p.context_parallel_size > 1:
        found.append("states of linear attention (cp)")
    if config.vision.vision_num_layers > 0:
        found.append("features of images")
    if config.model.lora_rank > 0 and p.tensor_model_parallel_size > 1:
        found.append("products of low-rank pairs (tp)")
    return found


def step_messages(config: RunConfig, world_size: int, sample: PackSample) -> list[StageMessages]:
    """Return the bytes that a rank of each stage sends in a step of a checked configuration."""
    config, sample = one_row(config, world_size, sample)
    stages = enumerate(stage_layers(config, world_size))
    return [_stage(config, world_size, sample, stage, chunks) for stage, chunks in stages]


def _stage(
    config: RunConfig, world_size: int, sample: PackSample, stage: int, chunks: Sequence[range]
) -> StageMessages:
    microbatches = config.num_microbatches(world_size)
    layers = [layer for layers in chunks for layer in layers]
    full = config.training.recompute_mode.repeats_block
    heads = cp = 0.0
    if config.parallel.context_parallel_size > 1:
        # in forward, in backward, and once more if a block is computed again; K/V are kept then
        heads = (3 if full else 2) * swap_bytes(config)
        cp = heads + KEY_MESSAGES * key_bytes(config, sample)
    attending = [layer for layer in layers if not layers_of(config.model)[layer].has_state]
    streams = sum(stream_messages(config, layer) for layer in layers) + end_messages(config, stage)
    return StageMessages(
        tp=microbatches * streams * stream_bytes(config),
        cp=microbatches * len(attending) * cp,
        ep=microbatches * sum(expert_bytes(config, layer) for layer in layers),
        dp=_data_parallel(config, world_size, chunks),
        pp=_pipeline(config, world_size, stage, chunks),
    )


def _data_parallel(config: RunConfig, world_size: int, chunks: Sequence[range]) -> float:
    p, t = config.parallel, config.training
    microbatches = config.num_microbatches(world_size)
    gathers = gathers_a_step(config, world_size, len(chunks))
    sums = microbatches if p.sharding.gradients else 1
    shared = shared_messages(config, chunks, world_size)
    found = sum(gathers * one.gather + sums * one.scatter for one in shared)
    if p.sharding.parameters and p.pipeline_model_parallel_size == 1:
        parts = [part for layers in chunks for part in chunk_parts(config, layers)]
        kept = sum(part.parameters for part in parts if part.role in KEPT_GATHERED)
        ranks = shared[0].ranks
        found -= microbatches * kept * t.element_bytes * (ranks - 1) / ranks
    return found + instance_bytes(config, chunks, world_size)


def _pipeline(config: RunConfig, world_size: int, stage: int, chunks: Sequence[range]) -> float:
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return 0.0
    is_first = stage == 0
    is_last = stage == stages - 1
    # each chunk sends hidden states on and gradients back, except at the ends of the model
    sent = 2 * len(chunks) - is_first - is_last
    found = config.num_microbatches(world_size) * sent * boundary_bytes(config)
    is_tied = (
        not config.model.untie_embeddings_and_output_weights and "text" not in config.frozen_parts
    )
    if is_tied and (is_first or is_last):
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        table = vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size
        (_, _, ranks, _), *_ = shared_parts(config, chunks, world_size)
        found += (
            table * config.training.accumulation_bytes // ranks
        )  # an all-reduce over two stages
    return found
