"""How the ranks are arranged: sizes of the tensor, pipeline and context axes and how context parallelism talks.

Key property: the data-parallel size is no field, it follows from the world size, so a config cannot contradict the
number of processes it is started with. Rejected: a field per axis including dp, which two places could set differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    """The grid of ranks. Data parallelism takes what remains: dp = world size / (tp x pp x cp)."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each linear layer, the vocabulary and the attention heads (tp)."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers of the model, in stages (pp)."""

    context_parallel_size: int = 1
    """Ranks that share the tokens of each row (cp)."""

    num_virtual_stages_per_pipeline_rank: int = 1
    """Model chunks per pipeline rank; above 1 the interleaved 1F1B schedule runs (smaller bubble, more messages)."""

    sequence_parallel: bool = True
    """Shard the activations between the linear layers over tp as well; acts only when tp is above 1."""

    cp_comm_type: Literal["p2p", "all_gather"] = "p2p"
    """How keys and values travel over cp: p2p passes them around a ring, all_gather collects them at once."""

    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Which tokens a cp rank holds: zigzag deals 2 x cp chunks so that causal work is even, contiguous one stretch."""

    ddp_bucket_size: int = 25_000_000
    """Gradient elements that are reduced together over dp x cp while backward still runs."""

    distributed_timeout_minutes: float = 10.0
    """Minutes after which a collective that a rank did not join ends the run."""
