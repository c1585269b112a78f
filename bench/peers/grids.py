"""The table of comparisons: grids with their sizes, and the trainers (peers) that support them.

A peer's cell contains the options of its script for a grid. If a grid has no cell, the peer does
not support it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.steps import CP, LONG, PP, QUICK_SIZES, SIZES, TP
from megacp.engine.config.run import Value

CHUNKS = "num_virtual_stages_per_pipeline_rank"
SAME: dict[str, Value] = {
    "untie_embeddings_and_output_weights": True,
    "weight_decay": 0.0,
    "lr_decay_style": "constant",
}
"""Flags in addition to the benchmark's sizes; every peer supports them."""
STATES: dict[str, Value] = {
    "linear_attention_freq": "4",
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "attention_output_gate": True,
    "apply_layernorm_1p": True,
    "qk_layernorm": "head",
    "norm_epsilon": 1e-6,
    "hf_model_type": "qwen3_5_text",
}
"""Three layers with gated delta rules per attention layer, with heads of width 128."""


@dataclass(frozen=True)
class Grid:
    """One column of the table: a grid, and the settings for all trainers on it."""

    ranks: int
    values: Mapping[str, Value]
    """Our flags in addition to the sizes."""
    goal: float | None
    """Required ratio of our tokens per second to the best peer's."""

    def axes(self) -> dict[str, int]:
        """Return the sizes of the axes, with the names that the scripts use."""
        sizes = {
            short: int(str(self.values.get(flag, 1)))
            for short, flag in (("tp", TP), ("pp", PP), ("cp", CP))
        }
        return {**sizes, "dp": self.ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])}


GRIDS: dict[str, Grid] = {
    "one process": Grid(1, {}, 1.15),
    "dp 2": Grid(2, {}, 1.05),
    "tp 2": Grid(2, {TP: 2}, 1.4),
    "pp 2": Grid(2, {PP: 2}, None),
    "pp 2, zero bubble": Grid(2, {PP: 2, CHUNKS: 2, "pipeline_schedule": "zero_bubble"}, 1.15),
    "cp 2": Grid(2, {CP: 2}, 1.5),
    "cp 4": Grid(4, {CP: 4}, 1.5),
    "tp 2 x cp 2": Grid(4, {TP: 2, CP: 2}, 2.0),
    "one process, long": Grid(1, LONG, None),
    "cp 2, long": Grid(2, {**LONG, CP: 2}, 1.6),
    "one process, states": Grid(1, {**LONG, **STATES}, 1.2),
}


def sizes(quick: bool) -> dict[str, Value]:
    """Return the sizes of the model and the step, without the additions of a grid."""
    return {**(QUICK_SIZES if quick else SIZES), **SAME}


@dataclass(frozen=True)
class Peer:
    """Another trainer: its script in tools/peers, the modules that it requires, and its cells."""

    script: str
    needs: tuple[str, ...]
    """Modules that its interpreter must have; their versions are shown."""
    cells: Mapping[str, Mapping[str, Any]]
    """Options of the script by grid."""


_ONE: dict[str, dict[str, Any]] = {"one process": {}, "one process, long": {}}

PEERS: dict[str, Peer] = {
    "torchtitan": Peer(
        "run_torchtitan.py",
        ("torchtitan", "triton", "transformers", "safetensors"),
        {
            **_ONE,
            "dp 2": {"data": "replicate"},
            **{
                grid: {}
                for grid in (
                    "tp 2",
                    "pp 2",
                    "pp 2, zero bubble",
                    "cp 2",
                    "cp 4",
                    "tp 2 x cp 2",
                    "cp 2, long",
                )
            },
        },
    ),
    "torchtitan FSDP2": Peer(
        "run_torchtitan.py",
        ("torchtitan", "triton", "transformers", "safetensors"),
        {"dp 2": {"data": "shard"}},
    ),
    "torchtitan zero bubble": Peer(
        "run_torchtitan.py",
        ("torchtitan", "triton", "transformers", "safetensors"),
        {"pp 2, zero bubble": {"schedule": "InterleavedZeroBubble"}},
    ),
    "Accelerate": Peer(
        "run_accelerate.py",
        ("accelerate", "transformers"),
        {**_ONE, "one process, states": {}, "dp 2": {}, "cp 2": {}, "cp 4": {}, "cp 2, long": {}},
    ),
    "Accelerate FSDP2": Peer(
        "run_accelerate.py", ("accelerate", "transformers"), {"dp 2": {"data": "shard"}}
    ),
    "fully_shard": Peer("run_fully_shard.py", ("transformers",), {**_ONE, "dp 2": {}}),
}
