"""The native backend: our own layers in plain torch, on CPU and CUDA.

Key property: every line runs on a laptop, so what trains there is what is proven. Rejected: a CPU emulation of a GPU
backend, which proves the emulation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from megacp.backends.base import AdamW, Tower
from megacp.backends.composed import NormLinear, NormMLP, gate_and_up
from megacp.config.model import ModelConfig
from megacp.config.parallel import ParallelConfig
from megacp.config.vision import VisionConfig
from megacp.context_parallel.attention import TransportOptions, core_attention, select_transport
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.shard import row_axis
from megacp.distributed.grid import ProcessGrid
from megacp.ops.kernels import kernel_name
from megacp.ops.norm import layer_norm, rms_norm
from megacp.tensor_parallel.cross_entropy import cross_entropy
from megacp.tensor_parallel.embedding import VocabularyTable
from megacp.tensor_parallel.linear import (
    AddGradient,
    ColumnParallelLinear,
    LinearOptions,
    RowParallelLinear,
    replicated_parameter,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class RMSNorm(nn.Module):
    """RMSNorm with a weight that every tp rank holds."""

    def __init__(self, name: str, size: int, epsilon: float, partial: bool | None, options: LinearOptions) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = replicated_parameter(f"{name}.weight", (size,), "ones", options, partial_over_tp=partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[..., size]` to the same shape."""
        return rms_norm(x, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """LayerNorm with a weight and a bias that every tp rank holds."""

    def __init__(self, name: str, size: int, epsilon: float, options: LinearOptions) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = replicated_parameter(f"{name}.weight", (size,), "ones", options)
        self.bias = replicated_parameter(f"{name}.bias", (size,), "zeros", options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[..., size]` to the same shape."""
        return layer_norm(x, self.weight, self.bias, self.epsilon)


class NativeBackend:
    """See `Backend`."""

    name = "native"
    token_multiple = 1
    adamw: AdamW | None = None

    def __init__(
        self,
        grid: ProcessGrid,
        parallel: ParallelConfig,
        model: ModelConfig,
        *,
        dtype: str,
        attention_kernel: str,
        vision: VisionConfig | None = None,
        add_gradient: AddGradient | None = None,
    ) -> None:
        self.tp = grid.tp
        self.sequence_parallel = parallel.sequence_parallel and grid.tp.size > 1
        self.dtype = DTYPES[dtype]
        self.vision = vision or VisionConfig()
        trained = not self.vision.freeze_text
        self.options = LinearOptions(
            grid.tp, self.sequence_parallel, self.dtype, grid.device, trained, add_gradient=add_gradient
        )
        self.rows_multiple = model.make_vocab_size_divisible_by
        axis = row_axis(grid, parallel)
        options = TransportOptions(parallel.hierarchical_context_parallel_sizes or (), parallel.cp_exchange_stages)
        kernel = kernel_name(attention_kernel, grid.device.type, dtype)
        self.transport = select_transport(parallel.cp_comm_type, kernel, axis, grid.device, options)
        self._untold: list[str] = []

    def column_linear(
        self, prefix: str, outputs: Sequence[tuple[str, int]], in_features: int, *, bias: bool, std: float
    ) -> nn.Module:
        """See `Backend.column_linear`."""
        return ColumnParallelLinear(prefix, outputs, in_features, bias=bias, std=std, options=self.options)

    def row_linear(self, name: str, in_features: int, out_features: int, *, bias: bool, std: float) -> nn.Module:
        """See `Backend.row_linear`."""
        return RowParallelLinear(name, in_features, out_features, bias=bias, std=std, options=self.options)

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
        norm = self.norm(norm_name, in_features, epsilon)
        return NormLinear(norm, self.column_linear(prefix, outputs, in_features, bias=bias, std=std))

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
        """See `Backend.norm_mlp`."""
        norm = self.norm(norm_name, hidden_size, epsilon)
        gate_up = self.column_linear(prefix, gate_and_up(ffn_size), hidden_size, bias=bias, std=std)
        down = self.row_linear(f"{prefix}.down", ffn_size, hidden_size, bias=bias, std=output_std)
        return NormMLP(norm, gate_up, down)

    def norm(self, name: str, size: int, epsilon: float, *, over_heads: bool = False) -> nn.Module:
        """See `Backend.norm`."""
        return RMSNorm(name, size, epsilon, True if over_heads else None, self.options)

    def layer_norm(self, name: str, size: int, epsilon: float) -> nn.Module:
        """See `Backend.layer_norm`."""
        return LayerNorm(name, size, epsilon, self.options)

    def replicated(self, name: str, shape: tuple[int, ...], init: str, std: float = 0.0) -> nn.Parameter:
        """See `Backend.replicated`."""
        return replicated_parameter(name, shape, init, self.options, std=std)

    def tower(self, name: Tower) -> NativeBackend:
        """See `Backend.tower`."""
        frozen, multiplier = {
            "vision": (self.vision.freeze_vision, self.vision.vision_lr_multiplier),
            "connector": (self.vision.freeze_connector, self.vision.connector_lr_multiplier),
        }[name]
        other = copy.copy(self)
        other.sequence_parallel = False
        other.options = dataclasses.replace(
            self.options, sequence_parallel=False, trained=not frozen, lr_multiplier=multiplier
        )
        return other

    def vocabulary(
        self, name: str, vocab_size: int, hidden_size: int, *, std: float, partial_over: tuple[str, ...], counted: bool
    ) -> VocabularyTable:
        """See `Backend.vocabulary`."""
        return VocabularyTable(
            name,
            vocab_size,
            hidden_size,
            rows_multiple=self.rows_multiple,
            std=std,
            partial_over=partial_over,
            counted=counted,
            options=self.options,
        )

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """See `Backend.attention`."""
        return core_attention(q, k, v, transport=self.transport, plan=plan, scale=scale)

    def prepare(self, plan: AttentionPlan) -> None:
        """See `Backend.prepare`."""
        self.transport.tables(plan)

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        """See `Backend.cross_entropy`."""
        return cross_entropy(logits, labels, first, self.tp)

    def precision(self) -> AbstractContextManager[Any]:
        """See `Backend.precision`."""
        return contextlib.nullcontext()

    def tell(self, line: str) -> None:
        """Add a line to `warnings`."""
        self._untold.append(line)

    def warnings(self) -> list[str]:
        """See `Backend.warnings`."""
        lines = list(self._untold)
        self._untold.clear()  # shared with the towers' copies
        return lines
