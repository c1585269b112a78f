"""The Transformer Engine backend: NVIDIA's fused norms and linear layers, its attention, and FP8.

Parameters have the same specs as in the native backend, so optimizer and checkpoints do not depend
on the backend. Vocabulary tables, LayerNorm and norms over the heads of several ranks are native.
Vision towers do not use FP8. If Transformer Engine's attention does not support a row's mask or
token order, the row uses megacp's transports, and a log line reports the reason.

With selective recomputation or LoRA, norms and linear layers are separate modules, because
recomputation or a LoRA pair must come between two operations that the fused modules combine.

Only this file and attention/ops/cudnn.py import transformer_engine, inside functions. Arguments are
passed by keyword, because releases insert new parameters between existing ones. Tests bind every
call to the real signatures.
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
"""Environment variables to set before the package is imported.

With the first two, unsupported attention raises an error instead of using a kernel other than
cuDNN's. With the third, the ring uses the group's communicator instead of one per pair of ranks.
"""


def package_problem() -> str | None:
    """Return why Transformer Engine cannot be used in this environment; None if it can.

    Import the package if it is installed.
    """
    # the environment must be set before the import
    set_defaults(SETTINGS)
    return engine_problem()


def fp8_problem(name: str) -> str | None:
    """Return why this GPU does not support the recipe for a `--fp8` value; None if it does."""
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    asked = is_fp8_block_scaling_available if name == "blockwise" else is_fp8_available
    available, reason = asked(return_reason=True)
    return None if available else reason


def _leave(weight: torch.Tensor) -> None:
    """Leave a weight uninitialised; megacp initialises it according to its spec."""


def _linear_settings(bias: bool, options: LinearOptions) -> dict[str, Any]:
    """Return the arguments that all modules with linear layers share."""
    return {
        "sequence_parallel": options.sequence_parallel,
        # add weight gradients to `main_grad` inside the matrix product
        "fuse_wgrad_accumulation": options.weight_gradients is not None and options.trained,
        "tp_group": options.tp.group,
        "tp_size": options.tp.size,
        "init_method": _leave,
        "bias": bias,
        "params_dtype": options.dtype,
        "device": options.device,
    }


class Fused(nn.Module):
    """Wrapper of `te.LayerNormLinear` or `te.LayerNormMLP`.

    It ignores `save`, because these modules store the tensors for their backward pass themselves.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        return self.layer(x)


class EngineLinear(nn.Module):
    """Wrapper of `te.Linear` in a `parallel_mode`.

    "column" maps `x[t/tp, h]` to `y[t, f/tp]`, and "row" maps `x[t, f/tp]` to `y[t/tp, h]`. Without
    sequence parallelism, t/tp is t.
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
        """Return the layer's output, including communication and bias.

        `x` may have more than two dimensions only without sequence parallelism.
        """
        if x.dim() == 2:
            return self.linear(x)
        flat = self.linear(x.flatten(0, -2))  # [..., h] -> [n, h] -> [n, f]
        return flat.unflatten(0, x.shape[:-1])  # [..., f]


class HighPrecision(nn.Module):
    """Wrapper of a layer that does not use FP8.

    Vision layers use it, because the numbers of patches and pooled windows are not multiples of the
    FP8 tile size.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with eight_bits_off():
            return self.layer(x)


def eight_bits_off() -> AbstractContextManager[Any]:
    """Return a context without FP8, which may be entered inside a context with FP8."""
    from transformer_engine.pytorch import autocast

    return autocast(enabled=False)


def fp8_recipe(name: str, reduce_amax: bool) -> Any:
    """Return the recipe for a `--fp8` value.

    With `reduce_amax`, ranks share the largest absolute values, for delayed scaling.
    """
    from transformer_engine.common import recipe

    # HYBRID: E4M3 in the forward pass, E5M2 for gradients
    hybrid = recipe.Format.HYBRID
    if name == "delayed":
        return recipe.DelayedScaling(fp8_format=hybrid, reduce_amax=reduce_amax)
    if name == "current":
        return recipe.Float8CurrentScaling(fp8_format=hybrid)
    assert name == "blockwise", f"--fp8 {name} has no recipe"
    return recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3)


def packed_attention(
    model: ModelConfig, tp: Axis, cp: Axis, comm_type: str, inner: int, device: torch.device
) -> PackedAttention:
    """Return Transformer Engine's attention for all layers of a model.

    `comm_type` and `inner` (number of ranks in the all-to-all of a2a+p2p) only matter for two or
    more cp ranks. With a2a+p2p, the call is collective.
    """
    from transformer_engine.pytorch import DotProductAttention

    scale = model.attention_scale
    attention = DotProductAttention(
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.head_dim,
        num_gqa_groups=model.query_groups,
        attention_dropout=0.0,
        qkv_format="thd",  # packed: [tokens, heads, dim]
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
    """Return why Transformer Engine has no fused kernel for rows of `tokens`; None if it has one.

    `longest` is the maximum length of a sequence in the row. The arguments for the kernel selector
    are the same as in a forward pass, where a refusal would be an error, possibly hours into a run.
    The selector limits deterministic kernels by sequences x longest^2, which is largest if one
    document fills two thirds of the row.
    """
    deterministic = packed.attention.deterministic
    least = packed.least_sequence
    lengths = [longest]
    if deterministic:
        lengths.append(min(longest, 2 * tokens // 3))
    for length in lengths:
        # one sequence of this length, and as many sequences as possible in the rest of the row
        length = -(-length // least) * least
        count = 1 + max(0, tokens - length) // least
        own_tokens = max(tokens, length) // packed.cp["cp_size"]
        refusal = selector_refusal(
            heads,
            qkv_dtype=dtype,
            batch_size=count,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            num_tokens_q=own_tokens,
            num_tokens_kv=own_tokens,
            attn_mask_type="padding_causal",
            window_size=window_of(window),
            pad_between_seqs=True,
            deterministic=deterministic,
            softmax_scale=packed.scale,
            **packed.cp,
        )
        if refusal is not None:
            return (
                f"Transformer Engine has no kernel for rows with {count} sequences of up to "
                f"{length} tokens: {refusal}"
            )
    return None


def fused_adam(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Return Transformer Engine's `FusedAdam` with decoupled weight decay (AdamW)."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params=groups, betas=betas, eps=eps, adam_w_mode=True, bias_correction=True)


class TransformerEngineBackend(NativeBackend):
    """Backend with Transformer Engine's layers.

    `support.layer_reasons` must not yield any reason for the config.
    """

    name = "transformer_engine"

    def __init__(self, grid: ProcessGrid, config: RunConfig) -> None:
        training = config.training
        parallel = config.parallel
        # if gradient buffers are permanent, linear layers add weight gradients to them directly
        adds = None if parallel.sharding.gradients else WeightGradients()
        super().__init__(grid, config, adds)
        self.adamw = fused_adam
        self.fp8 = training.fp8
        self.token_multiple = FP8_MULTIPLES[training.fp8]
        # recomputation and LoRA need access to the norm's output, so do not fuse norms and layers
        self.apart = training.recompute_mode.repeats_activations or self.lora is not None
        self.in_tower = False
        # arguments for all modules with a norm
        self.norms = {
            "normalization": "RMSNorm",
            "zero_centered_gamma": config.model.apply_layernorm_1p,
        }
        # tp and cp ranks have parts of the same tensors, so they share the largest absolute values
        amax = grid.over("tp", "cp")
        self.amax_group = amax.group
        self.recipe = None if self.fp8 == "off" else fp8_recipe(self.fp8, amax.size > 1)
        self.packed = self._packed_attention(grid, config)
        if self.fp8 == "delayed":
            # create the communicator now and not during a step
            connect([amax], grid.device)
            self.tell(
                "fp8: delayed scales start at 1 even in a resumed run, because checkpoints do not "
                "contain them"
            )
        self._tell_of_norms(config)

    def _packed_attention(self, grid: ProcessGrid, config: RunConfig) -> PackedAttention | None:
        """Return Transformer Engine's attention.

        If it does not support this config, add a log line with the reasons and return None.
        """
        parallel = config.parallel
        # check the config first, because building the attention may create process groups
        reasons = "; ".join(attention_reasons(config))
        if not reasons:
            inner = (parallel.hierarchical_context_parallel_sizes or (1, 1))[0]
            packed = packed_attention(
                config.model, grid.tp, grid.cp, parallel.cp_comm_type, inner, grid.device
            )
            # a row has several packs, but no document is longer than one pack
            pack = config.data.seq_length
            tokens = pack * config.training.micro_batch_size
            # layers may have different windows, each of which needs a kernel
            windows = {layer.window for layer in layers_of(config.model)}
            refusals = set()
            for window in windows:
                if not window or packed.windows:
                    refusals.add(
                        selector_problem(packed, self.heads, self.dtype, tokens, pack, window)
                    )
            reasons = "; ".join(filter(None, refusals))
            if not reasons:
                return packed
        self.tell(f"attention: native for every row, because {reasons}")
        return None

    def _tell_of_norms(self, config: RunConfig) -> None:
        """Log which norms are native or not fused, and which flag is the reason."""
        # log only the first reason
        if self.lora:
            self._tell_apart("--lora-rank")
        elif self.apart:
            self._tell_apart(f"--recompute-granularity {config.training.recompute_granularity}")
        elif not config.model.has_input_norms:
            self._tell_apart("--norm-position")
        if config.model.qk_layernorm == "all_heads":
            self.tell(
                "q/k norms: native, because Transformer Engine's norm cannot sum over tp ranks"
            )

    def _tell_apart(self, why: str) -> None:
        self.tell(f"layers: Transformer Engine's RMSNorm and Linear, not fused because of {why}")

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        return adapted(self._linear("column", linear), linear, ColumnPairs, self.lora, self.options)

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        return adapted(self._linear("row", linear), linear, RowPair, self.lora, self.options)

    def _linear(self, parallel_mode: str, linear: LinearSpec) -> nn.Module:
        layer = EngineLinear(parallel_mode, linear, self.options)
        # attach the same specs as in the native backend
        weight, *bias = linear_specs(linear, self.options)
        self.options.attach(layer.linear.weight, weight)
        if bias:
            self.options.attach(layer.linear.bias, bias[0])
        # towers' token counts are not multiples of the FP8 tile size
        return HighPrecision(layer) if self.in_tower and self.fp8 != "off" else layer

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        if norm is None or self.apart:  # two separate modules of Transformer Engine
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
        specs = {"layer_norm_weight": self._norm_spec(norm)}
        # without a bias, there is only one spec
        specs |= zip(("weight", "bias"), linear_specs(linear, self.options), strict=False)
        return self._fused(layer, specs)

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        # as in native layers, `fc1_weight` has this rank's gate rows above its up rows
        if norm is None or self.apart:  # separate modules
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
            names = (f"{name}_weight", f"{name}_bias")
            specs |= zip(names, linear_specs(linear, self.options), strict=False)
        return self.tiled(self._fused(layer, specs))

    def _norm_spec(self, norm: NormSpec, partial: bool | None = None) -> ParameterSpec:
        return parameter_spec([norm.weight(self.norm_init)], self.options, partial_over_tp=partial)

    def _fused(self, layer: nn.Module, specs: dict[str, ParameterSpec]) -> Fused:
        """Attach the specs to a fused module's parameters, and return the wrapped module."""
        for name, spec in specs.items():
            self.options.attach(getattr(layer, name), spec)
        return Fused(layer.requires_grad_(self.options.trained))

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        if norm.gated:  # Transformer Engine has no gated norm
            return super().norm(norm, over_heads=over_heads)
        from transformer_engine.pytorch import RMSNorm

        options = self.options
        layer = RMSNorm(
            normalized_shape=norm.size,
            eps=norm.epsilon,
            dtype=options.dtype,
            zero_centered_gamma=self.norms["zero_centered_gamma"],
            device=options.device,
        )
        options.attach(layer.weight, self._norm_spec(norm, True if over_heads else None))
        return layer.requires_grad_(options.trained)

    def tower(self, name: VisionPart) -> NativeBackend:
        other = super().tower(name)
        # the base class copies this object, so the copy has the same type
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
        """Return the output of core attention; see `NativeBackend.attention`.

        The choice of kernel depends on the complete row, so all ranks make the same choice.
        """
        if self.packed is None:
            return super().attention(q, k, v, plan, scale, sinks, call)
        sequences = self.packed.sequences(plan)
        if isinstance(sequences, str):
            self.tell(f"attention: native for some rows, because {sequences}")
            return super().attention(q, k, v, plan, scale, sinks, call)
        self.tell("attention: Transformer Engine's fused attention for causal packs")
        assert scale == self.packed.scale, (
            f"the attention was built for scale {self.packed.scale}, but a layer uses {scale}"
        )
        # attention itself runs in 16 bits
        with contextlib.nullcontext() if self.fp8 == "off" else eight_bits_off():
            return self.packed(q, k, v, plan, sequences, call)

    def prepare(self, plan: AttentionPlan) -> None:
        # Native tables are only needed for rows that Transformer Engine does not support.
        # `sequences` caches its result for the forward pass.
        if self.packed is None or isinstance(self.packed.sequences(plan), str):
            super().prepare(plan)

    def precision(self) -> AbstractContextManager[Any]:
        if self.recipe is None:
            return contextlib.nullcontext()
        from transformer_engine.pytorch import autocast

        return autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.amax_group)
