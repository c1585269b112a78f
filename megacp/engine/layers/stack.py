"""The layers of a model in order, and all tensors of the decoder.

Pattern flags, such as --moe-layer-freq, determine the kind of each layer. They are parsed here,
once per model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megacp.engine.config.model import LORA_KINDS, ModelConfig, skip_pattern
from megacp.engine.layers.attention import ATTENTION
from megacp.engine.layers.dense import DENSE
from megacp.engine.layers.gated_delta import GATED_DELTA
from megacp.engine.layers.mamba2 import MAMBA2
from megacp.engine.layers.moe import MOE, SHARED
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, lora_kind, norm_weight

EXPERT_KINDS = tuple(kind for kind in LORA_KINDS if kind.startswith("experts."))
"""Kinds of linear layers in routed experts."""
STATES = {"gated_delta": GATED_DELTA, "mamba2": MAMBA2}
"""Mixers with a recurrent state, by `--linear-attention-rule`."""


@dataclass(frozen=True)
class Layer:
    """Description of one decoder block."""

    name: str
    mixer: LayerKind
    mlp: LayerKind
    window: int
    """Number of tokens that a query attends to, including itself; 0 means no limit."""
    rotates: bool
    """Whether queries and keys have a rotary embedding."""

    shared: LayerKind | None = None
    """Shared expert, whose input norm is the same as that of the routed experts."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Mixer, MLP, and the shared expert if the block has one."""
        if self.shared is None:
            return (self.mixer, self.mlp)
        return (self.mixer, self.mlp, self.shared)

    @property
    def has_state(self) -> bool:
        """Whether the mixer has a recurrent state instead of attention."""
        return self.mixer is not ATTENTION

    @property
    def is_routed(self) -> bool:
        """Whether a router sends tokens to experts."""
        return self.mlp is MOE

    def linears(self, model: ModelConfig) -> dict[str, Linear]:
        """Return the linear layers of the block by the last part of their names."""
        found: dict[str, Linear] = {}
        for kind in self.kinds:
            found.update(kind.linears(model))
        return found

    def tensors(self, model: ModelConfig) -> Iterator[Tensor]:
        """Yield all tensors of the block except LoRA pairs."""
        # if a part has only one norm, its name is the same before and after the part
        both = model.has_input_norms and model.has_output_norms
        places = ("", "_output") if both else ("",)
        # the shared expert comes third and has no norm
        for part, kind in itertools.zip_longest(("attention", "mlp"), self.kinds):
            if part is not None:
                for place in places:
                    yield norm_weight(model, f"{self.name}.{part}{place}_norm", model.hidden_size)
            yield from kind.tensors(model, self.name)

    def flops(self, model: ModelConfig, tokens: int, area: int) -> Flops:
        """Return the FLOPs of the forward pass, without LoRA pairs.

        `area` is the number of allowed (query, key) pairs among the `tokens`.
        """
        # 2 FLOPs per weight and token
        weights = sum(linear.inputs * linear.outputs for linear in self.linears(model).values())
        mixing = self.mixer.mixing(model, tokens, area) + self.mlp.mixing(model, tokens, area)
        return Flops(2.0 * tokens * weights, 0.0) + mixing

    def pairs(self, model: ModelConfig) -> Iterator[Tensor]:
        """Yield the LoRA matrices of all linear layers in the block."""
        for kind in self.kinds:
            found = dict(kind.linears(model))
            of_expert = kind.of_expert(model)
            for expert in range(model.num_experts):
                for name, linear in of_expert.items():
                    found[f"experts.{expert}.{name}"] = linear
            for name, linear in found.items():
                whole_name = f"{self.name}.{kind.name}.{name}"
                size = model.lora_pairs.get(lora_kind(whole_name))
                if size is not None:
                    yield from linear.pair(whole_name, size)

    def lora_linears(self, model: ModelConfig) -> dict[str, Linear]:
        """Return the linear layers with a LoRA pair, by kind; one layer represents all experts."""
        # collect all linear layers, then keep the kinds in --lora-targets
        found = {}
        for kind in self.kinds:
            for name, linear in kind.linears(model).items():
                found[lora_kind(f"{kind.name}.{name}")] = linear
            for name, linear in kind.of_expert(model).items():
                found[lora_kind(f"{kind.name}.experts.{name}")] = linear
        return {kind: linear for kind, linear in found.items() if kind in model.lora_pairs}

    def has_pairs(self, model: ModelConfig) -> bool:
        """Return whether any linear layer of the block has a LoRA pair."""
        # stop at the first pair: a layer may have thousands of experts
        return next(self.pairs(model), None) is not None


# Cached because checks, costs and modules all ask for the layers; a ModelConfig is hashable.
@functools.cache
def layers_of(model: ModelConfig) -> tuple[Layer, ...]:
    """Return one `Layer` per decoder block. Raise ValueError if a pattern flag is invalid."""
    # one period of each pattern; True marks the layers that it skips
    still = skip_pattern("--no-rope-freq", model.no_rope_freq)
    open_to_all = skip_pattern("--window-attn-skip-freq", model.window_attn_skip_freq, skips="0")
    attend = skip_pattern("--linear-attention-freq", model.linear_attention_freq, skips="0")
    # if the flag is not set, all layers use attention; a number N means only every N-th layer
    if model.linear_attention_freq is None:
        attend = (True,)
    routed = skip_pattern("--moe-layer-freq", model.moe_layer_freq)
    # As in Megatron, a number means the first of every N layers here, but the last in other flags.
    if model.moe_layer_freq.isdigit():
        routed = routed[::-1]
    found = []
    for i in range(model.num_layers):
        # a pattern repeats until the last layer
        mixer = ATTENTION if attend[i % len(attend)] else STATES[model.linear_attention_rule]
        window = 0 if open_to_all[i % len(open_to_all)] else model.window_size or 0
        mlp = MOE if model.num_experts and routed[i % len(routed)] else DENSE
        shared = SHARED if mlp is MOE and model.moe_shared_expert_intermediate_size else None
        rotates = not still[i % len(still)]
        found.append(Layer(f"layers.{i}", mixer, mlp, window, rotates, shared))
    return tuple(found)


def vocabulary_table(model: ModelConfig, name: str, rows: int) -> Tensor:
    """Return a table `[rows, hidden]` with one row per token id: embedding or output head."""
    return Tensor(
        f"{name}.weight",
        (rows, model.hidden_size),
        "rows",
        std=model.init_method_std,
        treated="table",
    )


def decoder_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Yield all tensors of the decoder except LoRA pairs. A tied head has no tensor of its own."""
    yield vocabulary_table(model, "embedding", model.embedding_rows)
    for layer in layers_of(model):
        yield from layer.tensors(model)
    yield norm_weight(model, "final_norm", model.hidden_size)
    if model.untie_embeddings_and_output_weights:
        yield vocabulary_table(model, "head", model.vocab_size)


def lora_kinds(model: ModelConfig) -> tuple[str, ...]:
    """Return the kinds with a LoRA pair in at least one layer, in the order of `LORA_KINDS`."""
    found = set[str]()
    for layer in layers_of(model):
        found.update(layer.lora_linears(model))
    return tuple(kind for kind in model.lora_pairs if kind in found)


def pair_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Yield the LoRA matrices of all layers."""
    for layer in layers_of(model):
        yield from layer.pairs(model)


def model_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Yield all tensors of the decoder, LoRA pairs included, under their names in checkpoints."""
    yield from decoder_tensors(model)
    yield from pair_tensors(model)
