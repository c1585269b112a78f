"""The native backend: our layers in plain torch, on CPU and CUDA. Every line of it runs on a
laptop.
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
    """A norm over the last dim, of this width; its tensors are `{name}.weight` and, of a LayerNorm,
    `{name}.bias`.
    """

    name: str
    size: int
    epsilon: float
    gated: bool = False
    """Whether a call has a gate, whose SiLU the result is multiplied by; the weight then begins at
    1 in any model.
    """

    def weight(self, init: str, cut: Cut = "whole") -> Tensor:
        """The weight of an RMSNorm."""
        return Tensor(
            f"{self.name}.weight", (self.size,), cut, "ones" if self.gated else init, decays=False
        )


class RMSNorm(nn.Module):
    """RMSNorm with a weight that every tp rank holds; `partial` as in `parameter_spec`. One whose
    `init` is `zeros` multiplies by 1 + weight.
    """

    def __init__(
        self, norm: NormSpec, partial: bool | None, options: LinearOptions, init: str = "ones"
    ) -> None:
        super().__init__()
        weight = norm.weight(init)
        self.epsilon, self.zero_centered = norm.epsilon, weight.init == "zeros"
        self.weight = options.parameter(parameter_spec([weight], options, partial_over_tp=partial))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """`x[..., size]` to the same shape."""
        if gate is not None:
            return gated_norm(x, gate, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon, self.zero_centered)


def layer_norm(norm: NormSpec, options: LinearOptions) -> nn.Module:
    """LayerNorm over the last dim, with a weight and a bias that every tp rank holds."""
    layer = nn.LayerNorm(norm.size, norm.epsilon, elementwise_affine=False)
    tensors = layer_norm_tensors(norm.name, norm.size)
    layer.weight, layer.bias = (
        options.parameter(parameter_spec([tensor], options)) for tensor in tensors
    )
    return layer


@dataclass(frozen=True)
class ExpertBalance:
    """How evenly experts are to be used: the factors of two terms of the loss, and the axes whose
    tokens they count.
    """

    document: float
    """Factor of the balance within each document (--moe-aux-loss-coeff)."""
    z: float
    """Factor of the squared log-sum of scores (--moe-z-loss-coeff)."""
    axes: tuple[Axis, Axis]


VisionPart = Literal["vision", "connector"]
AdamWEngine = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""`(groups, betas, epsilon)`: AdamW over groups of 1-D `params` with their `weight_decay`.

Its moments are `exp_avg` and `exp_avg_sq` of a slice's state. torch counts updates there,
Transformer Engine in the group.
"""


class NativeBackend:
    """Factories of layers, core attention and the vocabulary for one rank of one grid; `tp` cuts
    global sizes.

    A model is written once against it. Parameter names and specs are the same for every backend, so
    a checkpoint moves between them unchanged. A norm and the linear behind it are asked for
    together, so a backend may fuse them.
    """

    name = "native"
    token_multiple = 1
    """Tokens of a tp rank are a multiple of this."""
    adamw: AdamWEngine | None = None
    """The fused AdamW of this backend; None leaves the choice to the optimizer."""

    def __init__(
        self, grid: ProcessGrid, config: RunConfig, weight_gradients: WeightGradients | None = None
    ) -> None:
        model, parallel, training = config.model, config.parallel, config.training
        self.tp = grid.tp
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
        # what layers are made of
        self.activation = model.mlp_activation
        self.norm_init = "zeros" if model.apply_layernorm_1p else "ones"
        self.lora = LoraSpec(model.lora_pairs, model.lora_dropout) if model.lora_pairs else None
        self.vision, self.frozen = config.vision, config.frozen_parts
        self.tile_rows = training.mlp_chunk_tokens
        if self.sequence_parallel and self.tile_rows:  # each tp rank gathers its part of a tile
            self.tile_rows = max(1, self.tile_rows // grid.tp.size)
        # what crosses the ranks of a row
        row = row_axis(grid, parallel)
        kernel = kernel_name(training.attention_kernel, grid.device.type, training.dtype)
        name, hierarchy = parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes or ()
        self.transport = select_transport(
            name, kernel, row, grid.device, hierarchy, tell=self.notes.tell
        )
        self.local_transport = select_transport(name, kernel, single_axis("one"), grid.device)
        """Transport of tokens that a rank has to itself: patches."""
        heads, groups = (
            model.num_attention_heads // grid.tp.size,
            model.query_groups // grid.tp.size,
        )
        self.heads = Heads(heads, groups, model.head_dim)
        self.recurrent = RecurrentStates(config, row, self.options)
        self.balance = ExpertBalance(
            training.moe_aux_loss_coeff, training.moe_z_loss_coeff, (grid.tp, row)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return self.options.dtype

    @property
    def sequence_parallel(self) -> bool:
        """Whether tp ranks have different tokens between two tensor-parallel layers."""
        return self.options.sequence_parallel

    @property
    def deferred(self) -> DeferredWeightGradients | None:
        """The weight gradients that wait for a later action of the schedule; None if none does."""
        gradients = self.options.weight_gradients
        return gradients if isinstance(gradients, DeferredWeightGradients) else None

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        """Module of `x[t/tp, h] -> y[t, f/tp]`, each tensor cut by rows."""
        return adapted(
            ColumnParallelLinear(linear, self.options), linear, ColumnPairs, self.lora, self.options
        )

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        """Module of `x[t, f/tp] -> y[t/tp, h]`, the one tensor cut by columns."""
        return adapted(
            RowParallelLinear(linear, self.options), linear, RowPair, self.lora, self.options
        )

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        """`norm` (None: none) and `column_linear` as one module of `(x[t/tp, h], save) -> y[t,
        f/tp]`.
        """
        return NormLinear(None if norm is None else self.norm(norm), self.column_linear(linear))

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        """`norm` (None: none), column linear, gated activation and row linear as one module of
        `(x[t/tp, h], save) -> [t/tp, h]`.

        Both linears have biases, or neither.
        """
        first, activation = None if norm is None else self.norm(norm), ACTIVATIONS[self.activation]
        return self.tiled(
            NormMLP(first, self.column_linear(gate_up), activation, self.row_linear(down))
        )

    def tiled(self, mlp: nn.Module) -> nn.Module:
        """A `norm_mlp` over tiles of tokens, where `--mlp-chunk-tokens` asks for them."""
        return TiledMLP(mlp, self.tile_rows, self.precision) if self.tile_rows else mlp

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        """RMSNorm over the last dim; `over_heads` when tp ranks apply it to different heads of the
        same tokens.
        """
        return RMSNorm(norm, True if over_heads else None, self.options, self.norm_init)

    def column_norm(self, norm: NormSpec) -> nn.Module:
        """RMSNorm of `y[t, f/tp]`, what a column linear gives: over the columns of all tp ranks
        together.
        """
        return ColumnNorm(norm.weight(self.norm_init, "rows"), norm.epsilon, self.options)

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """A tensor that is a parameter by itself."""
        return self.options.parameter(parameter_spec([tensor], self.options))

    def tower(self, name: VisionPart) -> NativeBackend:
        """The same factories for another tower: no sequence parallelism, so activations are
        replicated over tp at its seams, and the learning rate or the freezing that the config gives
        this tower."""
        multipliers = {
            "vision": self.vision.vision_lr_multiplier,
            "connector": self.vision.connector_lr_multiplier,
        }
        frozen, multiplier = name in self.frozen, multipliers[name]
        other = copy.copy(self)
        other.lora = None
        sink = self.options.weight_gradients
        other.options = dataclasses.replace(
            self.options,
            sequence_parallel=False,
            trained=not frozen,
            lr_multiplier=multiplier,
            weight_gradients=sink
            and sink.at_once(),  # on the first stage, for whose gradients nobody waits
        )
        return other

    def vocabulary(self, table: TableSpec) -> VocabularyTable:
        """The embedding or head table."""
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
        """Core attention `q[t, heads/tp, d]`, `k, v[t, groups/tp, d]`, `sinks[heads/tp]` -> `[t,
        heads/tp, d]`.
        """
        return self.transport.attend(q, k, v, plan, scale, sinks, call)

    def states(self, rule: Rule) -> StateTransport:
        """Return what moves the states of a layer over the ranks of a row."""
        return self.recurrent.transport(rule, self.notes)

    def prepare(self, plan: AttentionPlan) -> None:
        """Make on the host what `attention` will ask of a plan; called from the loader's
        threads.
        """
        self.transport.prepare(plan, self.heads)

    def prepare_states(self, plan: AttentionPlan) -> None:
        """Make on the host what layers with a state will ask of a plan, likewise."""
        self.recurrent.prepare(plan)

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which blocks run forward; a block that is computed again in backward opens
        it again.
        """
        return contextlib.nullcontext()

    def tell(self, line: str) -> None:
        """Add a line to `warnings`, unless it was told before."""
        self.notes.tell(line)

    def warnings(self) -> list[str]:
        """Lines that a person should read, each once: which layers run, and why not others."""
        return self.notes.take()
