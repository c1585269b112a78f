"""Predict the bytes of each memory term on one rank, and the phase of a step with the highest peak.

Each term shrinks along certain axes. Weights shrink with tp and pp, and under full sharding also
with dp x cp, as optimizer state does. Gradients follow `--data-parallel-sharding-strategy`.
Activations shrink with cp and tp (measured by dry_run/parts.py); without sequence parallelism, only
activations inside attention and MLP shrink with tp.

The estimate excludes the framework itself, scratch memory of kernels, fragmentation, and copies
made by collectives. It counts gradient sums starting at the first microbatch, and adds the working
memory of one block to all saved tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megacp.dry_run.in_flight import Held, most_held
from megacp.dry_run.measured import block_memory, head_memory, vision_memory
from megacp.dry_run.part_memory import NOTHING, PartMemory
from megacp.engine.config.run import RunConfig
from megacp.engine.config.training import STATE_KINDS, STEPPED_BY
from megacp.engine.layers.table import residual_bytes, tokens_per_rank
from megacp.engine.models.costs import (
    connector_parameters,
    encoders,
    expert_parameters,
    first_alike,
    layer_parameters,
    loss_chunk_tokens,
    of_layers,
    offloaded_blocks,
    pair_parameters,
    planned_images,
    tower_parameters,
    vocabulary_rows,
)


@dataclass(frozen=True)
class GatheredPart:
    """Parameters on one tp rank that are gathered together."""

    role: str
    """`embedding`, `vision`, `block`, `head`, or `chunk` for a chunk's other parameters."""
    parameters: int
    trained: int


@functools.lru_cache(2**12)
def chunk_parts(config: RunConfig, layers: range) -> Sequence[GatheredPart]:
    """Return the parts of the model chunk with these `layers`, in the order of the forward pass.

    If a chunk's embedding and head are tied, their table is in the `chunk` part, together with the
    final norm.
    """
    model, v = config.model, config.vision
    tp = config.parallel.tensor_model_parallel_size
    ep = config.parallel.expert_model_parallel_size
    frozen = config.frozen_parts
    first = layers.start == 0
    last = layers.stop == model.num_layers
    shared = first and last and not model.untie_embeddings_and_output_weights
    table = vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size
    # the output table, and one row for the final norm
    head = (1 + vocabulary_rows(model, model.vocab_size, tp)) * model.hidden_size

    def text(role: str, count: int, pairs: int = 0) -> GatheredPart:
        # LoRA adapters are trained even if the text model is frozen
        trained = pairs if "text" in frozen else pairs + count
        return GatheredPart(role, count + pairs, trained)

    def block(layer: int) -> GatheredPart:
        count = layer_parameters(model, tp, layer, ep)
        return text("block", count, pair_parameters(model, tp, layer, ep))

    found = []
    if first and not shared:
        found.append(text("embedding", table))
    if first and v.vision_num_layers:
        tower = tower_parameters(config, tp)
        connector = connector_parameters(config, tp)
        trained = 0
        if "vision" not in frozen:
            trained += tower
        if "connector" not in frozen:
            trained += connector
        found.append(GatheredPart("vision", tower + connector, trained))
    found += of_layers(model, layers, block)
    if shared:
        found.append(text("chunk", table + model.hidden_size))
    elif last:
        found.append(text("head", head))
    return found


def stage_parameters(config: RunConfig, chunks: Sequence[range], *, trained: bool = False) -> int:
    """Return the number of parameters on one tp rank of a stage with the layers `chunks`.

    If `trained`, frozen parameters are not counted. A tied embedding counts on both the first and
    the last stage, but only once if there is a single stage. Vision counts on the first stage.
    """
    parts = _parts_of(config, chunks)
    return sum(part.trained if trained else part.parameters for part in parts)


def _parts_of(config: RunConfig, chunks: Sequence[range]) -> list[GatheredPart]:
    return [part for layers in chunks for part in chunk_parts(config, layers)]


# Terms on the device in every phase.
STATE = ("weights", "gradients", "optimizer")
# Terms on the device in each phase of a step.
PHASES: dict[str, tuple[str, ...]] = {
    "forward": (*STATE, "gathered", "sums", "rows", "activations", "messages"),
    "loss": (*STATE, "gathered_head", "sums", "rows", "activations", "messages", "head"),
    # when the head's gradient is reduced, only earlier microbatches have gradient sums
    "table": (
        "weights",
        "earlier",
        "optimizer",
        "gathered",
        "rows",
        "activations",
        "messages",
        "table",
    ),
    "backward": (
        *STATE,
        "gathered",
        "sums",
        "unreduced",
        "rows",
        "activations",
        "messages",
        "block",
    ),
    "vision": (*STATE, "gathered", "sums", "rows", "vision", "messages"),
    "optimizer": (*STATE, "update"),
    "checkpoint": (*STATE, "saved"),
}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each memory term on one rank of a pipeline stage.

    The terms are parameters, gradients, optimizer state, copies during communication, and the
    memory of microbatches.
    """

    weights: int
    """Parameters that this rank keeps: whole, or as shards that are also the master weights."""
    gradients: int
    """Gradient sums of the step: whole (`optim`), or this rank's share."""
    optimizer: int
    """Optimizer state (two moments), and the master weights of a 16-bit model."""
    gathered: int = 0
    """Parameters gathered under full sharding while blocks compute: two blocks, or model chunks."""
    gathered_head: int = 0
    """Parameters gathered under full sharding for the loss."""
    sums: int = 0
    """Buffers for sharded gradients: a bucket being reduced, and this rank's share of it."""
    unreduced: int = 0
    """Gradients of the current microbatch before their reduction."""
    earlier: int = 0
    """Gradient sums of earlier microbatches while the head's gradient is reduced; 0 for a single
    microbatch.
    """
    table: int = 0
    """The head's gradient and other memory in use during its reduction under full sharding."""
    update: int = 0
    """Gradients summed across optimizer instances, or updated parameters during their gather."""
    saved: int = 0
    """Shards in the model's dtype, for a checkpoint."""
    rows: int = 0
    """Labels, pixels, token indices and rotary angles of all microbatches in flight."""
    activations: int = 0
    """Saved activations of blocks and vision, for all microbatches in flight."""
    messages: int = 0
    """Hidden states and their gradients in transfer between stages."""
    block: int = 0
    """Working memory of a block's backward pass, and the gradient of a tied table."""
    vision: int = 0
    """Remaining activations and working memory during the backward pass of the vision tower."""
    head: int = 0
    """Logits or their gradient for a chunk of tokens, the final norm and the table's gradient; only
    on the last stage.
    """
    host: int = 0
    """Activations offloaded to host memory; not part of any phase."""

    @property
    def peaks(self) -> dict[str, int]:
        """Peak bytes of each phase."""
        found = {}
        for phase, terms in PHASES.items():
            found[phase] = sum(getattr(self, term) for term in terms)
        return found

    @property
    def total(self) -> int:
        """Bytes on the device in the largest phase."""
        return max(self.peaks.values())


class BlockBackward(NamedTuple):
    """Bytes of a block during its backward pass."""

    work: int
    """Peak of the backward pass beyond the saved activations."""
    kept: int
    """Saved activations that the backward pass frees; 0 if they are on the host."""
    end: int = 0
    """Gradients in both dtypes at the end of the pass under full sharding, minus `kept`."""


def most_at_work(chunks: Sequence[Sequence[BlockBackward]], behind: int = 0) -> int:
    """Return the peak bytes of the backward pass beyond all saved activations.

    The backward pass runs a chunk's blocks from last to first, and each finished block frees its
    activations. `behind` is the size of the previous block's wide gradients, which are being
    reduced.
    """
    most = 0
    for blocks in chunks:
        gone = standing = 0
        for block in reversed(blocks):
            most = max(most, block.work + standing - gone, block.end - gone)
            gone += block.kept
            # after the first block, the previous block's gradients are always being reduced
            standing = behind
    return most


def shared_parts(
    config: RunConfig, chunks: Sequence[range], world_size: int
) -> list[tuple[int, int, int, int]]:
    """Return sizes and sharing ranks of a stage's parameters, first without experts, then experts.

    Each entry contains the number of parameters on one tp rank, the number of trained parameters,
    the number of ranks that share their state, and the distance between these ranks.
    """
    p = config.parallel
    tp, ep = p.tensor_model_parallel_size, p.expert_model_parallel_size
    replicas = config.data_parallel_size(world_size) * p.context_parallel_size
    ranks = replicas // p.num_distributed_optimizer_instances
    parameters = stage_parameters(config, chunks)
    trained = stage_parameters(config, chunks, trained=True)
    experts = _expert_parameters(config, chunks, pairs=False)
    pairs = _expert_parameters(config, chunks, pairs=True)
    # if experts are frozen, only their LoRA adapters are trained
    of_experts = pairs if "text" in config.frozen_parts else experts
    others = parameters - experts - pairs, trained - of_experts, ranks, tp
    # experts are divided among ep instead of tp ranks, so different ranks have copies of them
    return [others, (experts + pairs, of_experts, max(1, ranks * tp // ep), ep)]


def _expert_parameters(config: RunConfig, chunks: Sequence[range], *, pairs: bool) -> int:
    """Return the number of parameters in a stage's experts on one rank, or in their adapters."""
    ep = config.parallel.expert_model_parallel_size
    count = functools.partial(expert_parameters, config.model, ep=ep, pairs=pairs)
    numbers = [layer for layers in chunks for layer in layers]
    return sum(of_layers(config.model, numbers, count))


def stage_state(
    config: RunConfig,
    chunks: Sequence[range],
    world_size: int,
    blocks: Sequence[Sequence[BlockBackward]],
) -> RankMemory:
    """Return the memory of a rank without activations; `blocks` are the blocks of its chunks."""
    parts = shared_parts(config, chunks, world_size)
    # a part without trained parameters, or on a single rank, has nothing to shard
    shares = any(count and ranks > 1 for _all, count, ranks, _ in parts)
    if config.parallel.sharding.parameters and shares:
        return _fully_sharded_state(config, chunks, world_size, blocks)
    return _replicated_state(config, parts)


def _fully_sharded_state(
    config: RunConfig,
    chunks: Sequence[range],
    world_size: int,
    blocks: Sequence[Sequence[BlockBackward]],
) -> RankMemory:
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    parts = shared_parts(config, chunks, world_size)
    share = _state_share(parts)
    ranks = parts[0][2]
    gathered, head = _gathered(config, chunks)
    gathering = _parts_of(config, chunks)
    block = max((p.trained for p in gathering if p.role == "block"), default=0)
    table = max((p.trained for p in gathering if p.role == "head"), default=0)
    # at the end of a block, its gradients exist in both dtypes, next to the gradient of its input
    standing = residual_bytes(config) + block * (size + wide)
    ending = []
    for of_chunk in blocks:
        ending.append([one._replace(end=standing - one.kept) for one in of_chunk])
    # frozen parameters are sharded in the model's dtype, trained ones as master weights
    frozen = sum(-(-(count - moved) // ranks) for count, moved, ranks, _ in parts)
    # the wide gradients of a block stay until the next block has all its gradients
    unreduced = most_at_work(ending, block * wide) - most_at_work(blocks)
    return RankMemory(
        weights=share * wide + frozen * size,
        gradients=share * wide,
        optimizer=share * _state_kinds() * wide,
        gathered=gathered * size,
        gathered_head=head * size,
        unreduced=unreduced,
        earlier=share * wide if config.num_microbatches(world_size) > 1 else 0,
        table=_table_on_its_way(config, table, ranks, block, blocks[-1][-1].work),
        update=_instance_copies(config, share),
        saved=share * size if size < wide else 0,
    )


def _replicated_state(config: RunConfig, parts: Sequence[tuple[int, int, int, int]]) -> RankMemory:
    """Return the state if each rank has whole parameters; `parts` are from `shared_parts`."""
    model = config.model
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    parameters = sum(part[0] for part in parts)
    trained = sum(part[1] for part in parts)
    share = _state_share(parts)
    _, _, ranks, tp = parts[0]
    # a bucket has room for the largest weight: a fused gate and up, or a vocabulary table
    table = vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size
    largest = max(2 * _last_weight(config), table)
    bucket = min(trained, max(config.parallel.ddp_bucket_size, largest))
    state = _state_kinds()
    if size < wide:
        state += 1  # master weights
    gradients = trained
    sums = unreduced = 0
    if config.parallel.sharding.gradients:
        gradients = share
        unreduced = bucket * wide
        if ranks > 1:
            # a bucket that is being reduced, and this rank's part of the result
            sums = bucket * wide + bucket // ranks * wide
    # updated parameters are gathered in two buckets at a time
    gathering = min(trained, 2 * bucket) * size if ranks > 1 else 0
    return RankMemory(
        weights=parameters * size,
        gradients=gradients * wide,
        optimizer=share * state * wide,
        sums=sums,
        unreduced=unreduced,
        update=max(_instance_copies(config, share), gathering),
    )


def _state_share(parts: Sequence[tuple[int, int, int, int]]) -> int:
    """Return the number of trained parameters whose optimizer state one rank stores."""
    return sum(-(-count // ranks) for _all, count, ranks, _ in parts)


def _state_kinds() -> int:
    """Return the largest number of state tensors per parameter of any optimizer rule."""
    return max(len(STATE_KINDS[rule]) for rule in STEPPED_BY.values())


def _instance_copies(config: RunConfig, share: int) -> int:
    """Return the bytes of the sum across optimizer instances: joined input, and result."""
    if config.parallel.num_distributed_optimizer_instances == 1:
        return 0
    return 2 * share * config.training.accumulation_bytes


def _table_on_its_way(config: RunConfig, table: int, ranks: int, block: int, work: int) -> int:
    """Return the bytes in use while the head's gradient is reduced across ranks.

    Activations and two gathered blocks are not included. `table` and `block` are numbers of
    parameters; `work` is the number of bytes for the last block's backward pass.
    """
    if table == 0:
        return 0
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    # the source of the wide copy, this rank's part, and the gradient of the last block's output;
    # only one block is gathered at this point, so the second one is subtracted
    before = head_gradient(config) + table // ranks * wide + residual_bytes(config) - block * size
    return table * wide + max(before, work)


def _last_weight(config: RunConfig) -> int:
    """Return the elements in the largest last weight of a block; its gradient is computed first."""
    model, p = config.model, config.parallel
    dense = model.hidden_size * model.ffn_hidden_size // p.tensor_model_parallel_size
    found = []
    for layer in {*first_alike(model)}:
        # gate, up and down of the experts have the same size
        experts = expert_parameters(model, layer, p.expert_model_parallel_size)
        found.append(experts // 3 or dense)
    return max(found)


def _gathered(config: RunConfig, chunks: Sequence[range]) -> tuple[int, int]:
    """Return the numbers of gathered parameters while blocks compute, and during the loss.

    Without a pipeline, these are two consecutive blocks and the parameters that stay gathered from
    the forward to the backward pass. With a pipeline, they are the two largest chunks or the only
    chunk.
    """
    parts = [chunk_parts(config, layers) for layers in chunks]
    if config.parallel.pipeline_model_parallel_size > 1:
        sizes = sorted(sum(part.parameters for part in of_chunk) for of_chunk in parts)
        held = sum(sizes[-2:])
        return held, held
    block = max(part.parameters for part in parts[0] if part.role == "block")
    chunk = sum(part.parameters for part in parts[0] if part.role == "chunk")
    head = sum(part.parameters for part in parts[0] if part.role == "head")
    return 2 * block + chunk, chunk + head


def stage_kind(config: RunConfig, stage: int, chunks: Sequence[range]) -> tuple[Hashable, ...]:
    """Return a key that is equal for stages with the same kinds of layers and the same ends."""
    alike = first_alike(config.model)
    kinds = []
    for layers in chunks:
        kinds.append(tuple(alike[layer] for layer in layers))
    last = config.parallel.pipeline_model_parallel_size - 1
    return stage == 0, stage == last, tuple(kinds)


def head_gradient(config: RunConfig) -> int:
    """Return the bytes of the output table's gradient, which the loss's forward pass computes.

    If several chunks of tokens add to the gradient, it has the dtype of gradient sums, so that
    chunks do not round it. It cannot be added to a bucket immediately, because the backward pass
    may scale the loss.
    """
    if "text" in config.frozen_parts:
        return 0
    adds = 0 < loss_chunk_tokens(config) < tokens_per_rank(config)
    each = config.training.accumulation_bytes if adds else config.training.element_bytes
    tp = config.parallel.tensor_model_parallel_size
    rows = vocabulary_rows(config.model, config.model.vocab_size, tp)
    return rows * config.model.hidden_size * each


def stage_memory(
    config: RunConfig, stage: int, chunks: Sequence[range], world_size: int, at: Held | None = None
) -> RankMemory:
    """Return the bytes on one rank of a pipeline stage with the layers `chunks`.

    `chunks` has one range per model chunk. The result is for the moment `at` in the step, or an
    upper bound for the whole step if `at` is None.
    """
    model, p = config.model, config.parallel
    held, rows, deferred = at or most_held(config, stage, world_size)
    alike = first_alike(model)
    # measure each kind of layer once
    parts = {layer: block_memory(config, layer, deferred is not None) for layer in {*alike}}
    blocks = [parts[alike[layer]] for layers in chunks for layer in layers]
    # the average saved activations per block of the stage
    layer = -(-sum(block.kept for block in blocks) // len(blocks))
    counts = offloaded_blocks(config, chunks)
    offloads = any(counts)
    residual = residual_bytes(config)

    # blocks of a chunk whose activations stay on the device
    staying = max(len(layers) - count for layers, count in zip(chunks, counts, strict=True))
    most = max(map(len, chunks))
    received = 0
    at_once = staying
    if offloads:
        # the backward pass prefetches, so up to two blocks are on the device at once
        at_once = max(staying, min(2, most))
        # an input from another stage stays on the device
        if (stage, len(chunks)) != (0, 1):
            received = residual
    activations = held * received + ((held - 1) * staying + at_once) * layer
    if deferred is not None:
        # a finished backward pass leaves the inputs of its weight gradients; while the first block
        # runs, these may exceed the activations that later blocks had on the device
        waiting = max(block.left for block in blocks)
        finished = (most - 1) * waiting
        activations += deferred * most * waiting + max(0, finished - (at_once - 1) * layer)

    seeing = 0
    given = max(block.given for block in blocks)
    if stage == 0 and config.vision.vision_num_layers:
        vision = _vision(config, world_size)
        activations += rows * vision.kept
        # the tower's backward pass follows the blocks of its microbatch
        seeing = activations - at_once * layer + vision.work
        given += vision.given

    last = stage == p.pipeline_model_parallel_size - 1
    head = head_memory(config) if last else NOTHING
    in_backward = []
    for layers in chunks:
        of_chunk = []
        for number in layers:
            block = parts[alike[number]]
            # the backward pass frees no device memory if activations are offloaded
            of_chunk.append(BlockBackward(block.work, 0 if offloads else block.kept))
        in_backward.append(of_chunk)
    working = most_at_work(in_backward)
    if p.pipeline_model_parallel_size == 1 and not model.untie_embeddings_and_output_weights:
        # the gradient of a tied table is complete only after the embedding's backward pass
        working += head_gradient(config)
    return replace(
        stage_state(config, chunks, world_size, in_backward),
        rows=rows * (given + head.given),
        activations=activations,
        messages=_transfers(config, stage, len(chunks)) * residual,
        block=working,
        vision=seeing,
        head=max(head.forward, head.backward),
        host=held * (max(counts) * layer - received),
    )


def _transfers(config: RunConfig, stage: int, chunks: int) -> int:
    """Return the number of residual streams that a stage transfers at once.

    These are two sends in each direction, and the gradient that the stage is processing.
    """
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return 0
    count = 0
    # with several chunks, the first and last stages exchange messages with each other
    if stage > 0 or chunks > 1:
        count += 2
    if stage < stages - 1 or chunks > 1:
        count += 3
    return count


def _vision(config: RunConfig, world_size: int) -> PartMemory:
    """Return the memory of the vision tower and connector for a microbatch on the first stage."""
    factor, sharers = encoders(config, world_size)
    packs = config.training.micro_batch_size * factor
    crops, pooled = planned_images(config)
    # the ranks that share a row divide its images
    return vision_memory(config, -(-packs * crops // sharers), -(-packs * pooled // sharers))
