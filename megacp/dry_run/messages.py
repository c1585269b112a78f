"""Bytes that a rank sends in a step, per axis.

Each formula is defined once: the dry run adds the bytes, and megacp.plan divides them by link
rates. Like the counters of `megacp.distributed`, the formulas count the payload that leaves a
rank. Among n ranks, a gather sends the rank's part n - 1 times, and an all-reduce sends
2 (n - 1) / n of the whole.

Small messages are not counted: per-token values of the loss, gradient norms, and row counts of
experts. `uncounted` lists larger messages without a formula.
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

# Parts that stay gathered from the forward to the backward pass under full sharding. Blocks are
# gathered again.
KEPT_GATHERED = ("embedding", "head", "chunk")
# Number of times that a layer sends `key_bytes`: in the forward pass, in the backward pass, and for
# the gradients.
KEY_MESSAGES = 3


@dataclass(frozen=True)
class StageMessages:
    """Bytes that a rank of a pipeline stage sends in a step, per axis."""

    tp: float
    """Gathers and sums of the residual stream between tensor-parallel ranks."""
    cp: float
    """Heads, keys and values of attention."""
    ep: float
    """Rows sent to experts and back, under the planned load."""
    dp: float
    """Parameter gathers and gradient reductions, across dp x cp or edp."""
    pp: float
    """Hidden states, their gradients, and the gradient of a tied table at both ends."""

    @property
    def total(self) -> float:
        """Bytes sent on all axes."""
        return sum(vars(self).values())


def stream_bytes(config: RunConfig) -> float:
    """Return the bytes sent by one gather or scatter of a microbatch's residual stream across tp.

    An all-reduce sends twice this amount.
    """
    p = config.parallel
    tp = p.tensor_model_parallel_size
    tokens = config.training.micro_batch_size * config.data.seq_length // p.context_parallel_size
    return tokens * config.model.hidden_size * config.training.element_bytes * (tp - 1) / tp


def stream_messages(config: RunConfig, number: int) -> int:
    """Return the number of `stream_bytes` messages per microbatch for a block.

    The forward pass gathers the inputs of attention and MLP and scatters their outputs. The
    backward pass sends gradients in the opposite direction and gathers the inputs again for the
    weight gradients. Dense MLPs and shared experts are split across tp; other experts are not.
    """
    model, t = config.model, config.training
    is_dense = not layers_of(model)[number].is_routed
    has_mlp = is_dense or bool(model.moe_shared_expert_intermediate_size)
    parts = 2 if has_mlp else 1  # attention and MLP
    shards_stream = config.parallel.sequence_parallel
    tiled = has_mlp and t.mlp_chunk_tokens > 0
    # one gather and one scatter per part, in the forward and in the backward pass
    count = 2 * parts + 2 * parts
    if shards_stream and "text" not in config.frozen_parts:
        # inputs are saved as shards
        count += parts
    if t.recompute_mode.repeats_block:
        count += 2 * parts
    computed_whole = t.recompute_mode.repeats_block and is_dense
    if tiled and computed_whole:
        # recomputation skips the sum of the tiles, which is a scatter or an all-reduce
        count -= 1 if shards_stream else 2
    elif tiled and shards_stream:
        # tiles gather their input a second time
        count += 1
    return count


def end_messages(config: RunConfig, stage: int) -> int:
    """Return the number of `stream_bytes` messages per microbatch for embedding and head."""
    count = 0
    trains = "text" not in config.frozen_parts
    if stage == 0:
        # a scatter and, in the backward pass, a gather; or an all-reduce and no other message
        count += 2 if trains or not config.parallel.sequence_parallel else 1
    if stage == config.parallel.pipeline_model_parallel_size - 1:
        # a gather of the head's input, and a scatter of its gradient
        count += 2
    return count


def swap_bytes(config: RunConfig) -> float:
    """Return the bytes that a layer's forward pass sends to exchange tokens for heads and back."""
    heads, key_values, queries = _context(config)
    # keys, values and queries in one direction, outputs as large as queries in the other
    return (key_values + 2 * queries) * (heads - 1) / heads


def key_bytes(config: RunConfig, sample: PackSample) -> float:
    """Return the bytes of K/V that a rank sends in a layer's forward pass.

    If a transport sends only needed rows, this is an upper bound, based on the rank that needs the
    most rows.
    """
    p = config.parallel
    transport = transport_of(config)
    _, key_values, _ = _context(config)
    sizes = p.hierarchical_context_parallel_sizes or ()
    ranks = transport.key_ranks(p.context_parallel_size, sizes)
    # number of blocks with one rank's K/V; fractional if only needed rows are sent
    blocks: float = ranks - 1
    if ranks > 1 and transport.keys == "needed":
        blocks = sample.shared(config)[1]
    return key_values * blocks


def _context(config: RunConfig) -> tuple[int, int, int]:
    """Return the number of ranks that exchange heads, and the bytes of K/V and of queries.

    The bytes are per rank and layer.
    """
    model, p = config.model, config.parallel
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    size = config.training.element_bytes
    tokens = config.training.micro_batch_size * config.data.seq_length // cp
    heads = transport_of(config).head_ranks(cp, p.hierarchical_context_parallel_sizes or ())
    # K/V heads are copied so that their number is divisible by the number of ranks
    groups = math.lcm(model.query_groups // tp, heads)
    key_values = 2 * tokens * groups * model.head_dim * size
    queries = tokens * model.num_attention_heads * model.head_dim // tp * size
    return heads, key_values, queries


def expert_bytes(config: RunConfig, number: int) -> float:
    """Return the bytes that a block sends to experts and back, in both passes."""
    is_routed = layers_of(config.model)[number].is_routed
    if not is_routed or config.parallel.expert_model_parallel_size == 1:
        return 0.0
    return exchange_bytes(config) * planned_load(config)


def boundary_bytes(config: RunConfig) -> int:
    """Return the bytes of a microbatch's hidden states that one stage sends to the next."""
    return residual_bytes(config)


@dataclass(frozen=True)
class SharedMessages:
    """A gather of parameters that several ranks share, and a reduction of their gradients."""

    gather: float
    """Bytes of the gather. Frozen parameters are gathered only under full sharding."""
    scatter: float
    """Bytes of the reduce-scatter."""
    moved: int
    """Number of gathered parameters."""
    ranks: int
    stride: int
    """Distance between the ranks."""


def shared_messages(
    config: RunConfig, chunks: Sequence[range], world_size: int
) -> list[SharedMessages]:
    """Return the messages for a stage's parameters, first without experts, then for experts.

    The ranks of dp x cp share parameters outside experts; ranks with the same experts share those.
    """
    t = config.training
    found = []
    for parameters, trained, ranks, stride in shared_parts(config, chunks, world_size):
        moved = parameters if config.parallel.sharding.parameters else trained
        # each rank sends everything except its own part
        away = (ranks - 1) / ranks
        gather = moved * t.element_bytes * away
        scatter = trained * t.accumulation_bytes * away
        found.append(SharedMessages(gather, scatter, moved, ranks, stride))
    return found


def instance_bytes(config: RunConfig, chunks: Sequence[range], world_size: int) -> float:
    """Return the bytes per step to sum a stage's gradients across optimizer instances."""
    instances = config.parallel.num_distributed_optimizer_instances
    share = sum(count / ranks for _, count, ranks, _ in shared_parts(config, chunks, world_size))
    return 2 * share * config.training.accumulation_bytes * (instances - 1) / instances


def gathers_a_step(config: RunConfig, world_size: int, chunks: int) -> float:
    """Return how often a stage with `chunks` chunks gathers its parameters in a step.

    Under full sharding without a pipeline, each forward and each backward pass gathers a block. A
    pipeline stage keeps its current chunk gathered. A single chunk stays gathered for the whole
    step; several chunks alternate after groups of microbatches (an estimate).
    """
    p = config.parallel
    if not p.sharding.parameters:
        return 1.0
    microbatches = config.num_microbatches(world_size)
    if p.pipeline_model_parallel_size == 1:
        return 2.0 * microbatches
    # each group has one microbatch per stage
    turns = 1 - 1 / chunks
    return 1.0 + 2 * microbatches * turns / p.pipeline_model_parallel_size


def uncounted(config: RunConfig) -> list[str]:
    """Return the names of messages that `step_messages` does not include."""
    p = config.parallel
    found = []
    has_states = any(layer.has_state for layer in layers_of(config.model))
    if has_states and p.context_parallel_size > 1:
        found.append("linear attention states (cp)")
    if config.vision.vision_num_layers > 0:
        found.append("image features")
    if config.model.lora_rank > 0 and p.tensor_model_parallel_size > 1:
        found.append("LoRA products (tp)")
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
    numbers = [layer for layers in chunks for layer in layers]
    full = config.training.recompute_mode.repeats_block
    cp = 0.0
    if config.parallel.context_parallel_size > 1:
        # heads: in the forward pass, in the backward pass, and again if the block is recomputed,
        # which reuses K/V
        heads = (3 if full else 2) * swap_bytes(config)
        cp = heads + KEY_MESSAGES * key_bytes(config, sample)
    # layers with a recurrent state have no attention; `uncounted` lists their messages
    attending = [layer for layer in numbers if not layers_of(config.model)[layer].has_state]
    streams = sum(stream_messages(config, layer) for layer in numbers)
    streams += end_messages(config, stage)
    return StageMessages(
        tp=microbatches * streams * stream_bytes(config),
        cp=microbatches * len(attending) * cp,
        ep=microbatches * sum(expert_bytes(config, layer) for layer in numbers),
        dp=_data_parallel(config, world_size, chunks),
        pp=_pipeline(config, world_size, stage, chunks),
    )


def _data_parallel(config: RunConfig, world_size: int, chunks: Sequence[range]) -> float:
    p, t = config.parallel, config.training
    microbatches = config.num_microbatches(world_size)
    gathers = gathers_a_step(config, world_size, len(chunks))
    # sharded gradients are reduced after each microbatch, whole gradients once
    sums = microbatches if p.sharding.gradients else 1
    shared = shared_messages(config, chunks, world_size)
    found = sum(gathers * one.gather + sums * one.scatter for one in shared)
    if p.sharding.parameters and p.pipeline_model_parallel_size == 1:
        # `gathers_a_step` includes a gather for the backward pass, which these parts do not need
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
    # each chunk sends hidden states and gradients, except at the ends of the model
    sent = 2 * len(chunks) - is_first - is_last
    found = config.num_microbatches(world_size) * sent * boundary_bytes(config)
    is_tied = (
        not config.model.untie_embeddings_and_output_weights and "text" not in config.frozen_parts
    )
    if is_tied and (is_first or is_last):
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        table = vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size
        (_, _, ranks, _), *_ = shared_parts(config, chunks, world_size)
        # an all-reduce between two stages sends as many bytes as this rank's share contains
        found += table * config.training.accumulation_bytes // ranks
    return found
