"""How the ranks are arranged: the grid as arithmetic, the sizes of its axes, and how context
parallelism talks.

The data-parallel size is no field: it follows from the world size, so a config cannot contradict
the number of processes it is started with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacp.engine.config.ranges import AboveZero, Count, Positive


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks share in addition to the optimizer's state."""

    gradients: bool
    parameters: bool
    searched: bool
    """Whether a search for a layout tries it; sharing only gradients is never faster than sharing
    nothing more.
    """

    @property
    def shared(self) -> str:
        """The largest thing that is shared, in a word; empty for the optimizer's state alone."""
        if self.parameters:
            return "parameters"
        return "gradients" if self.gradients else ""


SHARDINGS = {
    "optim": Sharding(gradients=False, parameters=False, searched=True),
    "optim_grads": Sharding(gradients=True, parameters=False, searched=False),
    "optim_grads_params": Sharding(gradients=True, parameters=True, searched=True),
}
"""Rows of `--data-parallel-sharding-strategy`."""


@dataclass(frozen=True)
class PipelineSchedule:
    """What follows from a pipeline schedule; `pipeline_parallel/schedules.py` has the order of its
    computes.
    """

    defers_weight_gradients: bool
    """Whether weight gradients are computed later than the gradients that other stages need."""
    searched_chunks: tuple[int, ...]
    """Numbers of model chunks per pipeline rank that a search for a layout tries."""


PIPELINE_SCHEDULES = {
    "1f1b": PipelineSchedule(defers_weight_gradients=False, searched_chunks=(1, 2, 3, 4, 6, 8)),
    "zero_bubble": PipelineSchedule(defers_weight_gradients=True, searched_chunks=(1, 2)),
}
"""Rows of `--pipeline-schedule`."""


@dataclass(frozen=True)
class ParallelConfig:
    """The grid of ranks. Data parallelism takes what remains: dp = world size / (tp x pp x cp)."""

    tensor_model_parallel_size: Count[int] = 1
    """Ranks that share each linear layer, the vocabulary and the attention heads (tp)."""

    pipeline_model_parallel_size: Count[int] = 1
    """Ranks that share the layers of the model, in stages (pp)."""

    context_parallel_size: Count[int] = 1
    """Ranks that share the tokens of each row (cp)."""

    expert_model_parallel_size: Count[int] = 1
    """Ranks among the tp x cp x dp of a stage that share the experts of each layer (ep); it divides
    that product and --num-experts."""

    moe_planned_imbalance: Positive[float] = 1.25
    """Rows of the busiest rank's experts over those of an even load, for which memory and stages
    are planned.
    """

    num_virtual_stages_per_pipeline_rank: Positive[int] = 1
    """Model chunks per pipeline rank; above 1 the interleaved 1F1B schedule runs (smaller bubble,
    more messages).
    """

    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """1f1b takes one forward and one backward in turn; zero_bubble does too, but defers weight
    gradients until a stage would wait for another: less idle time for more memory on the last
    stages (native layers)."""

    sequence_parallel: bool = True
    """Shard the activations between the linear layers over tp as well; acts only when tp is above
    1.
    """

    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "kv_exchange", "auto"] = "p2p"
    """How attention crosses the cp ranks: p2p passes keys and values around a ring, all_gather
    collects them at once, a2a swaps tokens for heads, a2a+p2p does that inside groups with a ring
    between them, kv_exchange sends each rank just the keys that it needs, auto chooses by the masks
    of the first packs."""

    hierarchical_context_parallel_sizes: Positive[tuple[int, int] | None] = None
    """Ranks of a group that swaps tokens for heads, and number of groups in the ring, under
    a2a+p2p; A x B = cp.
    """

    cp_layout: Literal["zigzag", "zigzag_document", "contiguous", "balanced", "auto"] = "zigzag"
    """Which tokens a cp rank holds: zigzag deals 2 x cp slices of the row, zigzag_document of each
    document, contiguous one stretch, balanced equal tokens and equal attention work for any mask,
    auto chooses with the transport."""

    dynamic_context_parallel: bool = False
    """Lay out the packs of all dp ranks together over dp x cp ranks: a document stays on few ranks
    when it is short and spreads over many when it is long. Needs --cp-comm-type kv_exchange and
    --cp-layout balanced."""

    vision_shards: Literal["contiguous", "replicate"] = "contiguous"
    """Which images a cp rank encodes: contiguous ranges with the least largest cost, from the
    dataset's tables where they are stored; replicate lets each rank encode all images of its row
    and sends no features (for few images)."""

    ddp_bucket_size: Positive[int] = 25_000_000
    """Gradient elements that are reduced together over dp x cp while backward still runs."""

    data_parallel_sharding_strategy: Literal["optim", "optim_grads", "optim_grads_params"] = "optim"
    """What the dp x cp ranks share instead of holding it each: optim the optimizer's state
    (ZeRO-1), optim_grads also the gradients (ZeRO-2), optim_grads_params also the parameters, which
    are gathered block by block (ZeRO-3)."""

    num_distributed_optimizer_instances: Positive[int] = 1
    """Groups of data-parallel ranks that each share among themselves, and hold copies of one
    another: less memory is saved, and parameters travel only inside of a group. It divides the
    data-parallel size."""

    distributed_timeout_minutes: AboveZero[float] = 10.0
    """Minutes after which a collective that a rank did not join ends the run; six times as many for
    its part of a checkpoint."""

    @property
    def sharding(self) -> Sharding:
        """The row of the sharding strategy."""
        return SHARDINGS[self.data_parallel_sharding_strategy]

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether the pipeline schedule computes weight gradients later than the gradients that
        other stages need.
        """
        return PIPELINE_SCHEDULES[self.pipeline_schedule].defers_weight_gradients

    @property
    def chooses_transport(self) -> bool:
        """Whether the start of a run chooses the transport by the masks of its first rows."""
        return self.cp_comm_type == "auto"

    @property
    def chooses_layout(self) -> bool:
        """Whether the start of a run chooses which tokens a rank holds by the masks of its first
        rows.
        """
        return self.cp_layout == "auto"
