"""Bytes on one rank, term by term, and the phase of a step in which most of them live at once.

Every term knows the axis that shrinks it. Weights fall with tp and pp, and under full sharding with
dp x cp like the optimizer's state; gradients as `--data-parallel-sharding-strategy` says;
activations with cp and tp (dry_run/activations.py; without sequence parallelism only those inside
attention and MLP fall with tp).

The estimate leaves out the framework itself, kernels' scratch space, fragmentation, and
collectives' copies. It counts sums of gradients from the first microbatch on, and one block's work
on top of all that is kept.
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
    """`embedding`, `vision`, `block`, `head`, or `chunk` for those that are in no other part of
    their chunk.
    """
    parameters: int
    trained: int


@functools.lru_cache(2**12)
def chunk_parts(config: RunConfig, layers: range) -> Sequence[GatheredPart]:
    """The parts of the model chunk that holds `layers`, in the order of the forward pass.

    A table that is embedding and head of one chunk belongs to the chunk, with the final norm.
    """
    model, v, tp = config.model, config.vision, config.parallel.tensor_model_parallel_size
    first, last = layers.start == 0, layers.stop == model.num_layers
    shared = first and last and not model.untie_embeddings_and_output_weights
    table = vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size
    head = (1 + vocabulary_rows(model, model.vocab_size, tp)) * model.hidden_size

    frozen, ep = config.frozen_parts, config.parallel.expert_model_parallel_size

    def text(role: str, count: int, pairs: int = 0) -> GatheredPart:
        return GatheredPart(role, count + pairs, pairs + count * ("text" not in frozen))

    found = [text("embedding", table)] if first and not shared else []
    if first and v.vision_num_layers:
        tower, connector = tower_parameters(config, tp), connector_parameters(config, tp)
        trained = tower * ("vision" not in frozen) + connector * ("connector" not in frozen)
        found.append(GatheredPart("vision", tower + connector, trained))

    def block(layer: int) -> GatheredPart:
        return text(
            "block", layer_parameters(model, tp, layer, ep), pair_parameters(model, tp, layer, ep)
        )

    found += of_layers(model, layers, block)
    if last:
        found.append(text("chunk", table + model.hidden_size) if shared else text("head", head))
    return found


def stage_parameters(config: RunConfig, chunks: Sequence[range], *, trained: bool = False) -> int:
    """Parameters on one tp rank of a pipeline stage that holds the layers `chunks`; `trained`:
    without frozen ones.

    A tied embedding stands on the first and on the last stage (once where they are one stage);
    vision on the first.
    """
    parts = [part for layers in chunks for part in chunk_parts(config, layers)]
    return sum(part.trained if trained else part.parameters for part in parts)


STATE = ("weights", "gradients", "optimizer")
PHASES: dict[str, tuple[str, ...]] = {
    "forward": (*STATE, "gathered", "sums", "rows", "activations", "messages"),
    "loss": (*STATE, "gathered_head", "sums", "rows", "activations", "messages", "head"),
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
"""The terms that live in each phase of a step."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each term on one rank of a pipeline stage: parameters, gradients and moments, their
    copies on the way, and what a microbatch needs.
    """

    weights: int
    """Parameters that this rank keeps: whole ones, or shards, which are the master weights too."""
    gradients: int
    """Sums of the step: whole (`optim`), or this rank's share."""
    optimizer: int
    """What the rules keep (two moments), and the master weights of a 16-bit model."""
    gathered: int = 0
    """Parameters of full sharding that are whole while blocks compute: two blocks, or chunks of a
    pipeline.
    """
    gathered_head: int = 0
    """Parameters of full sharding that are whole in the loss."""
    sums: int = 0
    """Sharded gradients of the microbatch before: a bucket under way, and this rank's part of it.
    """
    unreduced: int = 0
    """Gradients of the microbatch at work, before they are summed over the ranks."""
    earlier: int = 0
    """Sums of earlier microbatches of the step when the head's gradient is summed; the first one
    has none.
    """
    table: int = 0
    """The head's gradient on its way under full sharding, and what stands beside it."""
    update: int = 0
    """Gradients summed over instances, and updated parameters on their way."""
    saved: int = 0
    """Shards in the model's dtype, for a checkpoint."""
    rows: int = 0
    """Labels, pixels, names of tokens and rotary angles of all microbatches in flight."""
    activations: int = 0
    """What blocks and vision keep for all microbatches in flight."""
    messages: int = 0
    """Hidden states and their gradients under way between stages."""
    block: int = 0
    """Work of one block's backward (`activations.block_work`), and a tied table's gradient that
    waits for its other part."""
    vision: int = 0
    """What is left of the activations when the tower runs backward, and the work of one of its
    blocks.
    """
    head: int = 0
    """Logits or their gradient for a chunk of tokens, the final norm and the table's gradient; on
    the last stage.
    """
    host: int = 0
    """Activations that wait in host memory; in no phase."""

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase at its highest."""
        return {
            phase: sum(getattr(self, term) for term in terms) for phase, terms in PHASES.items()
        }

    @property
    def total(self) -> int:
        """Bytes on the device in the largest phase."""
        return max(self.peaks.values())


class BlockBackward(NamedTuple):
    """Bytes of a block in its backward."""

    work: int
    """The peak beyond what it keeps."""
    kept: int
    """What is gone when it is done; 0 where that is on the host."""
    end: int = 0
    """What stands when it is done under full sharding, beyond what it kept: its gradients, also in
    the wide dtype.
    """


def most_at_work(chunks: Sequence[Sequence[BlockBackward]], behind: int = 0) -> int:
    """Return the most that a block's backward needs above all that is kept.

    The blocks behind it in its chunk have let theirs go. `behind` is what stands of the block
    before: its gradients in the wide dtype, which are being summed.
    """
    most = 0
    for blocks in chunks:
        gone = standing = 0
        for block in reversed(blocks):
            most = max(most, block.work + standing - gone, block.end - gone)
            gone += block.kept
            standing = behind
    return most


def shared_parts(
    config: RunConfig, chunks: Sequence[range], world_size: int
) -> list[tuple[int, int, int, int]]:
    """Parameters of a stage on one tp rank and trained ones, the ranks that share these and how far
    apart they stand: of all but experts, and of experts.
    """
    p, tp, ep = (
        config.parallel,
        config.parallel.tensor_model_parallel_size,
        config.parallel.expert_model_parallel_size,
    )
    ranks = (
        config.data_parallel_size(world_size)
        * p.context_parallel_size
        // p.num_distributed_optimizer_instances
    )
    parameters, trained = (stage_parameters(config, chunks, trained=only) for only in (False, True))
    numbers = [layer for layers in chunks for layer in layers]
    experts, pairs = (
        sum(
            of_layers(
                config.model,
                numbers,
                functools.partial(expert_parameters, config.model, ep=ep, pairs=of_pairs),
            )
        )
        for of_pairs in (False, True)
    )
    of_experts = pairs if "text" in config.frozen_parts else experts
    others = parameters - experts - pairs, trained - of_experts, ranks, tp
    return [others, (experts + pairs, of_experts, max(1, ranks * tp // ep), ep)]


def stage_state(
    config: RunConfig,
    chunks: Sequence[range],
    world_size: int,
    blocks: Sequence[Sequence[BlockBackward]],
) -> RankMemory:
    """The state of a rank, without activations, of chunks with these `blocks`."""
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    instances = config.parallel.num_distributed_optimizer_instances
    parts = shared_parts(config, chunks, world_size)
    parameters, trained = (sum(part[number] for part in parts) for number in (0, 1))
    share, narrow = sum(-(-count // ranks) for _, count, ranks, _ in parts), size < wide
    ranks, tp = parts[0][2:]
    kinds = max(
        len(STATE_KINDS[rule]) for rule in STEPPED_BY.values()
    )  # as if one rule stepped all
    copies = 2 * share * wide if instances > 1 else 0  # joined for the sum, and summed
    sharding = config.parallel.sharding
    shares = any(
        count and ranks > 1 for count, _, ranks, _ in parts
    )  # else a rank keeps them whole
    if sharding.parameters and shares:
        gathered, head = _gathered(config, chunks)
        gathering = [part for layers in chunks for part in chunk_parts(config, layers)]
        block, table = (
            max((p.trained for p in gathering if p.role == role), default=0)
            for role in ("block", "head")
        )
        residual = residual_bytes(config)
        ending = [
            [_with_end(one, residual + block * (size + wide)) for one in of_chunk]
            for of_chunk in blocks
        ]
        return RankMemory(
            weights=share * wide
            + sum(-(-(count - moved) // ranks) for count, moved, ranks, _ in parts) * size,
            gradients=share * wide,
            optimizer=share * kinds * wide,
            gathered=gathered * size,
            gathered_head=head * size,
            # the wide gradients of a block stay until those of the next block are all there
            unreduced=most_at_work(ending, block * wide) - most_at_work(blocks),
            earlier=share * wide if config.num_microbatches(world_size) > 1 else 0,
            table=_table_on_its_way(config, table, ranks, block, blocks[-1][-1].work),
            update=copies,
            saved=share * size * narrow,
        )
    model = config.model
    largest = max(
        2 * _last_weight(config),
        vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size,
    )
    bucket = min(
        trained, max(config.parallel.ddp_bucket_size, largest)
    )  # gate and up are one, or it is a table
    two = min(trained, 2 * bucket)
    apart = sharding.gradients
    arriving = bucket // ranks * wide if ranks > 1 else 0
    return RankMemory(
        weights=parameters * size,
        gradients=(share if apart else trained) * wide,
        optimizer=share * (kinds + narrow) * wide,
        sums=bucket * wide * (ranks > 1) + arriving if apart else 0,
        unreduced=bucket * wide if apart else 0,
        update=max(copies, two * size * (ranks > 1)),
    )


def _table_on_its_way(config: RunConfig, table: int, ranks: int, block: int, work: int) -> int:
    """Return the bytes beside activations and two gathered blocks while the head's gradient is
    summed over the ranks.

    `table` and `block` are parameters, `work` is what the last block's backward needs.
    """
    if table == 0:
        return 0
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    # what the wide copy is made from, this rank's part, and the gradient of the last block's
    # result; so far only one block is gathered
    before = head_gradient(config) + table // ranks * wide + residual_bytes(config) - block * size
    return table * wide + max(before, work)


def _with_end(block: BlockBackward, standing: int) -> BlockBackward:
    return block._replace(end=standing - block.kept)


def _last_weight(config: RunConfig) -> int:
    """Elements of a block's largest last weight on one rank, whose gradient comes first."""
    model, p = config.model, config.parallel
    dense = model.hidden_size * model.ffn_hidden_size // p.tensor_model_parallel_size
    counts = (
        expert_parameters(model, layer, p.expert_model_parallel_size)
        for layer in {*first_alike(model)}
    )
    return max(experts // 3 or dense for experts in counts)


def _gathered(config: RunConfig, chunks: Sequence[range]) -> tuple[int, int]:
    """Parameters that are whole while blocks compute, and in the loss.

    Without a pipeline: a block and the next, and what its chunk keeps for all of its forward and
    backward. With one: a chunk, and the next where chunks take turns.
    """
    parts = [chunk_parts(config, layers) for layers in chunks]
    if config.parallel.pipeline_model_parallel_size > 1:
        held = sum(sorted(sum(part.parameters for part in of_chunk) for of_chunk in parts)[-2:])
        return held, held
    block = max(part.parameters for part in parts[0] if part.role == "block")
    kept = {
        role: sum(part.parameters for part in parts[0] if part.role == role)
        for role in ("chunk", "head")
    }
    return 2 * block + kept["chunk"], kept["chunk"] + kept["head"]


def stage_kind(config: RunConfig, stage: int, chunks: Sequence[range]) -> tuple[Hashable, ...]:
    """What stages that compute alike have in common: an end of the model, and layers that are
    alike.
    """
    kinds = tuple(tuple(first_alike(config.model)[layer] for layer in layers) for layers in chunks)
    return stage == 0, stage == config.parallel.pipeline_model_parallel_size - 1, kinds


def head_gradient(config: RunConfig) -> int:
    """Bytes of the table's gradient, which the loss makes in its forward: in the dtype of sums
    while chunks add to it, so that no chunk rounds it. It cannot go to a bucket at once, because
    backward may scale the loss.
    """
    if "text" in config.frozen_parts:
        return 0
    adds = 0 < loss_chunk_tokens(config) < tokens_per_rank(config)
    each = config.training.accumulation_bytes if adds else config.training.element_bytes
    rows = vocabulary_rows(
        config.model, config.model.vocab_size, config.parallel.tensor_model_parallel_size
    )
    return rows * config.model.hidden_size * each


def stage_memory(
    config: RunConfig, stage: int, chunks: Sequence[range], world_size: int, at: Held | None = None
) -> RankMemory:
    """Bytes on one rank of a pipeline stage that holds the layers `chunks` (one range for each
    model chunk), at most or `at` a moment of the step.
    """
    p = config.parallel
    held, rows, deferred = at or most_held(config, stage, world_size)
    parts = {
        layer: block_memory(config, layer, deferred is not None)
        for layer in {*first_alike(config.model)}
    }
    blocks = [parts[first_alike(config.model)[layer]] for layers in chunks for layer in layers]
    # blocks of several kinds count as their mean, but for the one at work
    layer = -(-sum(block.kept for block in blocks) // len(blocks))
    counts = offloaded_blocks(config, chunks)
    staying = max(len(layers) - count for layers, count in zip(chunks, counts, strict=True))
    residual = residual_bytes(config)
    received = residual if any(counts) and (stage, len(chunks)) != (0, 1) else 0
    most = max(map(len, chunks))
    at_once = max(staying, min(2, most)) if any(counts) else staying
    activations = held * received + ((held - 1) * staying + at_once) * layer
    if (
        deferred is not None
    ):  # in the first block those of blocks behind it may be more than these had on the device
        waiting, behind = max(block.left for block in blocks), most - 1
        activations += deferred * most * waiting + max(0, behind * waiting - (at_once - 1) * layer)
    seeing, given = 0, max(block.given for block in blocks)
    if stage == 0 and config.vision.vision_num_layers:
        vision = _vision(config, world_size)
        activations += rows * vision.kept
        seeing = activations - at_once * layer + vision.work
        given += vision.given
    last = stage == p.pipeline_model_parallel_size - 1
    shared = (
        p.pipeline_model_parallel_size == 1 and not config.model.untie_embeddings_and_output_weights
    )
    # hidden states and gradients under way: two sends each way, and the gradient that is at work
    before, after = (not is_end or len(chunks) > 1 for is_end in (stage == 0, last))
    messages = (2 * before + 3 * after) * (p.pipeline_model_parallel_size > 1)
    head = head_memory(config) if last else NOTHING

    def backward(number: int) -> BlockBackward:
        block = parts[first_alike(config.model)[number]]
        return BlockBackward(block.work, 0 if any(counts) else block.kept)

    in_backward = [[backward(number) for number in layers] for layers in chunks]
    return replace(
        stage_state(config, chunks, world_size, in_backward),
        rows=rows * (given + head.given),
        activations=activations,
        messages=messages * residual,
        block=most_at_work(in_backward) + (head_gradient(config) if shared else 0),
        vision=seeing,
        head=max(head.forward, head.backward),
        host=held * (max(counts) * layer - received),
    )


def _vision(config: RunConfig, world_size: int) -> PartMemory:
    """Return what tower and connector hold of one microbatch on a rank of the first stage."""
    factor, sharers = encoders(config, world_size)
    packs = config.training.micro_batch_size * factor
    crops, pooled = planned_images(config)
    return vision_memory(config, -(-packs * crops // sharers), -(-packs * pooled // sharers))
