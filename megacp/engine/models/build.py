"""Construction of this rank's model chunks, including their initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from megacp.distributed.grid import ProcessGrid
from megacp.engine.backends.native import DTYPES
from megacp.engine.backends.select import select_backend
from megacp.engine.config.run import RunConfig
from megacp.engine.data_parallel.buckets import FlatBuckets
from megacp.engine.data_parallel.shards import ShardedParameters
from megacp.engine.layers.table import DATA, EXPERTS
from megacp.engine.models.block import offload_blocks
from megacp.engine.models.costs import loss_chunk_tokens, offloaded_blocks, stage_layers
from megacp.engine.models.init import ALL, Drawn, initialise, unsharded
from megacp.engine.models.language import LanguageModelChunk, Role

if TYPE_CHECKING:
    from megacp.engine.data_parallel.full_shard import FullShards


def build_chunks(
    config: RunConfig, grid: ProcessGrid, shards: FullShards | None = None, drawn: Drawn = ALL
) -> list[LanguageModelChunk]:
    """Build this rank's chunks in order, and initialise them from `--seed`.

    With `shards` (ZeRO-3), each part is sharded as soon as it is built, and this rank draws only
    its own shard, so at most one part is unsharded at a time. `drawn` selects the tensors to
    initialise.
    """
    backend = select_backend(config, grid)
    seed = config.training.seed

    def shard(part: nn.Module, role: Role) -> None:
        if shards is not None:
            initialise(shards.add(part, role), backend.dtype, seed, drawn)

    # one range of layers per chunk of this stage
    ranges = stage_layers(config, grid.world.size)[grid.pp.rank]
    chunks = []
    for layers in ranges:
        chunk = LanguageModelChunk(
            config.model,
            layers,
            backend,
            recompute=config.training.recompute_mode,
            tied_across=grid.pp.size > 1,
            vision=config.vision,
            made=shard,
            loss_chunk_tokens=loss_chunk_tokens(config),
        )
        chunks.append(chunk)
    if shards is None:
        for chunk in chunks:
            initialise(map(unsharded, chunk.parameters()), backend.dtype, seed, drawn)
    counts = offloaded_blocks(config, ranges)
    offload_blocks([chunk.blocks for chunk in chunks], counts, grid.device)
    return chunks


def build_sharded(
    config: RunConfig, grid: ProcessGrid, drawn: Drawn = ALL
) -> tuple[list[LanguageModelChunk], ShardedParameters]:
    """Build this rank's chunks and the object that shards their parameters and gradients.

    The type of this object depends on --data-parallel-sharding-strategy. Collective over the world.
    """
    parallel = config.parallel
    # axes over which gradients are summed and state is sharded
    reduced = {DATA: grid.over("dp", "cp")}
    if config.model.num_experts > 0:
        reduced[EXPERTS] = grid.edp
    # axes over which some gradients must also be summed: replicated weights and tied tables
    partial = {"tp": grid.tp, "embedding": grid.embedding}
    instances = parallel.num_distributed_optimizer_instances
    # a group of one rank has nothing to shard
    if parallel.sharding.parameters and any(axis.size > instances for axis in reduced.values()):
        # importing torch.distributed.fsdp takes a second, so only fully sharded runs do it
        from megacp.engine.data_parallel.full_shard import FullShards

        full = FullShards(
            reduced,
            partial,
            DTYPES[config.training.dtype],
            by_schedule=grid.pp.size > 1,
            instances=instances,
        )
        chunks = build_chunks(config, grid, full, drawn)
        return chunks, full
    chunks = build_chunks(config, grid, drawn=drawn)
    # With parts, parameters are gathered while earlier parts compute. This would not help on CPUs,
    # where the same cores communicate and compute.
    parts = _parts(chunks) if grid.device.type == "cuda" else ()
    buckets = FlatBuckets(
        chunks,
        reduced,
        partial,
        parallel.ddp_bucket_size,
        each_microbatch=parallel.sharding.gradients,
        instances=instances,
        parts=parts,
    )
    return chunks, buckets


def _parts(chunks: Sequence[LanguageModelChunk]) -> list[nn.Module]:
    """Return the parts of all chunks in the order of the forward pass, each chunk after its parts.

    This order assigns a tied table to the embedding, which comes before the head.
    """
    parts: list[nn.Module] = []
    for chunk in chunks:
        named = dict(chunk.named_children())
        for name in ("embedding", "vision"):
            if name in named:
                parts.append(named[name])
        parts += chunk.blocks
        if chunk.is_last:
            parts.append(chunk.head)
        # the chunk itself, for parameters that are not in any of its parts
        parts.append(chunk)
    return parts
