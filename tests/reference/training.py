"""Helpers that run a `ParallelModel` in a test and return its contents as global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megacp.distributed.grid import ProcessGrid
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.data_parallel.shards import ParameterSlice
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.step import ParallelModel
from tests.reference.packs import random_batch
from tests.reference.sharding import Pieces

Values = dict[str, Any]

SMALL: Values = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "vocab_size": 53,
    "seq_length": 48,
    "dtype": "float64",
    "init_method_std": 0.1,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "adam_eps": 1e-4,
    "clip_grad": 0.5,
}
"""A model small enough for every grid.

AdamW's epsilon is large: with 1e-8, only the sign of a gradient near 0 matters, and the last bit of
a sum could change a whole step. The gradients are above the clipping norm.
"""

GEMMA: Values = {
    "norm_position": "both",
    "apply_layernorm_1p": True,
    "mlp_activation": "geglu",
    "qk_layernorm": "head",
    "kv_channels": 6,
    "window_size": 9,
    "window_attn_skip_freq": "2",
    "window_rotary_base": 300.0,
    "rope_scaling": "linear",
    "rope_scaling_factor": 4.0,
    "softmax_scale": 0.3,
    "embedding_multiplier": 6.0,
}
"""Features of Gemma 3 that the other models lack."""
QWEN3_5: Values = {
    "linear_attention_freq": "2",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "attention_output_gate": True,
    "rotary_percent": 0.5,
    "apply_layernorm_1p": True,
    "qk_layernorm": "head",
    "kv_channels": 8,
}
"""Features of Qwen3.5's text model, with a gated delta rule in every second layer."""

MAMBA2: Values = {
    **{name: value for name, value in QWEN3_5.items() if name.startswith("linear_")},
    "linear_attention_rule": "mamba2",
}

MOE: Values = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 20,
    "moe_layer_freq": "[1,1,0]",
}
"""Experts in two of three layers."""
GPT_OSS: Values = {
    **{
        "mlp_activation": "clamped_swiglu",
        "softmax_type": "learnable",
        "window_size": 9,
        "window_attn_skip_freq": "2",
    },
    **dict.fromkeys(
        ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias", "moe_router_bias"), True
    ),
    **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_positions": 4000},
    **{
        **MOE,
        "moe_layer_freq": "1",
        "yarn_correction_range_round_to_int": False,
        "init_method_std": 0.4,
    },
}
SIGMOID: Values = {
    **{"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    **{"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_bias_update_rate": 0.05},
}
BALANCE: Values = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}

AXIS_FLAGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def config_of(values: Mapping[str, Any], shape: Mapping[str, int]) -> RunConfig:
    """Return the config with some flat values on a grid."""
    axes = {flag: shape.get(axis, 1) for axis, flag in AXIS_FLAGS.items()}
    return with_values(RunConfig(), {**SMALL, **values, **axes})


def step_batches(
    count: int, seed: int, vocab_size: int = 53, tokens: int = 48
) -> list[PackedBatch]:
    """Return packs of different lengths with documents, branches, spans, padding and unequal loss
    weights.

    Some weights are 0. For an even seed, the fourth pack has only padding.
    """
    rng = np.random.default_rng(seed)
    last = {"padding": True} if seed % 2 else {"documents": 0}
    kinds = [{}, {"depth": 4, "images": True}, {"images": True, "branches": True}, last]
    return [
        random_batch(
            rng,
            tokens - int(rng.integers(0, 14)),
            vocab_size,
            number=1000 * seed + i,
            **{"documents": 3, **kinds[i % 4]},
        )
        for i in range(count)
    ]


def pieces_of_slices(slices: Iterable[ParameterSlice]) -> Pieces:
    """Return flat slices of local parameters as pieces of global tensors, NaN outside the slices.

    Padding rows of the vocabulary are in no piece.
    """
    whole: dict[int, tuple[ParameterSlice, torch.Tensor]] = {}
    for part in slices:
        first, flat = whole.setdefault(
            id(part.spec), (part, torch.full((math.prod(part.shape),), torch.nan).double())
        )
        flat[part.start : part.start + part.values.numel()] = part.values
    return {
        (piece.name, piece.offsets): (
            piece.global_shape,
            piece.of(flat.view(part.shape)).numpy().copy(),
        )
        for part, flat in whole.values()
        for piece in part.spec.pieces
    }


def gradient_pieces(model: ParallelModel) -> Pieces:
    """Return the summed gradients for this rank's optimizer; ranks of dp x cp have different ones."""
    return pieces_of_slices(model.parameters.gradient_slices())


def parameter_pieces(model: ParallelModel) -> Pieces:
    """Return this rank's parts of the global weights, and of other tensors in checkpoints."""
    return pieces_of_slices([*model.parameters.parameters_held(), *model.balance.slices()])


def train(
    grid: ProcessGrid, config: RunConfig, steps: Sequence[Sequence[PackedBatch]]
) -> tuple[list[tuple[float, ...]], list[Pieces], Pieces, float]:
    """Train some steps.

    Return loss, gradient norm and expert figures of each step, the gradients of each step, the
    final weights, and the validation loss after the first step. A validation after one step would
    show stale weights, and later steps would show its side effects.
    """
    model = ParallelModel(config, grid)
    reports, gradients, validation = [], [], 0.0
    for number, batches in enumerate(steps, 1):
        mine = batches[grid.dp.rank :: grid.dp.size]
        denominator = sum(batch.weight_sum for batch in batches)
        tokens = sum(batch.real_tokens for batch in batches)
        loss = model.gradients(mine, number, denominator, tokens)
        gradients.append(gradient_pieces(model))
        norm = model.optimizer.step(config.training.lr)
        reports.append((loss, norm, *model.balance.settle(tokens).values()))
        model.balance.correct()
        validation = model.evaluate(mine, denominator) if number == 1 else validation
    return reports, gradients, parameter_pieces(model), validation
