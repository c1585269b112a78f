"""Flags of the device grid: its axis sizes, the pipeline schedule, and context-parallel exchange.

The data-parallel size is not a flag. It follows from the world size, so a config cannot contradict
the number of processes that a launcher starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacp.engine.config.ranges import AboveZero, Count, Positive


@dataclass(frozen=True)
class Sharding:
    """Tensors that data-parallel ranks shard in addition to the optimizer state."""

    # ZeRO shards the optimizer state in every strategy, so it has no field here
    gradients: bool
    parameters: bool
    searched: bool
    """Whether the layout planner tries this strategy. It skips sharded gradients without sharded
    parameters, which are never faster than sharding only the optimizer state.
    """

    @property
    def shared(self) -> str:
        """`parameters`, else `gradients`; empty if only the optimizer state is sharded."""
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
    """Properties of a pipeline schedule. `pipeline_parallel/schedules.py` defines its order."""

    defers_weight_gradients: bool
    """Whether stages compute weight gradients after the input gradients for other stages."""
    searched_chunks: tuple[int, ...]
    """Numbers of model chunks per pipeline rank that the layout planner tries."""


PIPELINE_SCHEDULES = {
    "1f1b": PipelineSchedule(defers_weight_gradients=False, searched_chunks=(1, 2, 3, 4, 6, 8)),
    "zero_bubble": PipelineSchedule(defers_weight_gradients=True, searched_chunks=(1, 2)),
}
"""Rows of `--pipeline-schedule`."""


@dataclass(frozen=True)
class ParallelConfig:
    """The grid of ranks. The remaining factor is data parallelism: dp = world / (tp x pp x cp)."""

    # Axes of the grid
    tensor_model_parallel_size: Count[int] = 1
    """Ranks over which each linear layer, the vocabulary and the attention heads are split (tp)."""

    pipeline_model_parallel_size: Count[int] = 1
    """Number of pipeline stages that the layers of the model are split into (pp)."""

    context_parallel_size: Count[int] = 1
    """Ranks over which the tokens of each row are split (cp)."""

    expert_model_parallel_size: Count[int] = 1
    """Ranks over which the experts of each layer are split (ep). It must divide both --num-experts
    and the tp x cp x dp ranks of a stage."""

    # Nothing enforces this load. The planner and the memory report assume it, and a busier router
    # needs more memory than they state.
    moe_planned_imbalance: Positive[float] = 1.25
    """Expert load to plan memory and pipeline stages for: tokens on the busiest rank, divided by
    the tokens of an even load."""

    # Pipeline
    num_virtual_stages_per_pipeline_rank: Positive[int] = 1
    """Model chunks per pipeline rank. More than 1 interleaves the schedule: smaller bubble, more
    messages."""

    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes. 1f1b alternates them. zero_bubble also delays weight
    gradients until a stage would be idle, which costs memory on the last stages (native layers
    only)."""

    sequence_parallel: bool = True
    """Also shard the activations between linear layers over tp; has an effect only if tp > 1."""

    # Context parallelism; the choices are the rows of TRANSPORTS and LAYOUTS, and `auto`
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "kv_exchange", "auto"] = "p2p"
    """Communication of attention between cp ranks. p2p passes keys and values around a ring,
    all_gather collects all of them, and a2a exchanges tokens for heads. a2a+p2p does this within
    groups and uses a ring between groups. kv_exchange sends each rank only the keys that it needs.
    auto chooses by the masks of the first packs."""

    hierarchical_context_parallel_sizes: Positive[tuple[int, int] | None] = None
    """Group sizes A B of a2a+p2p: A ranks exchange tokens for heads, B groups form the ring;
    A x B = cp."""

    cp_layout: Literal["zigzag", "zigzag_document", "contiguous", "balanced", "auto"] = "zigzag"
    """Assignment of tokens to cp ranks. zigzag cuts the row into 2 x cp slices, and zigzag_document
    each document. contiguous gives every rank one slice. balanced gives every rank the same number
    of tokens and the same attention work, for any mask. auto is chosen together with
    --cp-comm-type."""

    dynamic_context_parallel: bool = False
    """Distribute the packs of all dp ranks together over dp x cp ranks: short documents stay on few
    ranks and long ones spread over many. Needs --cp-comm-type kv_exchange and --cp-layout
    balanced."""

    vision_shards: Literal["contiguous", "replicate"] = "contiguous"
    """Distribution of images over cp ranks. contiguous assigns contiguous ranges that minimise the
    largest cost per rank (precomputed in the dataset, if available). replicate lets each rank
    encode all images of its row and sends no features, which suits rows with few images."""

    # Data parallelism
    ddp_bucket_size: Positive[int] = 25_000_000
    """Gradient elements in one bucket. Each bucket is reduced over dp x cp while backward still
    runs."""

    data_parallel_sharding_strategy: Literal["optim", "optim_grads", "optim_grads_params"] = "optim"
    """State to shard over the dp x cp ranks: optim shards the optimizer state (ZeRO-1), optim_grads
    also the gradients (ZeRO-2), optim_grads_params also the parameters, which are gathered block by
    block (ZeRO-3)."""

    num_distributed_optimizer_instances: Positive[int] = 1
    """Groups of data-parallel ranks that each hold a full copy of the sharded state. More groups
    save less memory but keep parameter exchange within a group. Must divide the data-parallel
    size."""

    distributed_timeout_minutes: AboveZero[float] = 10.0
    """Minutes before a collective that some rank has not joined ends the run. Writing a checkpoint
    may take six times longer."""

    @property
    def sharding(self) -> Sharding:
        """Row of `SHARDINGS` for the chosen strategy."""
        return SHARDINGS[self.data_parallel_sharding_strategy]

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether the schedule computes weight gradients after the gradients for other stages."""
        return PIPELINE_SCHEDULES[self.pipeline_schedule].defers_weight_gradients

    @property
    def chooses_transport(self) -> bool:
        """Whether the run chooses the transport at its start, by the masks of its first rows."""
        return self.cp_comm_type == "auto"

    @property
    def chooses_layout(self) -> bool:
        """Whether the run chooses the token layout at its start, by the masks of its first rows."""
        return self.cp_layout == "auto"
