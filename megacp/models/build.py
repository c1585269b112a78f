"""From a config and a grid to this rank's model chunks, cut by cost and filled with the run's initial weights.

The layers of a stage are a pure function of the config, so the dry run prints the stages that a run builds. Stages hold
unequal numbers of layers where the head costs more than a layer.
"""

from __future__ import annotations

from megacp.backends.select import select_backend
from megacp.config.run import RunConfig
from megacp.distributed.grid import GridShape, ProcessGrid
from megacp.models.block import offload_blocks
from megacp.models.init import initialise
from megacp.models.language import LanguageModelChunk
from megacp.pipeline_parallel.partition import partition, stages
from megacp.planner.memory import offloaded_blocks
from megacp.planner.vision import run_stage_costs


def grid_shape(config: RunConfig, world_size: int) -> GridShape:
    """The grid of a checked config on `world_size` ranks."""
    parallel = config.parallel
    return GridShape(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        dp=config.data_parallel_size(world_size),
        pp=parallel.pipeline_model_parallel_size,
    )


def stage_layers(config: RunConfig) -> list[list[range]]:
    """`[stage][chunk]` -> the global layers of that chunk; cut by the FLOPs of training on one causal pack."""
    num_stages = config.parallel.pipeline_model_parallel_size
    num_chunks = config.parallel.num_virtual_stages_per_pipeline_rank
    ranges = partition(*run_stage_costs(config), num_stages * num_chunks)
    return stages(ranges, num_stages, num_chunks)


def build_chunks(config: RunConfig, grid: ProcessGrid) -> list[LanguageModelChunk]:
    """This rank's chunks in order, initialised from `--seed`."""
    backend = select_backend(config, grid)
    chunks = [
        LanguageModelChunk(
            config.model,
            layers,
            backend,
            recompute=config.training.recompute_granularity,
            tied_across=grid.pp.size > 1,
            vision=config.vision,
        )
        for layers in stage_layers(config)[grid.pp.rank]
    ]
    for chunk in chunks:
        initialise(chunk, config.training.seed)
    counts = offloaded_blocks(config, stage_layers(config)[grid.pp.rank])
    offload_blocks([chunk.blocks for chunk in chunks], counts, grid.device)
    return chunks
