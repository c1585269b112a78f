"""The native backend: our layers in plain torch, on CPU and CUDA. Every line of it runs on a laptop."""

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
from megacp.attention.context_parallel.fused_states import FUSED, fused_mover, linear_attention_problem
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_transport import StateTransport
from megacp.attention.ops.kernel import Caller, Heads, at_once
from megacp.attention.ops.kernels import kernel_name
from megacp.attention.ops.pointwise import ACTIVATIONS, gated_norm, rms_norm
from megacp.attention.ops.recurrence import Rule
from megacp.distributed.grid import ProcessGrid, single_axis
from megacp.distributed.heap import keep_in_heap
from megacp.engine.backends.mlp import NormLinear, NormMLP, TiledMLP
from megacp.engine.config.model import VOCABULARY_MULTIPLE
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.attention import transport_of
from megacp.engine.layers.table import Cut, Tensor, layer_norm_tensors
from megacp.engine.rows.shard import row_axis
from megacp.engine.tensor_parallel.linear import ColumnNorm, ColumnParallelLinear, LinearSpec, RowParallelLinear
from megacp.engine.tensor_parallel.lora import ColumnPairs, LoraSpec, RowPair, adapted
from megacp.engine.tensor_parallel.parameters import LinearOptions, parameter_spec
from megacp.engine.tensor_parallel.vocabulary import TableSpec, VocabularyTable
from megacp.engine.tensor_parallel.weight_gradients import DeferredWeightGradients, WeightGradients

STATE_TEMPORARIES = 32 << 20
"""Bytes below which what a rule with a state makes on its way stays in a CPU's heap: the most that glibc takes."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dim, of this width; its tensors are `{name}.weight` and, of a LayerNorm, `{name}.bias`."""

    name: str
    size: int
    epsilon: float
    gated: bool = False
    """Whether a call has a gate, whose SiLU the result is multiplied by; the weight then begins at 1 in any model."""

    def weight(self, init: str, cut: Cut = "whole") -> Tensor:
        """The weight of an RMSNorm."""
        return Tensor(f"{self.name}.weight", (self.size,), cut, "ones" if self.gated else init, decays=False)


class RMSNorm(nn.Module):
    """RMSNorm with a weight that every tp rank holds; `partial` as in `parameter_spec`. One whose `init` is `zeros`
    multiplies by 1 + weight.
    """

    def __init__(self, norm: NormSpec, partial: bool | None, options: LinearOptions, init: str = "ones") -> None:
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
    layer.weight, layer.bias = (options.parameter(parameter_spec([tensor], options)) for tensor in tensors)
    return layer


VisionPart = Literal["vision", "connector"]
AdamWEngine = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""`(groups, betas, epsilon)`: AdamW over groups of 1-D `params` with their `weight_decay`.

Its moments are `exp_avg` and `exp_avg_sq` of a slice's state. torch counts updates there, Transformer Engine in the
group.
"""


class NativeBackend:
    """Factories of layers, core attention and the vocabulary for one rank of one grid; `tp` cuts global sizes.

    A model is written once against it. Parameter names and specs are the same for every backend, so a checkpoint moves
    between them unchanged. A norm and the linear behind it are asked for together, so a backend may fuse them.
    """

    name = "native"
    token_multiple = 1
    """Tokens of a tp rank are a multiple of this."""
    adamw: AdamWEngine | None = None
    """The fused AdamW of this backend; None leaves the choice to the optimizer."""

    def __init__(self, grid: ProcessGrid, config: RunConfig, weight_gradients: WeightGradients | None = None) -> None:
        parallel, training = config.parallel, config.training
        self.tp = grid.tp
        self.ep = grid.ep if config.model.num_experts > 0 else single_axis("ep")
        self.balance_terms = training.moe_aux_loss_coeff, training.moe_z_loss_coeff
        self.sequence_parallel = parallel.sequence_parallel and grid.tp.size > 1
        self.dtype = DTYPES[training.dtype]
        self.vision, self.frozen = config.vision, config.frozen_parts
        trained = "text" not in self.frozen
        model = config.model
        self.activation, self.norm_init = model.mlp_activation, "zeros" if model.apply_layernorm_1p else "ones"
        self.lora = LoraSpec(model.lora_pairs, model.lora_dropout) if model.lora_pairs else None
        self.options = LinearOptions(
            grid.tp,
            self.sequence_parallel,
            self.dtype,
            grid.device,
            trained,
            weight_gradients=weight_gradients,
        )
        self.deferred = weight_gradients if isinstance(weight_gradients, DeferredWeightGradients) else None
        hierarchy = parallel.hierarchical_context_parallel_sizes or ()
        kernel = kernel_name(training.attention_kernel, grid.device.type, training.dtype)
        self.row_axis = row_axis(grid, parallel)
        self._told: set[str] = set()
        self._untold: list[str] = []
        to = (self.row_axis, grid.device, hierarchy)
        self.transport = select_transport(parallel.cp_comm_type, kernel, *to, tell=self.tell)
        self.local_transport = select_transport(parallel.cp_comm_type, kernel, single_axis("one"), grid.device)
        """Transport of tokens that a rank has to itself: patches."""
        keys, ranks = model.linear_num_key_heads // grid.tp.size, self.row_axis.size
        self._states_by_heads = transport_of(config).whole_row and ranks > 1 and keys % ranks == 0
        self._taps = model.linear_conv_kernel_dim
        self._state_transports = list[StateTransport]()
        self.tile_rows = training.mlp_chunk_tokens
        if self.sequence_parallel and self.tile_rows:  # each tp rank gathers its part of a tile
            self.tile_rows = max(1, self.tile_rows // grid.tp.size)
        heads, groups = model.num_attention_heads // grid.tp.size, model.query_groups // grid.tp.size
        self._heads = Heads(heads, groups, model.head_dim)

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        """Module of `x[t/tp, h] -> y[t, f/tp]`, each tensor cut by rows."""
        return adapted(ColumnParallelLinear(linear, self.options), linear, ColumnPairs, self.lora, self.options)

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        """Module of `x[t, f/tp] -> y[t/tp, h]`, the one tensor cut by columns."""
        return adapted(RowParallelLinear(linear, self.options), linear, RowPair, self.lora, self.options)

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        """`norm` (None: none) and `column_linear` as one module of `(x[t/tp, h], save) -> y[t, f/tp]`."""
        return NormLinear(None if norm is None else self.norm(norm), self.column_linear(linear))

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        """`norm` (None: none), column linear, gated activation and row linear as one module of `(x[t/tp, h], save) ->
        [t/tp, h]`.

        Both linears have biases, or neither.
        """
        first, activation = None if norm is None else self.norm(norm), ACTIVATIONS[self.activation]
        return self.tiled(NormMLP(first, self.column_linear(gate_up), activation, self.row_linear(down)))

    def tiled(self, mlp: nn.Module) -> nn.Module:
        """A `norm_mlp` over tiles of tokens, where `--mlp-chunk-tokens` asks for them."""
        return TiledMLP(mlp, self.tile_rows, self.precision) if self.tile_rows else mlp

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        """RMSNorm over the last dim; `over_heads` when tp ranks apply it to different heads of the same tokens."""
        return RMSNorm(norm, True if over_heads else None, self.options, self.norm_init)

    def column_norm(self, norm: NormSpec) -> nn.Module:
        """RMSNorm of `y[t, f/tp]`, what a column linear gives: over the columns of all tp ranks together."""
        return ColumnNorm(norm.weight(self.norm_init, "rows"), norm.epsilon, self.options)

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """A tensor that is a parameter by itself."""
        return self.options.parameter(parameter_spec([tensor], self.options))

    def tower(self, name: VisionPart) -> NativeBackend:
        """The same factories for another tower: no sequence parallelism, so activations are replicated over tp at
        its seams, and the learning rate or the freezing that the config gives this tower."""
        multipliers = {"vision": self.vision.vision_lr_multiplier, "connector": self.vision.connector_lr_multiplier}
        frozen, multiplier = name in self.frozen, multipliers[name]
        other = copy.copy(self)
        other.sequence_parallel, other.lora = False, None
        sink = self.options.weight_gradients
        other.options = dataclasses.replace(
            self.options,
            sequence_parallel=False,
            trained=not frozen,
            lr_multiplier=multiplier,
            weight_gradients=sink and sink.at_once(),  # on the first stage, for whose gradients nobody waits
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
        """Core attention `q[t, heads/tp, d]`, `k, v[t, groups/tp, d]`, `sinks[heads/tp]` -> `[t, heads/tp, d]`."""
        return self.transport.attend(q, k, v, plan, scale, sinks, call)

    def states(self, rule: Rule) -> StateTransport:
        """What moves the states of a layer over the ranks of a row."""
        device = self.options.device
        if device.type == "cpu":
            keep_in_heap(STATE_TEMPORARIES)
        fused = fused_mover(rule, device.type, self.dtype)
        if fused:
            self.tell("states: flash-linear-attention's")
        elif (rule, device.type, self.dtype) in FUSED:
            self.tell(f"states: torch's, because {linear_attention_problem()}")
        found = StateTransport(rule, self.row_axis, self._states_by_heads, self._taps, device, fused)
        self._state_transports.append(found)
        return found

    def prepare(self, plan: AttentionPlan) -> None:
        """Make on the host what `attention` will ask of a plan; called from the loader's threads."""
        self.transport.prepare(plan, self._heads)

    def prepare_states(self, plan: AttentionPlan) -> None:
        """Make on the host what layers with a state will ask of a plan, likewise."""
        for states in self._state_transports[:1]:  # all layers ask the same
            states.prepare(plan)

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which blocks run forward; a block that is computed again in backward opens it again."""
        return contextlib.nullcontext()

    def tell(self, line: str) -> None:
        """Add a line to `warnings`, where it was not told before."""
        if line not in self._told:
            self._told.add(line)
            self._untold.append(line)

    def warnings(self) -> list[str]:
        """Lines that a person should read, each once: which layers run, and why not others."""
        lines = list(self._untold)
        self._untold.clear()  # shared with the towers' copies
        return lines
