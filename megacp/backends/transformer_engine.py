"""The Transformer Engine backend: NVIDIA's linears, RMSNorm, fused attention with its own context parallelism, FP8.

Key property: only layers that Transformer Engine does better are replaced, and their parameters carry the same specs
(names, pieces, reductions) as the native ones, so initialisation, buckets, optimizer and checkpoints cannot tell the
backends apart. A row whose mask or order is none of its attention's takes our transports instead, with one line that
says why. Vocabulary tables, LayerNorm and replicated parameters stay native, towers of vision stay out of 8 bits.

Rejected: `LayerNormLinear` and `LayerNormMLP`: a block norms, remembers the result as a recipe, and multiplies, three
steps that selective recomputation needs apart. An attention object for each layer, which would hold nothing of its own.
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

import numpy as np
import torch
from torch import nn

from megacp.backends.base import Tower
from megacp.backends.native import NativeBackend
from megacp.backends.support import ATTENTION, FP8_MULTIPLE, attention_case, refusals
from megacp.backends.thd import Sequences, thd_sequences
from megacp.config.model import ModelConfig
from megacp.config.run import RunConfig
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.shard import row_axis
from megacp.context_parallel.stopwatch import Stopwatch
from megacp.distributed.grid import Axis, ProcessGrid, split_axis
from megacp.distributed.launch import set_defaults
from megacp.tensor_parallel.linear import (
    LinearOptions,
    add_weight_gradient,
    column_specs,
    replicated_spec,
    row_spec,
)

FUSED_ATTENTION_ONLY = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""With these, attention that cuDNN cannot do raises instead of becoming another kernel; read when it is imported."""


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


def _leave(weight: torch.Tensor) -> None:
    """Initial weights come from the specs."""


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
            sequence_parallel=options.sequence_parallel,
            fuse_wgrad_accumulation=options.add_gradient is not None and options.trained,
            tp_group=options.tp.group,
            tp_size=options.tp.size,
            init_method=_leave,
            bias=bias,
            params_dtype=options.dtype,
            parallel_mode=parallel_mode,
            device=options.device,
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


class PackedAttention:
    """`DotProductAttention` over the packed rows of a cp axis, shared by all layers.

    `comm_type` and `inner` (ranks of the all-to-all in a2a+p2p) matter from two ranks on; making the groups of a2a+p2p
    is collective.
    """

    def __init__(
        self, model: ModelConfig, tp: Axis, cp: Axis, comm_type: str, inner: int, device: torch.device
    ) -> None:
        from transformer_engine.pytorch import DotProductAttention

        self.scale = model.head_dim**-0.5
        self.attention = DotProductAttention(
            num_attention_heads=model.num_attention_heads,
            kv_channels=model.head_dim,
            num_gqa_groups=model.query_groups,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            tp_size=tp.size,
            tp_group=tp.group,
            softmax_scale=self.scale,
        )
        if cp.size == 1:
            return
        groups: Any = cp.group
        if comm_type == "a2a+p2p":
            parts = split_axis(cp, inner)
            if parts[0].group is None or parts[1].group is None:  # one of the two has a single rank
                comm_type = "p2p" if parts[0].group is None else "a2a"
            else:
                groups = [part.group for part in parts]
        self.attention.set_context_parallel_group(
            cp_group=groups,
            cp_global_ranks=list(cp.global_ranks),
            cp_stream=torch.cuda.Stream(device=device),
            cp_comm_type=comm_type,
        )

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, sequences: Sequences
    ) -> torch.Tensor:
        """`q[t, heads, d]`, `k, v[t, groups, d]` of this rank -> `[t, heads, d]`; rows of padding are 0 both ways.

        Cumulative lengths are those of the whole row; true and padded ones are one tensor where there is no padding,
        by which Transformer Engine knows it.
        """
        device = q.device
        places = plan.on_device("thd places", device, lambda: sequences.places)
        lengths = places
        if sequences.has_padding:
            lengths = plan.on_device("thd lengths", device, lambda: sequences.lengths)
        padding = plan.part("thd padding", lambda: np.flatnonzero(plan.metadata.document[plan.local] < 0))
        empty = plan.on_device("thd padding", device, lambda: padding) if len(padding) else None
        if empty is not None:  # what cuDNN leaves there may be NaN, and 0 x NaN would reach every weight gradient
            q, k, v = (x.index_fill(0, empty, 0.0) for x in (q, k, v))
        out = self.attention(
            query_layer=q,
            key_layer=k,
            value_layer=v,
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=places,
            cu_seqlens_kv_padded=places,
            max_seqlen_q=sequences.longest,
            max_seqlen_kv=sequences.longest,
            attn_mask_type="padding_causal",
        ).view(q.shape)  # [t, heads * d] -> [t, heads, d]
        return out if empty is None else out.index_fill(0, empty, 0.0)


class TransformerEngineBackend(NativeBackend):
    """See `Backend`; `config` must have no row of `support.ENGINE` against it."""

    name = "transformer_engine"

    def __init__(self, grid: ProcessGrid, config: RunConfig, watch: Stopwatch | None = None) -> None:
        training, parallel = config.training, config.parallel
        super().__init__(
            grid,
            parallel,
            config.model,
            dtype=training.dtype,
            attention_kernel=training.attention_kernel,
            vision=config.vision,
            watch=watch,
            add_gradient=add_weight_gradient,  # its linears have their own; this says that they use it
        )
        self.fp8, self.loss_kernel = training.fp8, training.cross_entropy_fusion_impl
        self.token_multiple = 1 if self.fp8 == "off" else FP8_MULTIPLE
        self.in_tower = False
        amax = grid.over("tp", "cp")
        self.amax_group = amax.group
        self.recipe = None if self.fp8 == "off" else fp8_recipe(self.fp8, amax.size > 1)
        self.packed: PackedAttention | None = None
        reasons = refusals(attention_case(config), ATTENTION)
        if reasons:
            self.tell(f"attention: ours for every row, {'; '.join(reasons)}")
        else:
            inner = (parallel.hierarchical_context_parallel_sizes or (1, 1))[0]
            axis = row_axis(grid, parallel)
            self.packed = PackedAttention(config.model, grid.tp, axis, parallel.cp_comm_type, inner, grid.device)
        self._told: set[str] = set()

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

    def _in_place(self, layer: nn.Module) -> nn.Module:
        return HighPrecision(layer) if self.in_tower and self.fp8 != "off" else layer

    def norm(self, name: str, size: int, epsilon: float, *, over_heads: bool = False) -> nn.Module:
        """See `Backend.norm`."""
        from transformer_engine.pytorch import RMSNorm

        layer = RMSNorm(normalized_shape=size, eps=epsilon, device=self.options.device, dtype=self.options.dtype)
        partial = True if over_heads else None
        spec = replicated_spec(f"{name}.weight", (size,), "ones", self.options, partial_over_tp=partial)
        self.options.attach(layer.weight, spec).requires_grad_(self.options.trained)
        return layer

    def tower(self, name: Tower) -> NativeBackend:
        """See `Backend.tower`."""
        other = super().tower(name)
        assert isinstance(other, TransformerEngineBackend)
        other.in_tower = True
        return other

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """See `Backend.attention`. The choice is a function of the whole row, so ranks agree on it."""
        if self.packed is None:
            return super().attention(q, k, v, plan, scale)
        sequences = plan.part("thd sequences", lambda: thd_sequences(plan))
        self._tell_once(sequences)
        if isinstance(sequences, str):
            return super().attention(q, k, v, plan, scale)
        assert scale == self.packed.scale, f"scale {scale}, the attention was made for {self.packed.scale}"
        with contextlib.nullcontext() if self.fp8 == "off" else eight_bits_off():
            return self.packed(q, k, v, plan, sequences)

    def _tell_once(self, choice: Sequences | str) -> None:
        kind = choice if isinstance(choice, str) else "fused"
        if kind in self._told:
            return
        self._told.add(kind)
        ours = f"attention: ours for some rows, {kind}"
        self.tell("attention: Transformer Engine's fused one for causal packs" if kind == "fused" else ours)

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        """See `Backend.cross_entropy`; Transformer Engine's kernel takes equal shares of the vocabulary."""
        if self.loss_kernel == "native":
            return super().cross_entropy(logits, labels, first)
        from transformer_engine.pytorch import parallel_cross_entropy

        loss = parallel_cross_entropy(
            logits.contiguous().unsqueeze(0),  # [t, v] -> [1, t, v]; these two have had several names
            labels.unsqueeze(0),
            label_smoothing=0.0,
            reduce_loss=False,
            dist_process_group=self.tp.group,
        )
        return loss.view(-1)  # [1, t] -> [t]

    def precision(self) -> AbstractContextManager[Any]:
        """See `Backend.precision`."""
        if self.recipe is None:
            return contextlib.nullcontext()
        from transformer_engine.pytorch import autocast

        return autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.amax_group)

    def adamw(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        """See `Backend.adamw`."""
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(params=groups, betas=betas, eps=eps, adam_w_mode=True, bias_correction=True)
