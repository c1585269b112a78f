"""Flags for the grid of ranks: axis sizes, pipeline schedule and context-parallel communication.

The data-parallel size is not a flag: it follows from the world size, so a config cannot contradict
the number of processes that a launcher starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacp.engine.config.ranges import AboveZero, Count, Positive


@dataclass(frozen=True)
class Sharding:
    """Tensors that data-parallel ranks shard in addition to the optimizer state."""

    # the optimizer state has no field because every strategy shards it
    gradients: bool
    parameters: bool
    searched: bool
    """Whether the planner tries this strategy. It skips a strategy that shards gradients but not
    parameters, because it is never faster than sharding only the optimizer state.
    """

    @property
    def shared(self) -> str:
        """`parameters` if they are sharded, else `gradients` if they are; otherwise empty."""
        if self.parameters:
            return "parameters"
        return "gradients" if self.gradients else ""


SHARDINGS = {
    "optim": Sharding(gradients=False, parameters=False, searched=True),
    "optim_grads": Sharding(gradients=True, parameters=False, searched=False),
    "optim_grads_params": Sharding(gradients=True, parameters=True, searched=True),
}
"""Choices of `--data-parallel-sharding-strategy`."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Properties of a pipeline schedule. `pipeline_parallel/schedules.py` defines its order."""

    defers_weight_gradients: bool
    """Whether stages defer weight gradients until after the input gradients for other stages."""
    searched_chunks: tuple[int, ...]
    """Numbers of model chunks per pipeline rank that the planner tries."""


PIPELINE_SCHEDULES = {
    "1f1b": PipelineSchedule(defers_weight_gradients=False, searched_chunks=(1, 2, 3, 4, 6, 8)),
    "zero_bubble": PipelineSchedule(defers_weight_gradients=True, searched_chunks=(1, 2)),
}
"""Choices of `--pipeline-schedule`."""


@dataclass(frozen=True)
class ParallelConfig:
    """Flags for the grid of ranks. The data-parallel size is dp = world / (tp x pp x cp)."""

    # Axes of the grid
    tensor_model_parallel_size: Count[int] = 1
    """Tensor-parallel size (tp): number of ranks that split each linear layer, the vocabulary and
    the attention heads."""

    pipeline_model_parallel_size: Count[int] = 1
    """Pipeline-parallel size (pp): number of ranks that split the layers into stages."""

    context_parallel_size: Count[int] = 1
    """Context-parallel size (cp): number of ranks that split the tokens of each row."""

    expert_model_parallel_size: Count[int] = 1
    """Expert-parallel size (ep): number of ranks that split the experts of each layer. It must
    divide both --num-experts and the tp x cp x dp ranks of a stage."""

    # Nothing enforces this load. The planner and the memory report assume it, and a less even
    # router needs more memory than they report.
    moe_planned_imbalance: Positive[float] = 1.25
    """Expert load to assume when planning memory and pipeline stages: tokens on the busiest rank
    divided by the average per rank."""

    # Pipeline
    num_virtual_stages_per_pipeline_rank: Positive[int] = 1
    """Model chunks per pipeline rank. With more than 1, the schedule is interleaved, which shrinks
    the pipeline bubble but sends more messages."""

    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes. 1f1b alternates them. zero_bubble also delays weight
    gradients until a stage would otherwise be idle, which needs more memory on the last stages
    (native layers only)."""

    sequence_parallel: bool = True
    """Also shard the activations between linear layers across tp ranks. Has no effect if tp is 1.
    """

    # Context parallelism; the choices are the rows of TRANSPORTS and LAYOUTS, and `auto`
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "kv_exchange", "auto"] = "p2p"
    """How cp ranks exchange keys and values for attention. p2p passes them around a ring;
    all_gather collects all of them on every rank; a2a exchanges tokens for heads; a2a+p2p uses a2a
    within groups and a ring between groups; kv_exchange sends each rank only the keys and values
    that it needs. auto chooses based on the masks of the first rows."""

    hierarchical_context_parallel_sizes: Positive[tuple[int, int] | None] = None
    """Group sizes A B for --cp-comm-type a2a+p2p, with A x B = cp: A ranks exchange tokens for
    heads, and B groups form a ring."""

    cp_layout: Literal["zigzag", "zigzag_document", "contiguous", "balanced", "auto"] = "zigzag"
    """How the tokens of a row are assigned to cp ranks. zigzag cuts the row into 2 x cp slices and
    gives each rank an early and a late one; zigzag_document does so for each document. contiguous
    gives every rank one slice. balanced gives every rank the same number of tokens and the same
    attention work, for any mask. auto chooses the best layout for the transport and the first
    rows."""

    dynamic_context_parallel: bool = False
    """Distribute the packs of all dp ranks jointly across dp x cp ranks, so that short documents
    stay on few ranks and long documents use many. Needs --cp-comm-type kv_exchange and --cp-layout
    balanced."""

    vision_shards: Literal["contiguous", "replicate"] = "contiguous"
    """How images are distributed across cp ranks. contiguous assigns contiguous ranges that
    minimise the largest cost per rank (precomputed in the dataset, if available). replicate makes
    each rank encode all images of its row and sends no features, which suits rows with few images.
    """

    # Data parallelism
    ddp_bucket_size: Positive[int] = 25_000_000
    """Gradient elements per bucket. Each bucket is reduced over dp x cp while the backward pass is
    still running."""

    data_parallel_sharding_strategy: Literal["optim", "optim_grads", "optim_grads_params"] = "optim"
    """What to shard across the dp x cp ranks: optim shards the optimizer state (ZeRO-1);
    optim_grads also shards the gradients (ZeRO-2); optim_grads_params also shards the parameters,
    which are gathered block by block (ZeRO-3)."""

    num_distributed_optimizer_instances: Positive[int] = 1
    """Number of groups of data-parallel ranks, each with a full copy of the sharded state. More
    groups save less memory but keep parameter exchange within a group. Must divide the
    data-parallel size."""

    distributed_timeout_minutes: AboveZero[float] = 10.0
    """Minutes after which the run ends if some rank has not joined a collective. The limit for
    writing a checkpoint is six times as long."""

    @property
    def sharding(self) -> Sharding:
        """Properties of the chosen `data_parallel_sharding_strategy`."""
        return SHARDINGS[self.data_parallel_sharding_strategy]

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether the schedule computes weight gradients later than input gradients."""
        return PIPELINE_SCHEDULES[self.pipeline_schedule].defers_weight_gradients

    @property
    def chooses_transport(self) -> bool:
        """Whether the run chooses its transport at the start, based on the first rows' masks."""
        return self.cp_comm_type == "auto"

    @property
    def chooses_layout(self) -> bool:
        """Whether the run chooses its token layout at the start, based on the first rows' masks."""
        return self.cp_layout == "auto"
