"""The native backend: megacp's layers in plain torch, which run on CUDA and on any CPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_transport import StateTransport
from megacp.attention.ops.kernel import Caller, Heads, at_once
from megacp.attention.ops.kernels import kernel_name
from megacp.attention.ops.pointwise import ACTIVATIONS, gated_norm, rms_norm
from megacp.attention.ops.recurrence import Rule
from megacp.distributed.grid import Axis, ProcessGrid, single_axis
from megacp.engine.backends.mlp import NormLinear, NormMLP, TiledMLP
from megacp.engine.backends.notes import Notes
from megacp.engine.backends.recurrent import RecurrentStates
from megacp.engine.config.model import VOCABULARY_MULTIPLE
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.table import Cut, Tensor, layer_norm_tensors
from megacp.engine.rows.shard import row_axis
from megacp.engine.tensor_parallel.linear import (
    ColumnNorm,
    ColumnParallelLinear,
    LinearSpec,
    RowParallelLinear,
)
from megacp.engine.tensor_parallel.lora import ColumnPairs, LoraSpec, RowPair, adapted
from megacp.engine.tensor_parallel.parameters import LinearOptions, parameter_spec
from megacp.engine.tensor_parallel.vocabulary import TableSpec, VocabularyTable
from megacp.engine.tensor_parallel.weight_gradients import DeferredWeightGradients, WeightGradients

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class NormSpec:
    """Description of a norm over the last dimension, whose width is `size`.

    The norm's tensors are `{name}.weight` and, for a LayerNorm, `{name}.bias`.
    """

    name: str
    size: int
    epsilon: float
    gated: bool = False
    """Whether the result is multiplied by the SiLU of a gate; the weight then starts at 1."""

    def weight(self, init: str, cut: Cut = "whole") -> Tensor:
        """Return the description of an RMSNorm's weight."""
        # a gated norm never uses the zero-centred form
        init = "ones" if self.gated else init
        return Tensor(f"{self.name}.weight", (self.size,), cut, init, decays=False)


class RMSNorm(nn.Module):
    """RMSNorm whose weight is replicated over tp.

    `partial` is passed to `parameter_spec` as `partial_over_tp`. If `init` is "zeros", the norm
    multiplies by 1 + weight.
    """

    def __init__(
        self, norm: NormSpec, partial: bool | None, options: LinearOptions, init: str = "ones"
    ) -> None:
        super().__init__()
        weight = norm.weight(init)
        self.epsilon = norm.epsilon
        self.zero_centered = weight.init == "zeros"
        self.weight = options.parameter(parameter_spec([weight], options, partial_over_tp=partial))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised `x[..., size]`; `gate` has the same shape."""
        if gate is not None:
            return gated_norm(x, gate, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon, self.zero_centered)


def layer_norm(norm: NormSpec, options: LinearOptions) -> nn.Module:
    """Return a LayerNorm over the last dimension, whose parameters are replicated over tp."""
    # create no parameters here, because parameters with specs are attached below
    layer = nn.LayerNorm(norm.size, norm.epsilon, elementwise_affine=False)
    tensors = layer_norm_tensors(norm.name, norm.size)
    layer.weight, layer.bias = (
        options.parameter(parameter_spec([tensor], options)) for tensor in tensors
    )
    return layer


@dataclass(frozen=True)
class ExpertBalance:
    """Settings of expert load balancing."""

    document: float
    """Coefficient of the per-document load-balancing loss (`--moe-aux-loss-coeff`)."""
    z: float
    """Coefficient of the z-loss, the squared logsumexp of scores (`--moe-z-loss-coeff`)."""
    axes: tuple[Axis, Axis]
    """Axes over which a row's token counts are summed: tp, and the ranks that share the row."""


VisionPart = Literal["vision", "connector"]
AdamWEngine = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""Function from `(groups, betas, epsilon)` to an AdamW optimizer.

Groups have 1-D `params` and a `weight_decay`. A parameter's state contains the moments `exp_avg`
and `exp_avg_sq`. torch stores the number of updates in the state, Transformer Engine in the group.
"""


class NativeBackend:
    """Factories for layers, core attention and the vocabulary, for one rank of a grid.

    Arguments are global sizes, which the factories divide by tp. Models use only this interface.
    Parameter names and specs are the same for every backend, so checkpoints do not depend on it. A
    single call builds a norm and the following linear layer, so a backend may fuse them.
    """

    name = "native"
    token_multiple = 1
    """Required divisor of the number of tokens on a tp rank."""
    adamw: AdamWEngine | None = None
    """This backend's fused AdamW; None for torch's."""

    def __init__(
        self, grid: ProcessGrid, config: RunConfig, weight_gradients: WeightGradients | None = None
    ) -> None:
        model = config.model
        parallel = config.parallel
        training = config.training
        self.tp = grid.tp
        # a dense model has no expert ranks, regardless of the grid
        self.ep = grid.ep if model.num_experts > 0 else single_axis("ep")
        self.notes = Notes()
        self.options = LinearOptions(
            grid.tp,
            parallel.sequence_parallel and grid.tp.size > 1,
            DTYPES[training.dtype],
            grid.device,
            "text" not in config.frozen_parts,
            weight_gradients=weight_gradients,
        )
        # settings for layers, some of which towers replace
        self.activation = model.mlp_activation
        self.norm_init = "zeros" if model.apply_layernorm_1p else "ones"
        self.lora = LoraSpec(model.lora_pairs, model.lora_dropout) if model.lora_pairs else None
        self.vision = config.vision
        self.frozen = config.frozen_parts
        self.tile_rows = training.mlp_chunk_tokens
        if self.sequence_parallel and self.tile_rows:  # each tp rank gathers its part of a tile
            self.tile_rows = max(1, self.tile_rows // grid.tp.size)
        # communication between the ranks of a row
        row = row_axis(grid, parallel)
        kernel = kernel_name(training.attention_kernel, grid.device.type, training.dtype)
        name = parallel.cp_comm_type
        # sizes of the inner and outer groups of a2a+p2p
        hierarchy = parallel.hierarchical_context_parallel_sizes or ()
        self.transport = select_transport(
            name, kernel, row, grid.device, hierarchy, tell=self.notes.tell
        )
        self.local_transport = select_transport(name, kernel, single_axis("one"), grid.device)
        """Transport for tokens that stay on one rank, such as patches."""
        # tp ranks share the heads and the query groups
        heads = model.num_attention_heads // grid.tp.size
        groups = model.query_groups // grid.tp.size
        self.heads = Heads(heads, groups, model.head_dim)
        self.recurrent = RecurrentStates(config, row, self.options)
        self.balance = ExpertBalance(
            document=training.moe_aux_loss_coeff,
            z=training.moe_z_loss_coeff,
            axes=(grid.tp, row),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return self.options.dtype

    @property
    def sequence_parallel(self) -> bool:
        """Whether tp ranks have different tokens between tensor-parallel layers."""
        return self.options.sequence_parallel

    @property
    def deferred(self) -> DeferredWeightGradients | None:
        """Receiver of deferred weight gradients; None if they are not deferred."""
        # the receiver may also add gradients immediately (--gradient-accumulation-fusion)
        gradients = self.options.weight_gradients
        return gradients if isinstance(gradients, DeferredWeightGradients) else None

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        """Return a linear layer `x[t/tp, h] -> y[t, f/tp]`, whose tensors are sharded by rows."""
        layer = ColumnParallelLinear(linear, self.options)
        # with LoRA, wrap the frozen layer together with its pairs
        return adapted(layer, linear, ColumnPairs, self.lora, self.options)

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        """Return a linear layer `x[t, f/tp] -> y[t/tp, h]`, whose tensor is sharded by columns."""
        layer = RowParallelLinear(linear, self.options)
        # as above, for a row-parallel layer
        return adapted(layer, linear, RowPair, self.lora, self.options)

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        """Return a module that applies a norm (unless `norm` is None) and a column-parallel layer.

        The module maps `(x[t/tp, h], save)` to `y[t, f/tp]`.
        """
        return NormLinear(None if norm is None else self.norm(norm), self.column_linear(linear))

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        """Return a gated MLP, with a norm before it unless `norm` is None, as one module.

        The module maps `(x[t/tp, h], save)` to `[t/tp, h]`. Either both linear layers have a bias,
        or neither has one.
        """
        first = None if norm is None else self.norm(norm)
        activation = ACTIVATIONS[self.activation]
        mlp = NormMLP(first, self.column_linear(gate_up), activation, self.row_linear(down))
        return self.tiled(mlp)

    def tiled(self, mlp: nn.Module) -> nn.Module:
        """Return `mlp`, tiled over tokens if --mlp-chunk-tokens is set."""
        return TiledMLP(mlp, self.tile_rows, self.precision) if self.tile_rows else mlp

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        """Return an RMSNorm over the last dimension.

        Set `over_heads` if tp ranks apply it to different heads of the same tokens.
        """
        # None: the gradient must be summed over tp only with sequence parallelism
        partial = True if over_heads else None
        return RMSNorm(norm, partial, self.options, self.norm_init)

    def column_norm(self, norm: NormSpec) -> nn.Module:
        """Return an RMSNorm over the columns of all tp ranks, for outputs `y[t, f/tp]`."""
        return ColumnNorm(norm.weight(self.norm_init, "rows"), norm.epsilon, self.options)

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """Return an uninitialised parameter for a single tensor."""
        return self.options.parameter(parameter_spec([tensor], self.options))

    def tower(self, name: VisionPart) -> NativeBackend:
        """Return a copy of this backend for another tower.

        Towers do not use sequence parallelism, so their inputs and outputs are replicated over tp.
        The config determines a tower's learning rate and whether it is frozen.
        """
        multipliers = {
            "vision": self.vision.vision_lr_multiplier,
            "connector": self.vision.connector_lr_multiplier,
        }
        # a shallow copy shares transports and notes with this backend
        other = copy.copy(self)
        other.lora = None  # LoRA is only for the decoder
        sink = self.options.weight_gradients
        # do not defer gradients: towers are on the first stage, which no other stage waits for
        at_once_sink = sink and sink.at_once()
        other.options = dataclasses.replace(
            self.options,
            sequence_parallel=False,
            trained=name not in self.frozen,
            lr_multiplier=multipliers[name],
            weight_gradients=at_once_sink,
        )
        return other

    def vocabulary(self, table: TableSpec) -> VocabularyTable:
        """Return the module for an embedding or head table."""
        return VocabularyTable(table, VOCABULARY_MULTIPLE, self.options)

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
        """Return the output of core attention, `[t, heads/tp, d]`.

        The inputs are `q[t, heads/tp, d]`, `k, v[t, groups/tp, d]` and `sinks[heads/tp]`.
        """
        return self.transport.attend(q, k, v, plan, scale, sinks, call)

    def states(self, rule: Rule) -> StateTransport:
        """Return the transport of a layer's recurrent states between ranks that share a row."""
        return self.recurrent.transport(rule, self.notes)

    def prepare(self, plan: AttentionPlan) -> None:
        """Precompute the host data that `attention` needs for a plan.

        Data loader threads call this method.
        """
        self.transport.prepare(plan, self.heads)

    def prepare_states(self, plan: AttentionPlan) -> None:
        """Precompute the host data that recurrent layers need for a plan.

        Data loader threads call this method.
        """
        self.recurrent.prepare(plan)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context for a block's forward pass and for its recomputation."""
        return contextlib.nullcontext()

    def tell(self, line: str) -> None:
        """Add a line to `warnings`, unless it has been added before."""
        self.notes.tell(line)

    def warnings(self) -> list[str]:
        """Return new log lines about the chosen layers and the reasons, without duplicates."""
        return self.notes.take()
