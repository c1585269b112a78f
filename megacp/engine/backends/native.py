"""The native backend: megacp's layers in plain torch, for CPU and CUDA.

All of it also runs on a laptop.
"""

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
    """A norm over the last dimension, of width `size`.

    Its tensors are `{name}.weight` and, for a LayerNorm, `{name}.bias`.
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
    """RMSNorm with a weight that is replicated over tp.

    `partial` is `partial_over_tp` of `parameter_spec`. With `init` "zeros", the norm multiplies by
    1 + weight.
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
        """Normalise `x[..., size]`; `gate` has the same shape."""
        if gate is not None:
            return gated_norm(x, gate, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon, self.zero_centered)


def layer_norm(norm: NormSpec, options: LinearOptions) -> nn.Module:
    """Return a LayerNorm over the last dimension; its weight and bias are replicated over tp."""
    # without its own parameters; those with specs are attached below
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
    """Coefficient of the load-balancing loss per document (`--moe-aux-loss-coeff`)."""
    z: float
    """Coefficient of the z-loss, the squared logsumexp of scores (`--moe-z-loss-coeff`)."""
    axes: tuple[Axis, Axis]
    """Axes over which the tokens of a row are counted: tp, and the ranks of the row."""


VisionPart = Literal["vision", "connector"]
AdamWEngine = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""Function from `(groups, betas, epsilon)` to an AdamW optimizer.

Groups have 1-D `params` and a `weight_decay`. The state of a parameter has the moments `exp_avg`
and `exp_avg_sq`. torch counts updates in the state, Transformer Engine in the group.
"""


class NativeBackend:
    """Factories for layers, core attention and the vocabulary, for one rank of a grid.

    Global sizes are divided by tp. Models use only this interface. Parameter names and specs are
    the same for every backend, so a checkpoint works with all of them. A norm and the following
    linear are built by one call, so a backend may fuse them.
    """

    name = "native"
    token_multiple = 1
    """The number of tokens of a tp rank must be a multiple of this."""
    adamw: AdamWEngine | None = None
    """Fused AdamW of this backend; with None the optimizer chooses one."""

    def __init__(
        self, grid: ProcessGrid, config: RunConfig, weight_gradients: WeightGradients | None = None
    ) -> None:
        model = config.model
        parallel = config.parallel
        training = config.training
        self.tp = grid.tp
        # a dense model has no expert ranks, whatever the grid looks like
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
        # settings of layers; towers replace some of them
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
        # each tp rank has some of the heads and of the query groups
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
        """Whether tp ranks have different tokens between two tensor-parallel layers."""
        return self.options.sequence_parallel

    @property
    def deferred(self) -> DeferredWeightGradients | None:
        """Receiver of the deferred weight gradients; None if they are not deferred."""
        # the receiver may also add gradients immediately (--gradient-accumulation-fusion)
        gradients = self.options.weight_gradients
        return gradients if isinstance(gradients, DeferredWeightGradients) else None

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        """Return a module `x[t/tp, h] -> y[t, f/tp]`; each tensor is sharded by rows."""
        layer = ColumnParallelLinear(linear, self.options)
        # with LoRA, wrap the frozen linear together with its pairs
        return adapted(layer, linear, ColumnPairs, self.lora, self.options)

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        """Return a module `x[t, f/tp] -> y[t/tp, h]`; its tensor is sharded by columns."""
        layer = RowParallelLinear(linear, self.options)
        # as above, with the pair of a row-parallel linear
        return adapted(layer, linear, RowPair, self.lora, self.options)

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        """Return a norm (unless `norm` is None) and a column linear as one module.

        The module maps `(x[t/tp, h], save)` to `y[t, f/tp]`.
        """
        return NormLinear(None if norm is None else self.norm(norm), self.column_linear(linear))

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        """Return norm (unless None), column linear, gated activation and row linear as one module.

        The module maps `(x[t/tp, h], save)` to `[t/tp, h]`. Both linears must have a bias, or
        neither.
        """
        first = None if norm is None else self.norm(norm)
        activation = ACTIVATIONS[self.activation]
        mlp = NormMLP(first, self.column_linear(gate_up), activation, self.row_linear(down))
        return self.tiled(mlp)

    def tiled(self, mlp: nn.Module) -> nn.Module:
        """Return `mlp` with tiling over tokens if `--mlp-chunk-tokens` is set, else `mlp`."""
        return TiledMLP(mlp, self.tile_rows, self.precision) if self.tile_rows else mlp

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        """Return an RMSNorm over the last dimension.

        Use `over_heads` if tp ranks apply it to different heads of the same tokens.
        """
        # None: the gradient is partial over tp only with sequence parallelism
        partial = True if over_heads else None
        return RMSNorm(norm, partial, self.options, self.norm_init)

    def column_norm(self, norm: NormSpec) -> nn.Module:
        """Return an RMSNorm for the output `y[t, f/tp]` of a column linear, over all tp ranks."""
        return ColumnNorm(norm.weight(self.norm_init, "rows"), norm.epsilon, self.options)

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """Return a parameter for a single tensor."""
        return self.options.parameter(parameter_spec([tensor], self.options))

    def tower(self, name: VisionPart) -> NativeBackend:
        """Return the same factories for another tower.

        A tower has no sequence parallelism, so its inputs and outputs are replicated over tp. The
        config determines its learning rate and whether it is frozen.
        """
        multipliers = {
            "vision": self.vision.vision_lr_multiplier,
            "connector": self.vision.connector_lr_multiplier,
        }
        # a shallow copy shares transports and notes with this backend
        other = copy.copy(self)
        other.lora = None  # LoRA is only for the decoder
        sink = self.options.weight_gradients
        # towers are on the first stage, whose gradients no other stage waits for: do not defer them
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
        """Return the embedding or head table."""
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
        """Return the core attention `[t, heads/tp, d]`.

        The inputs are `q[t, heads/tp, d]`, `k, v[t, groups/tp, d]` and `sinks[heads/tp]`.
        """
        return self.transport.attend(q, k, v, plan, scale, sinks, call)

    def states(self, rule: Rule) -> StateTransport:
        """Return the transport of a layer's recurrent states between the ranks of a row."""
        return self.recurrent.transport(rule, self.notes)

    def prepare(self, plan: AttentionPlan) -> None:
        """Precompute the host data that `attention` needs for a plan.

        The threads of the data loader call it.
        """
        self.transport.prepare(plan, self.heads)

    def prepare_states(self, plan: AttentionPlan) -> None:
        """Precompute the host data that recurrent layers need for a plan, in loader threads."""
        self.recurrent.prepare(plan)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context for a block's forward, including its recomputation in backward."""
        return contextlib.nullcontext()

    def tell(self, line: str) -> None:
        """Add a line to `warnings`, unless it has been added before."""
        self.notes.tell(line)

    def warnings(self) -> list[str]:
        """Return log lines about the chosen layers and the reasons, each line once."""
        return self.notes.take()
