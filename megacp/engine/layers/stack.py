"""The layers of a model in order, and all of its tensors.

Patterns of flags say which layer is of which kind. They are parsed here, once for each model.
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
"""Kinds of linears of routed experts."""
STATES = {"gated_delta": GATED_DELTA, "mamba2": MAMBA2}
"""Layers with a state by the words of --linear-attention-rule."""


@dataclass(frozen=True)
class Layer:
    """What stands in one block."""

    name: str
    mixer: LayerKind
    mlp: LayerKind
    window: int
    """Tokens that attention sees, the query's own included; 0: no limit."""
    rotates: bool
    """Whether queries and keys have the rotary embedding."""

    shared: LayerKind | None = None
    """An MLP beside experts, behind the same norm."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All that stands in the block."""
        return (
            (self.mixer, self.mlp) if self.shared is None else (self.mixer, self.mlp, self.shared)
        )

    @property
    def has_state(self) -> bool:
        """Whether a state takes the place of attention."""
        return self.mixer is not ATTENTION

    @property
    def is_routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return self.mlp is MOE

    def linears(self, model: ModelConfig) -> dict[str, Linear]:
        """Linears of mixer and MLP, by the last part of their names."""
        return {name: linear for kind in self.kinds for name, linear in kind.linears(model).items()}

    def tensors(self, model: ModelConfig) -> Iterator[Tensor]:
        """All but low-rank pairs."""
        both = model.has_input_norms and model.has_output_norms
        places = ("", "_output") if both else ("",)
        for part, kind in itertools.zip_longest(("attention", "mlp"), self.kinds):
            for place in places if part else ():
                yield norm_weight(model, f"{self.name}.{part}{place}_norm", model.hidden_size)
            yield from kind.tensors(model, self.name)

    def flops(self, model: ModelConfig, tokens: int, area: int) -> Flops:
        """The forward over some tokens with an area of allowed (query, key) pairs, without low-rank
        pairs.
        """
        weights = sum(linear.inputs * linear.outputs for linear in self.linears(model).values())
        mixing = self.mixer.mixing(model, tokens, area) + self.mlp.mixing(model, tokens, area)
        return Flops(2.0 * tokens * weights, 0.0) + mixing

    def pairs(self, model: ModelConfig) -> Iterator[Tensor]:
        """The low-rank pairs beside its linears."""
        for kind in self.kinds:
            found, of_expert = dict(kind.linears(model)), kind.of_expert(model).items()
            for expert in range(model.num_experts):
                found |= {f"experts.{expert}.{name}": linear for name, linear in of_expert}
            for name, linear in found.items():
                whole_name = f"{self.name}.{kind.name}.{name}"
                size = model.lora_pairs.get(lora_kind(whole_name))
                if size is not None:
                    yield from linear.pair(whole_name, size)

    def lora_linears(self, model: ModelConfig) -> dict[str, Linear]:
        """The linears that have a low-rank pair, by kind; one stands for those of all experts."""
        found = {}
        for kind in self.kinds:
            for name, linear in kind.linears(model).items():
                found[lora_kind(f"{kind.name}.{name}")] = linear
            for name, linear in kind.of_expert(model).items():
                found[lora_kind(f"{kind.name}.experts.{name}")] = linear
        return {kind: linear for kind, linear in found.items() if kind in model.lora_pairs}

    def has_pairs(self, model: ModelConfig) -> bool:
        """Whether some linear of the block has a low-rank pair."""
        return next(self.pairs(model), None) is not None


@functools.cache
def layers_of(model: ModelConfig) -> tuple[Layer, ...]:
    """One a block. ValueError for a pattern that is neither a number nor a list."""
    still = skip_pattern("--no-rope-freq", model.no_rope_freq)
    open_to_all = skip_pattern("--window-attn-skip-freq", model.window_attn_skip_freq, skips="0")
    attend = skip_pattern("--linear-attention-freq", model.linear_attention_freq, skips="0")
    if model.linear_attention_freq is None:
        attend = (True,)
    routed = skip_pattern("--moe-layer-freq", model.moe_layer_freq)
    if (
        model.moe_layer_freq.isdigit()
    ):  # Megatron counts the first of N, where others count the last
        routed = routed[::-1]
    found = []
    for i in range(model.num_layers):
        mixer = ATTENTION if attend[i % len(attend)] else STATES[model.linear_attention_rule]
        window = 0 if open_to_all[i % len(open_to_all)] else model.window_size or 0
        mlp = MOE if model.num_experts and routed[i % len(routed)] else DENSE
        shared = SHARED if mlp is MOE and model.moe_shared_expert_intermediate_size else None
        found.append(Layer(f"layers.{i}", mixer, mlp, window, not still[i % len(still)], shared))
    return tuple(found)


def vocabulary_table(model: ModelConfig, name: str, rows: int) -> Tensor:
    """A table of the vocabulary, embedding or head."""
    return Tensor(
        f"{name}.weight",
        (rows, model.hidden_size),
        "rows",
        std=model.init_method_std,
        treated="table",
    )


def decoder_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All of the decoder but low-rank pairs; a tied head is the embedding."""
    yield vocabulary_table(model, "embedding", model.embedding_rows)
    for layer in layers_of(model):
        yield from layer.tensors(model)
    yield norm_weight(model, "final_norm", model.hidden_size)
    if model.untie_embeddings_and_output_weights:
        yield vocabulary_table(model, "head", model.vocab_size)


def lora_kinds(model: ModelConfig) -> tuple[str, ...]:
    """The kinds of linears with a low-rank pair that some layer has, in the order of
    `LORA_KINDS`.
    """
    found = {kind for layer in layers_of(model) for kind in layer.lora_linears(model)}
    return tuple(kind for kind in model.lora_pairs if kind in found)


def pair_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """The low-rank pairs of all layers."""
    for layer in layers_of(model):
        yield from layer.pairs(model)


def model_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of the decoder, as checkpoints name them."""
    yield from decoder_tensors(model)
    yield from pair_tensors(model)
