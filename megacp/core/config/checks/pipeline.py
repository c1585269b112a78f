"""Contradictions of the pipeline: stages without layers, and weight gradients that cannot be put off."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.run import RunConfig


def pipeline_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """What is wrong with the stages, their chunks and their schedule."""
    p, layers = config.parallel, config.model.num_layers
    pp, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    if layers < pp * virtual:
        yield (
            f"--num-layers {layers} is fewer than {pp * virtual} stages (--pipeline-model-parallel-size {pp} x "
            f"--num-virtual-stages-per-pipeline-rank {virtual}): every stage needs a layer"
        )
    if virtual > 1 and pp == 1:
        yield f"--num-virtual-stages-per-pipeline-rank {virtual} needs --pipeline-model-parallel-size above 1"
    if p.pipeline_schedule == "zero_bubble":
        yield from _zero_bubble(config)


def _zero_bubble(config: RunConfig) -> Iterator[str]:
    name, p = "--pipeline-schedule zero_bubble", config.parallel
    if p.pipeline_model_parallel_size == 1:
        yield f"{name} needs --pipeline-model-parallel-size above 1: one stage waits for nobody"
    if p.data_parallel_sharding_strategy != "optim":
        yield (
            f"{name} adds to whole gradients that stay, --data-parallel-sharding-strategy "
            f"{p.data_parallel_sharding_strategy} keeps none: give one of them"
        )
    if config.model.lora_rank > 0:
        yield f"{name} with --lora-rank {config.model.lora_rank}: the weights whose gradients could wait are frozen"
    if config.training.mlp_chunk_tokens > 0:
        yield (
            f"{name} with --mlp-chunk-tokens {config.training.mlp_chunk_tokens}: gradients that wait would keep what "
            "the tiles are there to free"
        )
