"""What a rank keeps from step to step, and the parts in which full sharding gathers: pure counts of parameters.

Key property: parts are those that the model's chunks are built of (`models/language.py`), so memory and traffic follow
one list. W ranks share what `--data-parallel-sharding-strategy` names: dp x cp over the distributed optimizer's
instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacp.core.config.run import RunConfig
from megacp.core.planner import vision
from megacp.core.planner.costs import embedding_parameters, head_parameters, layer_parameters, pair_parameters


@dataclass(frozen=True)
class GatheredPart:
    """Parameters on one tp rank that are gathered together."""

    role: str
    """`embedding`, `vision`, `block`, `head`, or `chunk` for those that are in no other part of their chunk."""
    parameters: int
    trained: int

    @property
    def gathered_again(self) -> bool:
        """Whether a rank without a pipeline frees it after the forward and gathers it for its backward."""
        return self.role in ("block", "vision")


def chunk_parts(config: RunConfig, layers: range) -> list[GatheredPart]:
    """The parts of the model chunk that holds `layers`, in the order of the forward pass.

    A table that is embedding and head of one chunk belongs to the chunk, with the final norm.
    """
    model, v, tp = config.model, config.vision, config.parallel.tensor_model_parallel_size
    first, last = layers.start == 0, layers.stop == model.num_layers
    shared = first and last and not model.untie_embeddings_and_output_weights
    table, head = embedding_parameters(model, tp), head_parameters(model, tp)

    frozen, pairs = config.frozen_parts, pair_parameters(model, tp)

    def text(role: str, count: int) -> GatheredPart:
        return GatheredPart(role, count, 0 if "text" in frozen else count)

    found = [text("embedding", table)] if first and not shared else []
    if first and v.vision_num_layers:
        tower, connector = vision.tower_parameters(config, tp), vision.connector_parameters(config, tp)
        trained = tower * ("vision" not in frozen) + connector * ("connector" not in frozen)
        found.append(GatheredPart("vision", tower + connector, trained))
    block = text("block", layer_parameters(model, tp))
    found += [GatheredPart("block", block.parameters + pairs, block.trained + pairs) for _ in layers]
    if last:
        found.append(text("chunk", table + model.hidden_size) if shared else text("head", head))
    return found


def stage_parameters(config: RunConfig, chunks: Sequence[range], *, trained: bool = False) -> int:
    """Parameters on one tp rank of a pipeline stage that holds the layers `chunks`; `trained`: without frozen ones.

    A tied embedding stands on the first and on the last stage (once where they are one stage); vision on the first.
    """
    parts = [part for layers in chunks for part in chunk_parts(config, layers)]
    return sum(part.trained if trained else part.parameters for part in parts)


def sharing_ranks(config: RunConfig, world_size: int) -> int:
    """W: ranks that share among themselves."""
    p = config.parallel
    ranks = config.data_parallel_size(world_size) * p.context_parallel_size
    return ranks // p.num_distributed_optimizer_instances


def shares_parameters(config: RunConfig, world_size: int) -> bool:
    """Whether parameters are sharded; a rank that shares with nobody keeps them whole."""
    strategy = config.parallel.data_parallel_sharding_strategy
    return strategy == "optim_grads_params" and sharing_ranks(config, world_size) > 1


@dataclass(frozen=True)
class StateMemory:
    """Bytes of parameters, gradients and moments on one rank, and of their copies on the way."""

    weights: int
    """Parameters that this rank keeps: whole ones, or shards, which are the master weights too."""
    gradients: int
    """Sums of the step: whole (`optim`), or this rank's share."""
    optimizer: int
    """Both moments, and the master weights of a 16-bit model."""
    gathered: int = 0
    """Parameters of full sharding that are whole while blocks compute: two blocks, or chunks of a pipeline."""
    gathered_head: int = 0
    """Those that are whole in the loss."""
    sums: int = 0
    """Sharded gradients of the microbatch before: a bucket under way, and this rank's part of it."""
    unreduced: int = 0
    """Gradients of the microbatch at work, before they are summed over the ranks."""
    update: int = 0
    """Gradients summed over instances, and updated parameters on their way."""
    saved: int = 0
    """Shards in the model's dtype, for a checkpoint."""


def stage_state(config: RunConfig, chunks: Sequence[range], world_size: int, kept: int, whole: int) -> StateMemory:
    """The state of a rank. `kept` are the bytes of a block's activations that backward has let go of when the block
    before it computes. `whole` are those of the block that is just done. In both places its gradients may stand.
    """
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    ranks, instances = sharing_ranks(config, world_size), config.parallel.num_distributed_optimizer_instances
    parameters, trained = (stage_parameters(config, chunks, trained=only) for only in (False, True))
    share, narrow = -(-trained // ranks), size < wide
    copies = 2 * share * wide if instances > 1 else 0  # joined for the sum, and summed
    if shares_parameters(config, world_size):
        gathered, head = _gathered(config, chunks)
        block = max(part.trained for part in chunk_parts(config, max(chunks, key=len)) if part.role == "block")
        down = min(_last_weight(config), block)
        return StateMemory(
            weights=share * wide + -(-(parameters - trained) // ranks) * size,
            gradients=share * wide,
            optimizer=2 * share * wide,
            gathered=gathered * size,
            gathered_head=head * size,
            # the first gradient of a block; all of them with their wide copy; that copy, until the next block's
            unreduced=max(down * size, block * (size + wide) - whole, block * wide - kept + down * size),
            update=copies,
            saved=share * size * narrow,
        )
    bucket = min(trained, max(config.parallel.ddp_bucket_size, _largest_parameter(config)))
    two = min(trained, 2 * bucket)
    apart = config.parallel.data_parallel_sharding_strategy != "optim"
    arriving = bucket // ranks * wide if ranks > 1 else 0
    return StateMemory(
        weights=parameters * size,
        gradients=(share if apart else trained) * wide,
        optimizer=share * (2 + narrow) * wide,
        sums=bucket * wide * (ranks > 1) + arriving if apart else 0,
        unreduced=bucket * wide if apart else 0,
        update=(0 if apart or ranks == 1 else share * wide) + max(copies, two * size * (ranks > 1)),
    )


def _last_weight(config: RunConfig) -> int:
    """Elements of a block's last weight on one tp rank, whose gradient comes first."""
    return config.model.hidden_size * config.model.ffn_hidden_size // config.parallel.tensor_model_parallel_size


def _largest_parameter(config: RunConfig) -> int:
    """Elements of the largest weight on one tp rank: gate and up in one, or a table."""
    return max(2 * _last_weight(config), embedding_parameters(config.model, config.parallel.tensor_model_parallel_size))


def _gathered(config: RunConfig, chunks: Sequence[range]) -> tuple[int, int]:
    """Parameters that are whole while blocks compute, and in the loss.

    Without a pipeline: a block and the next, and what its chunk keeps for all of its forward and backward. With one: a
    chunk, and the next where chunks take turns.
    """
    parts = [chunk_parts(config, layers) for layers in chunks]
    if config.parallel.pipeline_model_parallel_size > 1:
        held = sum(sorted(sum(part.parameters for part in of_chunk) for of_chunk in parts)[-2:])
        return held, held
    block = max(part.parameters for part in parts[0] if part.role in ("block", "vision"))
    kept = {role: sum(part.parameters for part in parts[0] if part.role == role) for role in ("chunk", "head")}
    return 2 * block + kept["chunk"], kept["chunk"] + kept["head"]
