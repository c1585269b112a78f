"""Contradictions of what ranks share: fused gradients, groups that hold copies of one another, hidden messages."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megacp.core.config.run import RunConfig


def sharding_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """What sharding gradients or parameters rules out, and instances that leave nothing to share."""
    p, ranks = config.parallel, config.model_ranks
    strategy, instances = p.data_parallel_sharding_strategy, p.num_distributed_optimizer_instances
    if strategy != "optim" and config.training.gradient_accumulation_fusion:
        yield (
            f"--gradient-accumulation-fusion adds to whole gradients that stay, --data-parallel-sharding-strategy "
            f"{strategy} keeps none: give one of them"
        )
    if p.async_tensor_parallel and (p.tensor_model_parallel_size == 1 or not p.sequence_parallel):
        yield (
            "--async-tensor-parallel hides the messages of sequence parallelism: give --tensor-model-parallel-size "
            "above 1, and not --no-sequence-parallel"
        )
    if world % ranks > 0:
        return
    dp = config.data_parallel_size(world)
    if dp % instances > 0:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the data-parallel size {dp} "
            f"(= {world} ranks / {ranks}): give a divisor, such as {math.gcd(dp, instances)} or {dp}"
        )
    elif instances > 1 and dp * p.context_parallel_size == instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} leaves one rank in each instance (dp {dp} x cp "
            f"{p.context_parallel_size}): nothing is shared"
        )
