"""The Transformer Engine backend: NVIDIA's linears and norms, fused, its attention with context
parallelism, FP8.

Parameters carry the same specs as the native ones, so optimizer and checkpoints cannot tell the
backends apart. Vocabulary tables, LayerNorm and norms over the heads of several ranks stay native,
vision towers stay out of 8 bits. A row with another mask or order than its attention takes uses our
transports, and one line says why.

Under selective recomputation and beside low-rank pairs norms and linears stay apart: the fused
modules store the outputs of norm and SwiGLU, where a recipe or a pair belongs between two steps.

Only this file and attention/ops/cudnn.py import transformer_engine, inside functions. Arguments go
by keyword, because releases insert parameters in the middle; tests bind every call to the real
signatures.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.cudnn import engine_problem, selector_refusal
from megacp.attention.ops.kernel import Caller, Heads, at_once
from megacp.distributed.grid import Axis, ProcessGrid, connect
from megacp.distributed.heap import set_defaults
from megacp.engine.backends.native import NativeBackend, NormSpec, VisionPart
from megacp.engine.backends.support import FP8_MULTIPLES, attention_reasons
from megacp.engine.backends.thd import PackedAttention, window_of
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.data_parallel.parameter import ParameterSpec
from megacp.engine.layers.stack import layers_of
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec, linear_specs
from megacp.engine.tensor_parallel.lora import ColumnPairs, RowPair, adapted
from megacp.engine.tensor_parallel.parameters import LinearOptions, parameter_spec
from megacp.engine.tensor_parallel.weight_gradients import WeightGradients

SETTINGS = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0", "NVTE_BATCH_MHA_P2P_COMM": "1"}
"""Environment variables. By two of them attention that cuDNN cannot do raises instead of becoming
another kernel; one is read when the package is imported. By the third the ring's messages use the
group's communicator, not each pair's.
"""


def package_problem() -> str | None:
    """Why Transformer Engine cannot be used in this environment; None when it can. Imports it where
    it is installed.
    """
    set_defaults(SETTINGS)
    return engine_problem()


def fp8_problem(name: str) -> str | None:
    """Why this GPU does not have the recipe of a `--fp8` value; None when it has."""
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    asked = is_fp8_block_scaling_available if name == "blockwise" else is_fp8_available
    available, reason = asked(return_reason=True)
    return None if available else reason


def _leave(weight: torch.Tensor) -> None:
    """Initial weights come from the specs."""


def _linear_settings(bias: bool, options: LinearOptions) -> dict[str, Any]:
    """What every module with linears takes: how it is cut, whether gradients go to the buckets,
    dtype and device.
    """
    return {
        "sequence_parallel": options.sequence_parallel,
        "fuse_wgrad_accumulation": options.weight_gradients is not None and options.trained,
        "tp_group": options.tp.group,
        "tp_size": options.tp.size,
        "init_method": _leave,
        "bias": bias,
        "params_dtype": options.dtype,
        "device": options.device,
    }


class Fused(nn.Module):
    """`te.LayerNormLinear` or `te.LayerNormMLP`: `save` is not asked, they store what their
    backward needs.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        return self.layer(x)


class EngineLinear(nn.Module):
    """`te.Linear` in a `parallel_mode`: `column` is `x[t/tp, h] -> y[t, f/tp]`, `row` is `x[t,
    f/tp] -> y[t/tp, h]`.

    Without sequence parallelism t/tp is t.
    """

    def __init__(self, parallel_mode: str, linear: LinearSpec, options: LinearOptions) -> None:
        from transformer_engine.pytorch import Linear

        super().__init__()
        self.linear = Linear(
            in_features=linear.first.inputs,
            out_features=linear.out_features,
            parallel_mode=parallel_mode,
            **_linear_settings(linear.first.bias, options),
        )
        self.linear.requires_grad_(options.trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, its communication and the bias; more than two dims only without sequence
        parallelism.
        """
        if x.dim() == 2:
            return self.linear(x)
        return self.linear(x.flatten(0, -2)).unflatten(
            0, x.shape[:-1]
        )  # [..., h] -> [n, h] -> [n, f] -> [..., f]


class HighPrecision(nn.Module):
    """A layer that stays out of 8 bits: patches of a crop and pooled windows are no multiple of
    what those need.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with eight_bits_off():
            return self.layer(x)


def eight_bits_off() -> AbstractContextManager[Any]:
    """A context without FP8, inside or outside of one with it."""
    from transformer_engine.pytorch import autocast

    return autocast(enabled=False)


def fp8_recipe(name: str, reduce_amax: bool) -> Any:
    """The recipe of a `--fp8` value; `reduce_amax` when other ranks share the largest values."""
    from transformer_engine.common import recipe

    makers = {
        "delayed": lambda: recipe.DelayedScaling(
            fp8_format=recipe.Format.HYBRID, reduce_amax=reduce_amax
        ),
        "current": lambda: recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID),
        "blockwise": lambda: recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3),
    }
    return makers[name]()


def packed_attention(
    model: ModelConfig, tp: Axis, cp: Axis, comm_type: str, inner: int, device: torch.device
) -> PackedAttention:
    """`DotProductAttention` for all layers of a model; `comm_type` and `inner` (ranks of the
    all-to-all in a2a+p2p) matter from two cp ranks on. Collective for a2a+p2p.
    """
    from transformer_engine.pytorch import DotProductAttention

    scale = model.attention_scale
    attention = DotProductAttention(
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.head_dim,
        num_gqa_groups=model.query_groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        tp_size=tp.size,
        tp_group=tp.group,
        softmax_scale=scale,
    )
    return PackedAttention(attention, scale, cp, comm_type, inner, device)


def selector_problem(
    packed: PackedAttention,
    heads: Heads,
    dtype: torch.dtype,
    tokens: int,
    longest: int,
    window: int = 0,
) -> str | None:
    """Why Transformer Engine has no fused kernel for rows of `tokens` with sequences of up to
    `longest`; None: it has.

    Its selector is asked what each forward will ask, where a refusal is an error, perhaps hours
    into a run. It bounds deterministic kernels by sequences x longest^2: most where two thirds of
    the row are one document.
    """
    deterministic, least = packed.attention.deterministic, packed.least_sequence
    for length in (longest, min(longest, 2 * tokens // 3)) if deterministic else (longest,):
        length = -(-length // least) * least
        count = 1 + max(0, tokens - length) // least
        refusal = selector_refusal(
            heads,
            qkv_dtype=dtype,
            batch_size=count,
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), length),
            **dict.fromkeys(
                ("num_tokens_q", "num_tokens_kv"), max(tokens, length) // packed.cp["cp_size"]
            ),
            attn_mask_type="padding_causal",
            window_size=window_of(window),
            pad_between_seqs=True,
            deterministic=deterministic,
            softmax_scale=packed.scale,
            **packed.cp,
        )
        if refusal is not None:
            return (
                f"Transformer Engine has no kernel for rows (sequences {count}, longest "
                f"{length}): {refusal}"
            )
    return None


def fused_adam(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """`FusedAdam` with decoupled decay."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params=groups, betas=betas, eps=eps, adam_w_mode=True, bias_correction=True)


class TransformerEngineBackend(NativeBackend):
    """A `NativeBackend` of the engine's layers; `support.layer_reasons` must have no reason against
    `config`.
    """

    name = "transformer_engine"

    def __init__(self, grid: ProcessGrid, config: RunConfig) -> None:
        training, parallel = config.training, config.parallel
        # its linears have a kernel that adds to gradients which stay; this switches it on
        adds = None if parallel.sharding.gradients else WeightGradients()
        super().__init__(grid, config, adds)
        self.adamw = fused_adam
        self.fp8, self.token_multiple = training.fp8, FP8_MULTIPLES[training.fp8]
        self.apart = training.recompute_mode.repeats_activations or self.lora is not None
        self.in_tower = False
        self.norms = {
            "normalization": "RMSNorm",
            "zero_centered_gamma": config.model.apply_layernorm_1p,
        }
        amax = grid.over("tp", "cp")
        self.amax_group = amax.group
        self.recipe = None if self.fp8 == "off" else fp8_recipe(self.fp8, amax.size > 1)
        self.packed = self._packed_attention(grid, config)
        if self.fp8 == "delayed":
            connect([amax], grid.device)  # in no step of another run
            self.tell(
                "fp8: delayed scales begin at 1 here, also in a resumed run: they are in no checkpoint"
            )
        self._tell_of_norms(config)

    def _packed_attention(self, grid: ProcessGrid, config: RunConfig) -> PackedAttention | None:
        """Return the engine's attention; None, with a line that says why, if it cannot run for this
        config.
        """
        parallel = config.parallel
        reasons = "; ".join(attention_reasons(config))
        if not reasons:
            inner = (parallel.hierarchical_context_parallel_sizes or (1, 1))[0]
            packed = packed_attention(
                config.model, grid.tp, grid.cp, parallel.cp_comm_type, inner, grid.device
            )
            pack = config.data.seq_length
            tokens = pack * config.training.micro_batch_size
            windows = {layer.window for layer in layers_of(config.model)}
            asked = (packed, self.heads, self.dtype, tokens, pack)
            refusals = {
                selector_problem(*asked, window)
                for window in windows
                if not window or packed.windows
            }
            reasons = "; ".join(filter(None, refusals))
            if not reasons:
                return packed
        self.tell(f"attention: ours for every row, {reasons}")
        return None

    def _tell_of_norms(self, config: RunConfig) -> None:
        """Say which norms are not fused with a linear, or are ours, and by which flag."""
        if self.lora:
            self._tell_apart("--lora-rank")
        elif self.apart:
            self._tell_apart(f"--recompute-granularity {config.training.recompute_granularity}")
        elif not config.model.has_input_norms:
            self._tell_apart("--norm-position")
        if config.model.qk_layernorm == "all_heads":
            self.tell("q/k norms: ours, Transformer Engine's has no sum over tp ranks")

    def _tell_apart(self, why: str) -> None:
        self.tell(f"layers: Transformer Engine's RMSNorm and Linear apart, by {why}")

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        return adapted(self._linear("column", linear), linear, ColumnPairs, self.lora, self.options)

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        return adapted(self._linear("row", linear), linear, RowPair, self.lora, self.options)

    def _linear(self, parallel_mode: str, linear: LinearSpec) -> nn.Module:
        layer = EngineLinear(parallel_mode, linear, self.options)
        weight, *bias = linear_specs(linear, self.options)
        self.options.attach(layer.linear.weight, weight)
        if bias:
            self.options.attach(layer.linear.bias, bias[0])
        return HighPrecision(layer) if self.in_tower and self.fp8 != "off" else layer

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        if norm is None or self.apart:
            return super().norm_column_linear(norm, linear)
        from transformer_engine.pytorch import LayerNormLinear

        layer = LayerNormLinear(
            in_features=linear.first.inputs,
            out_features=linear.out_features,
            eps=norm.epsilon,
            parallel_mode="column",
            **self.norms,
            **_linear_settings(linear.first.bias, self.options),
        )
        specs = zip(("weight", "bias"), linear_specs(linear, self.options), strict=False)
        return self._fused(layer, {"layer_norm_weight": self._norm_spec(norm), **dict(specs)})

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        """A rank's `fc1_weight` holds its rows of `gate` above those of `up`, as ours."""
        if norm is None or self.apart:
            return super().norm_mlp(norm, gate_up, down)
        from transformer_engine.pytorch import LayerNormMLP

        layer = LayerNormMLP(
            hidden_size=gate_up.first.inputs,
            ffn_hidden_size=down.first.inputs,
            eps=norm.epsilon,
            activation=self.activation,
            output_layer_init_method=_leave,
            set_parallel_mode=True,
            **self.norms,
            **_linear_settings(gate_up.first.bias, self.options),
        )
        specs = {"layer_norm_weight": self._norm_spec(norm)}
        for name, linear in (("fc1", gate_up), ("fc2", down)):
            specs |= zip(
                (f"{name}_weight", f"{name}_bias"), linear_specs(linear, self.options), strict=False
            )
        return self.tiled(self._fused(layer, specs))

    def _norm_spec(self, norm: NormSpec, partial: bool | None = None) -> ParameterSpec:
        return parameter_spec([norm.weight(self.norm_init)], self.options, partial_over_tp=partial)

    def _fused(self, layer: nn.Module, specs: dict[str, ParameterSpec]) -> Fused:
        for name, spec in specs.items():
            self.options.attach(getattr(layer, name), spec)
        return Fused(layer.requires_grad_(self.options.trained))

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        if norm.gated:
            return super().norm(norm, over_heads=over_heads)
        from transformer_engine.pytorch import RMSNorm

        options = self.options
        settings = {
            "zero_centered_gamma": self.norms["zero_centered_gamma"],
            "device": options.device,
        }
        layer = RMSNorm(
            normalized_shape=norm.size, eps=norm.epsilon, dtype=options.dtype, **settings
        )
        options.attach(layer.weight, self._norm_spec(norm, True if over_heads else None))
        return layer.requires_grad_(options.trained)

    def tower(self, name: VisionPart) -> NativeBackend:
        other = super().tower(name)
        assert isinstance(other, TransformerEngineBackend)
        other.in_tower = other.apart = True
        return other

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sinks: torch.Tensor | None = None,
        call: Caller = at_once,
    ) -> torch.Tensor:
        """The choice is a function of the whole row, so ranks agree on it."""
        if self.packed is None:
            return super().attention(q, k, v, plan, scale, sinks, call)
        sequences = self.packed.sequences(plan)
        if isinstance(sequences, str):
            self.tell(f"attention: ours for some rows, {sequences}")
            return super().attention(q, k, v, plan, scale, sinks, call)
        self.tell("attention: Transformer Engine's fused one for causal packs")
        assert scale == self.packed.scale, (
            f"scale {scale}, the attention was made for {self.packed.scale}"
        )
        with contextlib.nullcontext() if self.fp8 == "off" else eight_bits_off():
            return self.packed(q, k, v, plan, sequences, call)

    def prepare(self, plan: AttentionPlan) -> None:
        if self.packed is None or isinstance(self.packed.sequences(plan), str):
            super().prepare(plan)

    def precision(self) -> AbstractContextManager[Any]:
        if self.recipe is None:
            return contextlib.nullcontext()
        from transformer_engine.pytorch import autocast

        return autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.amax_group)
