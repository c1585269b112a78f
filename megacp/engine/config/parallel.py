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
    """Number of ranks across which linear layers, the vocabulary and attention heads are split
    (tp)."""

    pipeline_model_parallel_size: Count[int] = 1
    """Number of pipeline stages into which the model's layers are split (pp)."""

    context_parallel_size: Count[int] = 1
    """Number of ranks across which the tokens of each row are split (cp)."""

    expert_model_parallel_size: Count[int] = 1
    """Number of ranks across which the experts of each layer are split (ep). It must divide both
    --num-experts and the tp x cp x dp ranks of a stage."""

    # Nothing enforces this load. The planner and the memory report assume it, and a less even
    # router needs more memory than they report.
    moe_planned_imbalance: Positive[float] = 1.25
    """Expert load to assume when planning memory and pipeline stages: tokens on the busiest rank,
    divided by tokens per rank under an even load."""

    # Pipeline
    num_virtual_stages_per_pipeline_rank: Positive[int] = 1
    """Number of model chunks per pipeline rank. With more than 1, the schedule is interleaved: it
    has a smaller bubble but sends more messages."""

    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes in the pipeline. 1f1b alternates them. zero_bubble also
    delays weight gradients until a stage would be idle, which costs memory on the last stages
    (native layers only)."""

    sequence_parallel: bool = True
    """Also shard the activations between linear layers across tp ranks. Has no effect if tp = 1."""

    # Context parallelism; the choices are the rows of TRANSPORTS and LAYOUTS, and `auto`
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "kv_exchange", "auto"] = "p2p"
    """How cp ranks exchange keys and values in attention. p2p passes them around a ring, all_gather
    gathers all of them on every rank, and a2a redistributes tokens by heads. a2a+p2p uses a2a
    within groups and a ring between groups. kv_exchange sends each rank only the keys that it
    needs. auto chooses based on the masks of the first packs."""

    hierarchical_context_parallel_sizes: Positive[tuple[int, int] | None] = None
    """Group sizes A B for a2a+p2p, where A x B = cp: A ranks exchange tokens for heads, and B
    groups form the ring."""

    cp_layout: Literal["zigzag", "zigzag_document", "contiguous", "balanced", "auto"] = "zigzag"
    """How each row's tokens are placed on cp ranks. zigzag cuts the row into 2 x cp slices, and
    zigzag_document cuts each document. contiguous gives every rank one slice. balanced gives every
    rank the same number of tokens and the same attention work, for any mask. auto chooses the
    layout together with --cp-comm-type auto."""

    dynamic_context_parallel: bool = False
    """Distribute the packs of all dp ranks together across dp x cp ranks: short documents stay on a
    few ranks, and long documents are spread across many. Needs --cp-comm-type kv_exchange and
    --cp-layout balanced."""

    vision_shards: Literal["contiguous", "replicate"] = "contiguous"
    """How images are divided among cp ranks. contiguous assigns contiguous ranges that minimise the
    largest cost per rank (precomputed in the dataset, if available). replicate lets each rank
    encode all images of its row, which avoids sending features and suits rows with few images."""

    # Data parallelism
    ddp_bucket_size: Positive[int] = 25_000_000
    """Number of gradient elements per bucket. Each bucket is reduced across dp x cp ranks while the
    backward pass is still running."""

    data_parallel_sharding_strategy: Literal["optim", "optim_grads", "optim_grads_params"] = "optim"
    """State to shard across dp x cp ranks. optim shards the optimizer state (ZeRO-1), optim_grads
    also the gradients (ZeRO-2), and optim_grads_params also the parameters, which are gathered
    block by block (ZeRO-3)."""

    num_distributed_optimizer_instances: Positive[int] = 1
    """Number of groups of data-parallel ranks that each hold a full copy of the sharded state. With
    more groups, sharding saves less memory, but parameters are exchanged only within a group. Must
    divide the data-parallel size."""

    distributed_timeout_minutes: AboveZero[float] = 10.0
    """Minutes to wait for a missing rank in a collective before the run ends with an error. Writing
    a checkpoint may take six times as long."""

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
