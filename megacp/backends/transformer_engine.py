"""The Transformer Engine backend: NVIDIA's linears and norms, fused, its attention with context parallelism, FP8.

Key property: only layers that Transformer Engine does better are replaced, and their parameters carry the same specs
(names, pieces, reductions) as the native ones, so initialisation, buckets, optimizer and checkpoints cannot tell the
backends apart. A row whose mask or order is none of its attention's takes our transports instead, with one line that
says why. Vocabulary tables, LayerNorm and replicated parameters stay native, towers of vision stay out of 8 bits.

A block's norm and qkv product are one `LayerNormLinear`, its norm and MLP one `LayerNormMLP`. With
`--recompute-granularity selective` they are `RMSNorm` and `Linear` apart: the fused ones store the outputs of norm and
SwiGLU themselves, where selective recomputation has to put a recipe between two steps.

Rejected: `LayerNormMLP(checkpoint=True)` for selective recomputation, which repeats the first product and its gather.
Weights stored in 8 bits, which no other backend could read from a checkpoint.

The only file that imports transformer_engine, inside functions; arguments go by keyword, because releases insert
parameters in the middle (tests bind every call to the real signatures).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from megacp.backends.base import Remember, Tower
from megacp.backends.composed import gate_and_up
from megacp.backends.native import NativeBackend
from megacp.backends.packed_attention import PackedAttention
from megacp.backends.support import FP8_MULTIPLES, attention_reasons
from megacp.backends.thd import Sequences, thd_sequences
from megacp.config.model import ModelConfig
from megacp.config.run import RunConfig
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.shard import row_axis
from megacp.distributed.grid import Axis, ProcessGrid
from megacp.distributed.launch import set_defaults
from megacp.distributed.parameter import ParameterSpec
from megacp.tensor_parallel.linear import LinearOptions, add_weight_gradient, column_specs, replicated_spec, row_spec

FUSED_ATTENTION_ONLY = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""With these, attention that cuDNN cannot do raises instead of becoming another kernel; read when it is imported."""
NO_LABEL = -100
"""Has loss 0."""


def package_problem() -> str | None:
    """Why Transformer Engine cannot be used in this environment; None when it can. Imports it where it is installed."""
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install -e '.[gpu]' in an environment that has CUDA torch"
    set_defaults(FUSED_ATTENTION_ONLY)
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


def fp8_problem(name: str) -> str | None:
    """Why this GPU does not have the recipe of a `--fp8` value; None when it has."""
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    asked = is_fp8_block_scaling_available if name == "blockwise" else is_fp8_available
    available, reason = asked(return_reason=True)
    return None if available else reason


def _leave(weight: torch.Tensor) -> None:
    """Initial weights come from the specs."""


def _linear_settings(bias: bool, options: LinearOptions) -> dict[str, Any]:
    """What every module with linears takes: how it is cut, whether gradients go to the buckets, dtype and device."""
    return {
        "sequence_parallel": options.sequence_parallel,
        "fuse_wgrad_accumulation": options.add_gradient is not None and options.trained,
        "tp_group": options.tp.group,
        "tp_size": options.tp.size,
        "init_method": _leave,
        "bias": bias,
        "params_dtype": options.dtype,
        "device": options.device,
    }


class Fused(nn.Module):
    """`te.LayerNormLinear` or `te.LayerNormMLP`, which store themselves what their backward needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, remember: Remember) -> torch.Tensor:
        """See `Backend.norm_column_linear` and `Backend.norm_mlp`."""
        return self.layer(x)


class EngineLinear(nn.Module):
    """`te.Linear` with our specs: column `x[t/tp, h] -> y[t, f/tp]`, row `x[t, f/tp] -> y[t/tp, h]`; without sequence
    parallelism t/tp is t. `parallel_mode` is `column` or `row`.
    """

    def __init__(self, parallel_mode: str, sizes: tuple[int, int], bias: bool, options: LinearOptions) -> None:
        from transformer_engine.pytorch import Linear

        super().__init__()
        self.linear = Linear(
            in_features=sizes[0],
            out_features=sizes[1],
            parallel_mode=parallel_mode,
            **_linear_settings(bias, options),
        )
        self.linear.requires_grad_(options.trained)

    @property
    def weight(self) -> nn.Parameter:
        """This rank's part of the weight."""
        return self.linear.weight

    @property
    def bias(self) -> nn.Parameter:
        """This rank's part of the bias; empty without one."""
        return self.linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, its communication and the bias; more than two dims only without sequence parallelism."""
        if x.dim() == 2:
            return self.linear(x)
        return self.linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])  # [..., h] -> [n, h] -> [n, f] -> [..., f]


class HighPrecision(nn.Module):
    """A layer that stays out of 8 bits: patches of a crop and pooled windows are no multiple of what those need."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, whatever precision its surroundings have."""
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
        "delayed": lambda: recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, reduce_amax=reduce_amax),
        "current": lambda: recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID),
        "blockwise": lambda: recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3),
    }
    return makers[name]()


def packed_attention(
    model: ModelConfig, tp: Axis, cp: Axis, comm_type: str, inner: int, device: torch.device
) -> PackedAttention:
    """`DotProductAttention` for all layers of a model; `comm_type` and `inner` (ranks of the all-to-all in a2a+p2p)
    matter from two cp ranks on. Collective for a2a+p2p.
    """
    from transformer_engine.pytorch import DotProductAttention

    scale = model.head_dim**-0.5
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


def fused_adam(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """`FusedAdam` with decoupled decay."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params=groups, betas=betas, eps=eps, adam_w_mode=True, bias_correction=True)


class TransformerEngineBackend(NativeBackend):
    """See `Backend`; `config` must have no reason of `support.layer_reasons` against it."""

    name = "transformer_engine"

    def __init__(self, grid: ProcessGrid, config: RunConfig) -> None:
        training, parallel = config.training, config.parallel
        super().__init__(
            grid,
            parallel,
            config.model,
            dtype=training.dtype,
            attention_kernel=training.attention_kernel,
            vision=config.vision,
            add_gradient=add_weight_gradient,  # its linears have their own; this says that they use it
        )
        self.adamw = fused_adam
        self.fp8, self.loss_kernel = training.fp8, training.cross_entropy_fusion_impl
        self.token_multiple, self.vocab_size = FP8_MULTIPLES[self.fp8], config.model.vocab_size
        self.apart = training.recompute_granularity == "selective"
        self.in_tower = False
        amax = grid.over("tp", "cp")
        self.amax_group = amax.group
        self.recipe = None if self.fp8 == "off" else fp8_recipe(self.fp8, amax.size > 1)
        self.packed: PackedAttention | None = None
        capability, cudnn = torch.cuda.get_device_capability(grid.device), torch.backends.cudnn.version() or 0
        reasons = "; ".join(attention_reasons(config, capability, cudnn))
        if reasons:
            self.tell(f"attention: ours for every row, {reasons}")
        else:
            inner = (parallel.hierarchical_context_parallel_sizes or (1, 1))[0]
            axis = row_axis(grid, parallel)
            self.packed = packed_attention(config.model, grid.tp, axis, parallel.cp_comm_type, inner, grid.device)
        self._told: set[str] = set()
        if self.fp8 == "delayed":
            self.tell("fp8: delayed scales begin at 1 here, also in a resumed run: they are in no checkpoint")
        if self.apart:
            self.tell("layers: Transformer Engine's RMSNorm and Linear apart, --recompute-granularity is selective")

    def column_linear(
        self, prefix: str, outputs: Sequence[tuple[str, int]], in_features: int, *, bias: bool, std: float
    ) -> nn.Module:
        """See `Backend.column_linear`."""
        weight_spec, bias_spec = column_specs(prefix, outputs, in_features, std, self.options)
        layer = EngineLinear("column", (in_features, sum(rows for _, rows in outputs)), bias, self.options)
        self.options.attach(layer.weight, weight_spec)
        if bias:
            self.options.attach(layer.bias, bias_spec)
        return self._in_place(layer)

    def row_linear(self, name: str, in_features: int, out_features: int, *, bias: bool, std: float) -> nn.Module:
        """See `Backend.row_linear`."""
        layer = EngineLinear("row", (in_features, out_features), bias, self.options)
        self.options.attach(layer.weight, row_spec(name, in_features, out_features, std, self.options))
        if bias:
            self.options.attach(layer.bias, replicated_spec(f"{name}.bias", (out_features,), "zeros", self.options))
        return self._in_place(layer)

    def norm_column_linear(
        self,
        norm_name: str,
        prefix: str,
        outputs: Sequence[tuple[str, int]],
        in_features: int,
        *,
        epsilon: float,
        bias: bool,
        std: float,
    ) -> nn.Module:
        """See `Backend.norm_column_linear`."""
        if self.apart:
            return super().norm_column_linear(
                norm_name, prefix, outputs, in_features, epsilon=epsilon, bias=bias, std=std
            )
        from transformer_engine.pytorch import LayerNormLinear

        layer = LayerNormLinear(
            in_features=in_features,
            out_features=sum(rows for _, rows in outputs),
            eps=epsilon,
            normalization="RMSNorm",
            parallel_mode="column",
            **_linear_settings(bias, self.options),
        )
        weight_spec, bias_spec = column_specs(prefix, outputs, in_features, std, self.options)
        specs = {"layer_norm_weight": self._norm_spec(norm_name, in_features), "weight": weight_spec}
        return self._fused(layer, specs | ({"bias": bias_spec} if bias else {}))

    def norm_mlp(
        self,
        norm_name: str,
        prefix: str,
        hidden_size: int,
        ffn_size: int,
        *,
        epsilon: float,
        bias: bool,
        std: float,
        output_std: float,
    ) -> nn.Module:
        """See `Backend.norm_mlp`. A rank's `fc1_weight` holds its rows of `gate` above those of `up`, as ours."""
        if self.apart:
            return super().norm_mlp(
                norm_name, prefix, hidden_size, ffn_size, epsilon=epsilon, bias=bias, std=std, output_std=output_std
            )
        from transformer_engine.pytorch import LayerNormMLP

        layer = LayerNormMLP(
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_size,
            eps=epsilon,
            normalization="RMSNorm",
            activation="swiglu",
            output_layer_init_method=_leave,
            set_parallel_mode=True,
            **_linear_settings(bias, self.options),
        )
        fc1, fc1_bias = column_specs(prefix, gate_and_up(ffn_size), hidden_size, std, self.options)
        fc2 = row_spec(f"{prefix}.down", ffn_size, hidden_size, output_std, self.options)
        fc2_bias = replicated_spec(f"{prefix}.down.bias", (hidden_size,), "zeros", self.options)
        specs = {"layer_norm_weight": self._norm_spec(norm_name, hidden_size), "fc1_weight": fc1, "fc2_weight": fc2}
        return self._fused(layer, specs | ({"fc1_bias": fc1_bias, "fc2_bias": fc2_bias} if bias else {}))

    def _norm_spec(self, name: str, size: int, partial: bool | None = None) -> ParameterSpec:
        return replicated_spec(f"{name}.weight", (size,), "ones", self.options, partial_over_tp=partial)

    def _fused(self, layer: nn.Module, specs: dict[str, ParameterSpec]) -> Fused:
        for name, spec in specs.items():
            self.options.attach(getattr(layer, name), spec)
        return Fused(layer.requires_grad_(self.options.trained))

    def _in_place(self, layer: nn.Module) -> nn.Module:
        return HighPrecision(layer) if self.in_tower and self.fp8 != "off" else layer

    def norm(self, name: str, size: int, epsilon: float, *, over_heads: bool = False) -> nn.Module:
        """See `Backend.norm`."""
        from transformer_engine.pytorch import RMSNorm

        layer = RMSNorm(normalized_shape=size, eps=epsilon, device=self.options.device, dtype=self.options.dtype)
        spec = self._norm_spec(name, size, True if over_heads else None)
        self.options.attach(layer.weight, spec).requires_grad_(self.options.trained)
        return layer

    def tower(self, name: Tower) -> NativeBackend:
        """See `Backend.tower`."""
        other = super().tower(name)
        assert isinstance(other, TransformerEngineBackend)
        other.in_tower = other.apart = True
        return other

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """See `Backend.attention`. The choice is a function of the whole row, so ranks agree on it."""
        if self.packed is None:
            return super().attention(q, k, v, plan, scale)
        sequences = thd_sequences(plan)
        self._tell_once(sequences)
        if isinstance(sequences, str):
            return super().attention(q, k, v, plan, scale)
        assert scale == self.packed.scale, f"scale {scale}, the attention was made for {self.packed.scale}"
        with contextlib.nullcontext() if self.fp8 == "off" else eight_bits_off():
            return self.packed(q, k, v, plan, sequences)

    def prepare(self, plan: AttentionPlan) -> None:
        """See `Backend.prepare`."""
        if self.packed is None or isinstance(thd_sequences(plan), str):
            super().prepare(plan)

    def _tell_once(self, choice: Sequences | str) -> None:
        kind = choice if isinstance(choice, str) else "fused"
        if kind in self._told:
            return
        self._told.add(kind)
        ours = f"attention: ours for some rows, {kind}"
        self.tell("attention: Transformer Engine's fused one for causal packs" if kind == "fused" else ours)

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        """See `Backend.cross_entropy`; Transformer Engine's kernel takes equal shares of the vocabulary.

        Labels of weight 0 may be ids that the head does not have (image tokens): its loss there would be infinite.
        """
        if self.loss_kernel == "native":
            return super().cross_entropy(logits, labels, first)
        from transformer_engine.pytorch import parallel_cross_entropy

        loss = parallel_cross_entropy(
            logits.contiguous().unsqueeze(0),  # [t, v] -> [1, t, v]; these two have had several names
            labels.masked_fill(labels >= self.vocab_size, NO_LABEL).unsqueeze(0),
            label_smoothing=0.0,
            reduce_loss=False,
            dist_process_group=self.tp.group,
            ignore_idx=NO_LABEL,
        )
        return loss.view(-1)  # [1, t] -> [t]

    def precision(self) -> AbstractContextManager[Any]:
        """See `Backend.precision`."""
        if self.recipe is None:
            return contextlib.nullcontext()
        from transformer_engine.pytorch import autocast

        return autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.amax_group)
