"""What a run asks of its activations: how many blocks wait on the host, and tiles that 8 bits can multiply."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.run import RunConfig


def activation_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """Why blocks cannot be offloaded as asked."""
    asked, layers = config.training.activation_offload, config.model.num_layers
    stages = config.parallel.pipeline_model_parallel_size
    if asked > 1 and asked % 1 > 0:
        yield (
            f"--activation-offload {asked:g} is neither a part of a stage's blocks (below 1) nor a whole number of "
            f"them: use {int(asked)} or {int(asked) + 1}"
        )
    elif asked >= 1 and asked * stages > layers:
        yield (
            f"--activation-offload {asked:g} blocks of each of {stages} stages are {asked * stages:g}, the model has "
            f"--num-layers {layers}: use at most {layers // stages}, or a part below 1"
        )
