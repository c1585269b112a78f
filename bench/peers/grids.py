"""What is compared: grids with their sizes, and which peer can train on which of them.

A peer's cells are the options that its script takes on a grid; a grid without a cell is one that it
cannot do.
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
"""Beside the sizes of the benchmark: what every peer can be told as well."""
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
"""Three gated delta rules to a layer of attention, heads of 128."""


@dataclass(frozen=True)
class Grid:
    """One column: a grid, and what all trainers are given on it."""

    ranks: int
    values: Mapping[str, Value]
    """Our flags beside the sizes."""
    goal: float | None
    """Least ratio of our tokens a second to the best peer's."""

    def axes(self) -> dict[str, int]:
        """Sizes of the axes by the names that scripts know."""
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
    """Of the model and the step, before a grid's own."""
    return {**(QUICK_SIZES if quick else SIZES), **SAME}


@dataclass(frozen=True)
class Peer:
    """Another trainer: its script in tools/peers, what must be importable for it, and its cells."""

    script: str
    needs: tuple[str, ...]
    """Modules that its interpreter must have; also the distributions whose versions are shown."""
    cells: Mapping[str, Mapping[str, Any]]
    """Grid to options of the script."""


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
