"""From a config and a grid to this rank's model chunks, filled with the run's initial weights."""

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
    """This rank's chunks in order, initialised from `--seed`; with `shards` one part is whole at a
    time, and of each this rank draws what it keeps.
    """
    backend, seed = select_backend(config, grid), config.training.seed

    def shard(part: nn.Module, role: Role) -> None:
        if shards is not None:
            initialise(shards.add(part, role), backend.dtype, seed, drawn)

    chunks = [
        LanguageModelChunk(
            config.model,
            layers,
            backend,
            recompute=config.training.recompute_mode,
            tied_across=grid.pp.size > 1,
            vision=config.vision,
            made=shard,
            loss_chunk_tokens=loss_chunk_tokens(config),
        )
        for layers in stage_layers(config, grid.world.size)[grid.pp.rank]
    ]
    for chunk in chunks if shards is None else ():
        initialise(map(unsharded, chunk.parameters()), backend.dtype, seed, drawn)
    counts = offloaded_blocks(config, stage_layers(config, grid.world.size)[grid.pp.rank])
    offload_blocks([chunk.blocks for chunk in chunks], counts, grid.device)
    return chunks


def build_sharded(
    config: RunConfig, grid: ProcessGrid, drawn: Drawn = ALL
) -> tuple[list[LanguageModelChunk], ShardedParameters]:
    """This rank's chunks and what shards them, by `--data-parallel-sharding-strategy`. Collective
    over the world.
    """
    parallel = config.parallel
    reduced = {DATA: grid.over("dp", "cp")} | (
        {EXPERTS: grid.edp} if config.model.num_experts > 0 else {}
    )
    partial = {"tp": grid.tp, "embedding": grid.embedding}
    instances = parallel.num_distributed_optimizer_instances
    # one rank has nothing to share
    if parallel.sharding.parameters and any(axis.size > instances for axis in reduced.values()):
        # it imports torch.distributed.fsdp: a second, which only a fully sharded run should take
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
    buckets = FlatBuckets(
        chunks,
        reduced,
        partial,
        parallel.ddp_bucket_size,
        each_microbatch=parallel.sharding.gradients,
        instances=instances,
        parts=_parts(chunks)
        if grid.device.type == "cuda"
        else (),  # CPU ranks send with the cores that compute
    )
    return chunks, buckets


def _parts(chunks: Sequence[LanguageModelChunk]) -> list[nn.Module]:
    """Modules that run all of the chunks, in the order of the forward; a whole chunk stands behind
    its parts.

    A table that embeds and ends the model is thus the embedding's.
    """
    parts: list[nn.Module] = []
    for chunk in chunks:
        named = dict(chunk.named_children())
        parts += [named[name] for name in ("embedding", "vision") if name in named]
        parts += [*chunk.blocks, *([chunk.head] if chunk.is_last else []), chunk]
    return parts
