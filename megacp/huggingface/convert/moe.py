"""Families with experts.

Released folders have one tensor per expert and matrix, like our checkpoints. The library's modules
stack the matrices of all experts, and some folders do, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megacp.engine.config.ranges import MAX_EXPERTS
from megacp.huggingface.convert.config_json import ConfigJson, Values, shown
from megacp.huggingface.convert.family import WITH_EXPERTS, Family
from megacp.huggingface.convert.tables import DECODER, NATIVE, Table
from megacp.huggingface.convert.tensors import BIASES, STACKS, Info, Link
from megacp.huggingface.convert.text_families import (
    NO_WINDOW,
    OLMO2_SIZES,
    QWEN2_SIZES,
    QWEN3_5,
    QWEN3_5_SILENT,
    QWEN3_5_SIZES,
    QWEN3_5_WORDS,
    Qwen35Words,
)
from megacp.huggingface.convert.words import (
    Words,
    expert_pattern,
    layer_pattern,
    resolved,
    routed_layers,
)

# The fields that may contain the number of experts.
_COUNTS = ("num_local_experts", "num_experts")
# The layout of a folder with stacked experts, which can only be read.
_STACKED = "stacked"


def _experts(block: str, words: tuple[str, str, str]) -> dict[str, str | tuple[str, ...]]:
    """Return the table rows for the router and each expert; `words` are gate, up and down."""
    # The library calls the router a gate.
    rows = {"gate.weight": "router.weight"}
    for word, name in zip(words, ("gate", "up", "down"), strict=True):
        rows[f"experts.{{e}}.{word}.weight"] = f"experts.{{e}}.{name}.weight"
    return {
        f"model.layers.{{i}}.{block}.{theirs}": f"layers.{{i}}.mlp.{ours}"
        for theirs, ours in rows.items()
    }


# Mixtral's name for the block. With stacked experts, folders use the name of other families.
_BLOCK = "block_sparse_moe"
_WORDS = ("gate_proj", "up_proj", "down_proj")
_EACH = DECODER | _experts("mlp", _WORDS)
_MIXTRAL = DECODER | _experts(_BLOCK, ("w1", "w3", "w2"))


def _shared(word: str) -> dict[str, str | tuple[str, ...]]:
    """Return the table rows for a shared expert, which processes all tokens."""
    begin = f"model.layers.{{i}}.mlp.{word}"
    names = zip(_WORDS, ("gate", "up", "down"), strict=True)
    return {
        f"{begin}.{theirs}.weight": f"layers.{{i}}.mlp.shared.{ours}.weight"
        for theirs, ours in names
    }


# The gate of the shared expert.
_GATE = {"model.layers.{i}.mlp.shared_expert_gate.weight": "layers.{i}.mlp.shared_gate.weight"}
QWEN3_5_MOE: Table = QWEN3_5 | _EACH | _shared("shared_expert") | _GATE


# The router's correction for expert selection.
_CORRECTION = {
    "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.router.correction"
}
_GLM: Table = _EACH | _shared("shared_experts") | _CORRECTION


def stacked(table: Table, experts: int) -> Table:
    """Return a table for stacked experts, including their biases.

    The stacks, joined along dim 0, are gate and up of each expert, `[E, 2 I, h]`, and down,
    `[E, h, I]`. The router has the same name in all families.
    """
    # Drop the rows of individual experts.
    found = {
        theirs.replace(_BLOCK, "mlp"): ours for theirs, ours in table.items() if "{e}" not in theirs
    }
    layer = next(theirs for theirs in found if "{i}" in theirs).partition("{i}")[0]
    # `links_of` skips biases that a model does not have.
    for ends, kind in ((STACKS, "weight"), (BIASES, "bias")):
        for end, names in zip(ends, (("gate", "up"), ("down",)), strict=True):
            # Experts are the outer dimension: gate and up of an expert are next to each other.
            ours = []
            for e in range(experts):
                ours += [f"layers.{{i}}.mlp.experts.{e}.{name}.{kind}" for name in names]
            found[f"{layer}{{i}}.mlp{end}"] = tuple(ours)
    return found


class ExpertFamily(Family):
    """A family whose folders may stack their experts."""

    def links(
        self, values: Values, layout: str = NATIVE, infos: Mapping[str, Info] | None = None
    ) -> list[Link]:
        table = self.table
        if layout == _STACKED:
            table = stacked(table, values["num_experts"])
        return self.links_of_table(table, values)

    def links_of_modules(self, values: Values) -> list[Link]:
        return self.links(values, _STACKED)

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        return _STACKED if any(name.endswith(STACKS) for name in infos) else NATIVE


class Glm4Moe(ExpertFamily):
    """The family with a multi-token-prediction layer after the last layer."""

    usual_further_layers = 1


@dataclass(frozen=True)
class ExpertWords(Words):
    """Config fields of a class with experts in every layer; the MLP field sets their width."""

    experts: tuple[str, int] = ("num_experts", 64)
    """The class's field for the number of experts, and its default. The library accepts
    either name in _COUNTS.
    """
    chosen: int = 8
    """Default number of experts per token."""
    has_norm: bool = True
    """Whether the class has `norm_topk_prob`, which normalises a token's weights over its chosen
    experts. Without the field they are always normalised.
    """

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        # Configs use either name of the number of experts.
        name = next((name for name in _COUNTS if c.get(name) is not None), self.experts[0])
        count = c.number(name, self.experts[1], high=MAX_EXPERTS)
        v["num_experts"] = count
        # Both names, if present, must agree.
        c.only(**dict.fromkeys(_COUNTS, count))
        v["moe_router_topk"] = c.number("num_experts_per_tok", self.chosen, high=count)
        v["moe_router_pre_softmax"] = self.has_norm and not c.switch("norm_topk_prob")
        c.only(router_jitter_noise=0.0, clip_qkv=None)
        return v | {"moe_ffn_hidden_size": None, "moe_layer_freq": "1"}

    def to_hf(self, v: Values) -> Values:
        content = super().to_hf(v) | {"intermediate_size": resolved(v)["ffn_hidden_size"]}
        content |= {self.experts[0]: v["num_experts"], "num_experts_per_tok": v["moe_router_topk"]}
        if self.has_norm:
            content["norm_topk_prob"] = not v["moe_router_pre_softmax"]
        return content


@dataclass(frozen=True)
class Qwen3MoeWords(ExpertWords):
    """Config fields of a class that may also have dense layers, with a separate MLP width."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        every = c.number("decoder_sparse_step", 1)
        dense = c.get("mlp_only_layers") or []
        # A layer has experts if it is one of every N layers and not listed as dense.
        sparse = range(every - 1, v["num_layers"], every) if isinstance(dense, list) else ()
        routed = [i in sparse and i not in dense for i in range(v["num_layers"])]
        if not any(routed):
            c.faults.append(
                f"mlp_only_layers {shown(dense)}, decoder_sparse_step {every}: no layer has experts"
            )
        width = c.number("moe_intermediate_size", 768)
        return v | {"moe_ffn_hidden_size": width, "moe_layer_freq": expert_pattern(routed)}

    def to_hf(self, v: Values) -> Values:
        routed = routed_layers(v)
        pattern = layer_pattern(routed) or ""
        every = int(pattern) if pattern.isdigit() else 1
        # If the layers follow no regular step, dense layers are listed individually.
        content = super().to_hf(v) | {
            "intermediate_size": v["ffn_hidden_size"],
            "decoder_sparse_step": every,
        }
        content["mlp_only_layers"] = [i for i, one in enumerate(routed) if every == 1 and not one]
        return content | {"moe_intermediate_size": resolved(v)["moe_ffn_hidden_size"]}


@dataclass(frozen=True)
class Qwen35MoeWords(Qwen35Words, ExpertWords):
    """Config fields of a class with a gated shared expert."""

    def from_hf(self, c: ConfigJson) -> Values:
        width = c.number("shared_expert_intermediate_size", 512)
        return super().from_hf(c) | {
            "moe_shared_expert_intermediate_size": width,
            "moe_shared_expert_gate": True,
        }

    def to_hf(self, v: Values) -> Values:
        content = super().to_hf(v) | {
            "shared_expert_intermediate_size": v["moe_shared_expert_intermediate_size"]
        }
        # The class has no dense MLP, so it has only the width of experts.
        return content | {"moe_intermediate_size": content.pop("intermediate_size")}


@dataclass(frozen=True)
class Glm4MoeWords(ExpertWords):
    """Config fields of a class whose first layers are dense. Later layers route within groups of
    experts, by sigmoid scores with a correction.
    """

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        first = c.number("first_k_dense_replace", 1, low=0)
        width = c.number("moe_intermediate_size", 1408)
        # All layers after the first dense ones have experts.
        routed = [i >= first for i in range(v["num_layers"])]
        if not any(routed):
            c.faults.append(f"first_k_dense_replace {first}: no layer has experts")
        v |= {"moe_ffn_hidden_size": width, "moe_layer_freq": expert_pattern(routed)}
        # Our single shared expert is as wide as all shared experts of the library together.
        v["moe_shared_expert_intermediate_size"] = width * c.number("n_shared_experts", 1)
        v["moe_router_pre_softmax"] = not c.switch("norm_topk_prob", True)
        v["add_qkv_bias"] = c.switch("attention_bias")
        v["qk_layernorm"] = "head" if c.switch("use_qk_norm") else "off"
        v["moe_router_topk_scaling_factor"] = c.number(
            "routed_scaling_factor", 1.0, float, 1e-6, 1e6
        )
        return v | {ours: c.number(theirs, 1) for theirs, ours in _GROUPS.items()}

    def to_hf(self, v: Values) -> Values:
        routed = routed_layers(v)
        width = resolved(v)["moe_ffn_hidden_size"]
        content = super().to_hf(v) | {theirs: v[ours] for theirs, ours in _GROUPS.items()}
        content |= {"intermediate_size": v["ffn_hidden_size"], "moe_intermediate_size": width}
        # A model whose dense layers are not first reads back differently and is refused.
        first = routed.index(True) if any(routed) else len(routed)
        content |= {"first_k_dense_replace": first, "num_nextn_predict_layers": 0}
        shared = v["moe_shared_expert_intermediate_size"] or 0
        content["n_shared_experts"] = shared // (width or 1)
        content["norm_topk_prob"] = not v["moe_router_pre_softmax"]
        content["attention_bias"] = v["add_qkv_bias"]
        content["routed_scaling_factor"] = v["moe_router_topk_scaling_factor"]
        return content | {"use_qk_norm": v["qk_layernorm"] == "head"}


# Expert-group fields -> our flags.
_GROUPS = {"n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk"}
# The library's defaults for sizes that a config omits, and the fields of each class.

_MIXTRAL_SIZES = OLMO2_SIZES | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}
_OLMOE_SIZES = OLMO2_SIZES | {
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 2048,
    "hidden_size": 2048,
    "max_position_embeddings": 4096,
}
_QWEN3_SIZES = QWEN2_SIZES | {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
}
# Mixtral normalises the weights of the chosen experts.
_MIXTRAL_WORDS = ExpertWords(
    _MIXTRAL_SIZES,
    1e6,
    window="sliding_window",
    experts=("num_local_experts", 8),
    chosen=2,
    has_norm=False,
)
_OLMOE_WORDS = ExpertWords(_OLMOE_SIZES, attention_bias=True, fixed={"qk_layernorm": "all_heads"})
_QWEN3_WORDS = Qwen3MoeWords(
    _QWEN3_SIZES, attention_bias=True, experts=("num_experts", 128), fixed={"qk_layernorm": "head"}
)
QWEN3_5_MOE_SIZES = {
    name: size for name, size in QWEN3_5_SIZES.items() if name != "intermediate_size"
}
QWEN3_5_MOE_SIZES |= {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
}
# The widths of the shared expert and of other experts are separate fields.
QWEN3_5_MOE_WORDS = Qwen35MoeWords(
    QWEN3_5_MOE_SIZES,
    head_dim=True,
    attention_bias=True,
    rotary_part=0.25,
    fixed=QWEN3_5_WORDS.fixed,
    experts=("num_experts", 256),
    has_norm=False,
)
_GLM_SIZES = OLMO2_SIZES | {
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "intermediate_size": 10944,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
}
# GLM-4.5 chooses experts by sigmoid scores.
_GLM_WORDS = Glm4MoeWords(
    _GLM_SIZES,
    rotary_part=0.5,
    experts=("n_routed_experts", 128),
    has_norm=False,
    fixed={"moe_router_score_function": "sigmoid"},
)
# Fields about an auxiliary training loss.
TRAINING = frozenset({"router_aux_loss_coef", "output_router_logits"})
# Fields that are ignored. The class has no dense MLP, so `intermediate_size` has no effect.
QWEN3_5_MOE_SILENT = QWEN3_5_SILENT | TRAINING | {"intermediate_size"}


def _family(
    name: str,
    cls: str,
    words: ExpertWords,
    fits: Values,
    table: Table = _EACH,
    harmless: frozenset[str] = TRAINING,
    kind: type[ExpertFamily] = ExpertFamily,
    peft_converts: bool = True,
) -> Family:
    """Return a family with experts whose config is read and written by `words`."""
    return kind(
        name,
        f"{cls}ForCausalLM",
        words.sizes,
        words.from_hf,
        words.to_hf,
        table,
        (fits,),
        harmless,
        peft_converts=peft_converts,
    )


EXPERT_FAMILIES = (
    _family("mixtral", "Mixtral", _MIXTRAL_WORDS, fits=WITH_EXPERTS, table=_MIXTRAL),
    _family("olmoe", "Olmoe", _OLMOE_WORDS, fits=WITH_EXPERTS | {"qk_layernorm": "all_heads"}),
    _family(
        "qwen3_moe",
        "Qwen3Moe",
        _QWEN3_WORDS,
        fits=WITH_EXPERTS | {"qk_layernorm": "head"},
        harmless=TRAINING | NO_WINDOW,
    ),
    _family(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        QWEN3_5_MOE_WORDS,
        fits={
            "vision_num_layers": False,
            "num_experts": True,
            "moe_shared_expert_gate": True,
            "softmax_type": "vanilla",
            "moe_router_score_function": "softmax",
        },
        table=QWEN3_5_MOE,
        harmless=QWEN3_5_MOE_SILENT,
        peft_converts=False,
    ),
    _family(
        "glm4_moe",
        "Glm4Moe",
        _GLM_WORDS,
        fits={
            "vision_num_layers": False,
            "num_experts": True,
            "moe_router_score_function": "sigmoid",
        },
        table=_GLM,
        harmless=TRAINING | {"num_nextn_predict_layers", "num_mtp_layers"},
        kind=Glm4Moe,
    ),
)
