"""The families of dense text models, with their tensor names, default sizes and config fields."""

from __future__ import annotations

from dataclasses import dataclass

from megacp.engine.layers.stack import layers_of
from megacp.huggingface.convert.config_json import LAYER_TYPES, ConfigJson, Values, shown
from megacp.huggingface.convert.family import PLAIN_DECODER, WITH_WINDOWS, Family
from megacp.huggingface.convert.tables import DECODER, Table
from megacp.huggingface.convert.words import (
    OFF_SWITCH,
    SIZES,
    Words,
    layer_pattern,
    model_of,
    resolved,
)

_SLIDING, _FULL = LAYER_TYPES
_STATE = "linear_attention"
# Fields that have no effect if `use_sliding_window` is false.
NO_WINDOW = frozenset({"sliding_window", "max_window_layers"})
# Ignored fields: those of multi-token-prediction layers, which the library skips, too, and a dtype
# that --dtype sets.
QWEN3_5_SILENT = frozenset(
    {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}
)

# Tensor names of classes that differ from DECODER.

# OLMo 2 normalises the outputs of attention and MLP, so its norms come one position later.
_OLMO2_NORMS = {
    "input_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "post_feedforward_layernorm",
}
_NORM_NAMES = {
    f"model.layers.{{i}}.{before}.weight": f"model.layers.{{i}}.{after}.weight"
    for before, after in _OLMO2_NORMS.items()
}
OLMO2 = {_NORM_NAMES.get(theirs, theirs): ours for theirs, ours in DECODER.items()}
# Gemma 3 has norms before and after attention and MLP.
GEMMA3 = DECODER | {
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attention_output_norm.weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers.{i}.mlp_output_norm.weight",
}
# Tensors of a layer with the gated delta rule.
_DELTA = {
    "in_proj_z.weight": "z.weight",
    "in_proj_b.weight": "b.weight",
    "in_proj_a.weight": "a.weight",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "norm.weight": "norm.weight",
    "out_proj.weight": "output.weight",
}
# Qwen3.5 joins q, k and v of the gated delta rule, and their convolutions.
QWEN3_5: dict[str, str | tuple[str, ...]] = {
    **DECODER,
    **{
        f"model.layers.{{i}}.linear_attn.{x}": f"layers.{{i}}.linear_attention.{ours}"
        for x, ours in _DELTA.items()
    },
    "model.layers.{i}.linear_attn.in_proj_qkv.weight": (
        "layers.{i}.linear_attention.q.weight",
        "layers.{i}.linear_attention.k.weight",
        "layers.{i}.linear_attention.v.weight",
    ),
    "model.layers.{i}.linear_attn.conv1d.weight": (
        "layers.{i}.linear_attention.convolution_q.weight",
        "layers.{i}.linear_attention.convolution_k.weight",
        "layers.{i}.linear_attention.convolution_v.weight",
    ),
}
# Phi-3 joins q, k and v, and gate and up.
PHI3 = {
    **{theirs: ours for theirs, ours in DECODER.items() if "_proj" not in theirs},
    "model.layers.{i}.self_attn.qkv_proj.weight": (
        "layers.{i}.attention.q.weight",
        "layers.{i}.attention.k.weight",
        "layers.{i}.attention.v.weight",
    ),
    "model.layers.{i}.self_attn.o_proj.weight": "layers.{i}.attention.output.weight",
    "model.layers.{i}.mlp.gate_up_proj.weight": (
        "layers.{i}.mlp.gate.weight",
        "layers.{i}.mlp.up.weight",
    ),
    "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down.weight",
}

# The library's defaults for sizes that a config omits.

# For classes without the field `head_dim`.
_NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
_MISTRAL_SIZES = SIZES | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_PHI3_SIZES = _NO_HEAD_DIM | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
OLMO2_SIZES = _NO_HEAD_DIM | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
_SMOLLM3_SIZES = _NO_HEAD_DIM | {
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
_QWEN3_SIZES = SIZES | {
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
QWEN2_SIZES = {name: value for name, value in _QWEN3_SIZES.items() if name != "head_dim"}
_GEMMA3_SIZES = SIZES | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
QWEN3_5_SIZES = SIZES | {
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 32768,
}
# Our flags of the gated delta rule have the names of the library's fields.
_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

# Classes for config fields that `Words` cannot read or write.


@dataclass(frozen=True)
class LlamaWords(Words):
    """Config fields of a class that requires the hidden size to be a multiple of the number of
    heads.
    """

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        # The library refuses such a config, even with an explicit head_dim.
        if v["hidden_size"] % v["num_attention_heads"]:
            c.faults.append(
                f"hidden_size {v['hidden_size']} must be a multiple of num_attention_heads "
                f"{v['num_attention_heads']}"
            )
        return v


@dataclass(frozen=True)
class Olmo3Words(Words):
    """Config fields of a class with one set of rotary parameters for each kind of layer.

    In older configs, `rope_scaling` applies only to layers with full attention.
    """

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        # An older config: layers with a window keep the unscaled embedding.
        if v["rope_scaling"] != "none" and not isinstance(c.get("rope_parameters"), dict):
            v["window_rotary_base"] = v["rotary_base"]
        return v

    def to_hf(self, v: Values) -> Values:
        content = super().to_hf(v)
        far = content["rope_parameters"]
        near = far
        if v["window_rotary_base"]:
            near = {"rope_type": "default", "rope_theta": v["window_rotary_base"]}
        return content | {"rope_parameters": {_SLIDING: near, _FULL: far}}


@dataclass(frozen=True)
class Gemma3Words(Olmo3Words):
    """Config fields of a class with a scaled embedding, its own softmax scale and GELU gates."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        if not isinstance(c.get("rope_parameters"), dict):
            # Older configs have a separate field for the base of layers with a window.
            v["window_rotary_base"] = c.number("rope_local_base_freq", 1e4, float, 1.0, 1e12)
        c.only(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
        c.only(final_logit_softcapping=None, attn_logit_softcapping=None)
        # Scores are divided by the square root of this field.
        # Embeddings are multiplied by the square root of the hidden size.
        scale = c.number("query_pre_attn_scalar", 256) ** -0.5
        return v | {"softmax_scale": scale, "embedding_multiplier": v["hidden_size"] ** 0.5}

    def to_hf(self, v: Values) -> Values:
        content = super().to_hf(v) | {"hidden_activation": "gelu_pytorch_tanh"}
        # The class has another field for its activation.
        del content["hidden_act"]
        content["rope_local_base_freq"] = v["window_rotary_base"] or v["rotary_base"]
        return content | {"query_pre_attn_scalar": round(resolved(v)["softmax_scale"] ** -2)}


@dataclass(frozen=True)
class Qwen35Words(Words):
    """Config fields of a class whose layers may use a gated delta rule instead of attention."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        layers = v["num_layers"]
        every = c.number("full_attention_interval", 4)
        c.only(attn_output_gate=True, mlp_only_layers=[])
        gate = c.get("output_gate_type", "silu")
        if gate not in ("silu", "swish"):  # two names of one function
            c.faults.append(f"output_gate_type is {shown(gate)}, but megacp can only express silu")
        kinds = c.get("layer_types")
        if not kinds:
            kinds = [_FULL if (i + 1) % every == 0 else _STATE for i in range(layers)]
        is_list = isinstance(kinds, list) and len(kinds) == layers
        if not is_list or not {*map(str, kinds)} <= {_STATE, _FULL}:
            c.faults.append(
                f"layer_types is {shown(kinds)}, expected {_STATE} or {_FULL} for each of {layers} "
                "layers"
            )
        elif _STATE in kinds:
            full = [kind == _FULL for kind in kinds]
            # If no layer has attention, there is no pattern, and `[1]` selects all layers.
            v["linear_attention_freq"] = layer_pattern(full, "01") or "[1]"
        return v | {name: c.number(name, default) for name, default in _DELTA_SIZES.items()}

    def windows_of(
        self, c: ConfigJson, layers: int, positions: int, own_rotary: float | None
    ) -> Values:
        return {}

    def to_hf(self, v: Values) -> Values:
        # The class reads the kind of each layer.
        kinds = [_STATE if layer.has_state else _FULL for layer in layers_of(model_of(v))]
        return super().to_hf(v) | {"layer_types": kinds} | {name: v[name] for name in _DELTA_SIZES}


@dataclass(frozen=True)
class SmolLM3Words(Words):
    """Config fields of a class with layers that have no rotary embedding."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        every = c.number("no_rope_layer_interval", 4)
        count = v["num_layers"]
        rotates = c.get("no_rope_layers")  # despite its name, 1 is a layer with a rotary embedding
        if rotates is None:
            rotates = [int((layer + 1) % every != 0) for layer in range(count)]
        is_long_enough = isinstance(rotates, list) and len(rotates) >= count
        if is_long_enough and all(x in (0, 1) for x in rotates):
            v["no_rope_freq"] = layer_pattern([x == 0 for x in rotates[:count]])
        else:
            c.faults.append(
                f"no_rope_layers is {shown(rotates)}, expected 0 or 1 for each of {count} layers"
            )
        return v

    def to_hf(self, v: Values) -> Values:
        # In the library 1 means that a layer has a rotary embedding.
        without = [not layer.rotates for layer in layers_of(model_of(v))]
        content = super().to_hf(v) | {"no_rope_layers": [int(not one) for one in without]}
        every = layer_pattern(without)
        if every is not None and every.isdigit():
            content["no_rope_layer_interval"] = int(every)
        return content


# The families.


def _text(
    name: str,
    cls: str,
    words: Words,
    fits: tuple[Values, ...],
    table: Table = DECODER,
    harmless: frozenset[str] = frozenset(),
) -> Family:
    """Return a family whose config is read and written by `words`."""
    return Family(
        name, f"{cls}ForCausalLM", words.sizes, words.from_hf, words.to_hf, table, fits, harmless
    )


_LLAMA = _text(
    "llama",
    "Llama",
    LlamaWords(head_dim=True, attention_bias=True, mlp_bias=True),
    fits=(
        PLAIN_DECODER | {"add_qkv_bias": False},
        PLAIN_DECODER | {"add_qkv_bias": True, "add_attention_output_bias": True},
    ),
)
# Mistral is Llama with a sliding window in all layers.
_MISTRAL = _text(
    "mistral",
    "Mistral",
    Words(_MISTRAL_SIZES, head_dim=True, window="sliding_window"),
    fits=(PLAIN_DECODER | {"window_size": True, "add_qkv_bias": False},),
)
_PHI3 = _text(
    "phi3",
    "Phi3",
    Words(_PHI3_SIZES, rope_kinds=("default",), window="sliding_window"),
    fits=(),  # the same models as llama or mistral, with other tensor names
    table=PHI3,
    # Part of scaled rotary embeddings, which are refused.
    harmless=frozenset({"original_max_position_embeddings"}),
)
_OLMO_NORMS: Values = {"norm_position": "after", "qk_layernorm": "all_heads"}
_OLMO2 = _text(
    "olmo2",
    "Olmo2",
    Words(OLMO2_SIZES, attention_bias=True, fixed=_OLMO_NORMS),
    fits=(PLAIN_DECODER | _OLMO_NORMS,),
    table=OLMO2,
)
_OLMO3 = _text(
    "olmo3",
    "Olmo3",
    Olmo3Words(
        OLMO2_SIZES | {"sliding_window": 4096},
        5e5,
        attention_bias=True,
        window="layer_types",
        fixed=_OLMO_NORMS,
    ),
    fits=(PLAIN_DECODER | _OLMO_NORMS | {"window_size": True},),
    table=OLMO2,
)
# Gemma 3 alternates layers with a sliding window and full layers, each with its rotary base.
_GEMMA3 = _text(
    "gemma3_text",
    "Gemma3",
    Gemma3Words(
        _GEMMA3_SIZES,
        1e6,
        tied=True,
        head_dim=True,
        attention_bias=True,
        window="layer_types",
        has_pattern=True,
        fixed={
            "norm_position": "both",
            "qk_layernorm": "head",
            "apply_layernorm_1p": True,
            "mlp_activation": "geglu",
        },
    ),
    fits=(WITH_WINDOWS | {"norm_position": "both", "qk_layernorm": "head"},),
    table=GEMMA3,
    harmless=frozenset({"_sliding_window_pattern", "rope_local_base_freq"}),
)
# Some layers of SmolLM3 have no rotary embedding.
_SMOLLM3 = _text(
    "smollm3",
    "SmolLM3",
    SmolLM3Words(
        _SMOLLM3_SIZES, 2e6, tied=True, attention_bias=True, mlp_bias=True, window=OFF_SWITCH
    ),
    fits=(WITH_WINDOWS | {"no_rope_freq": True},),
    harmless=NO_WINDOW,
)
QWEN3_5_WORDS = Qwen35Words(
    QWEN3_5_SIZES,
    head_dim=True,
    attention_bias=True,
    rotary_part=0.25,
    fixed={"qk_layernorm": "head", "apply_layernorm_1p": True, "attention_output_gate": True},
)
_QWEN3_5 = _text(
    "qwen3_5_text",
    "Qwen3_5",
    QWEN3_5_WORDS,
    fits=(PLAIN_DECODER | {"linear_attention_freq": True, "qk_layernorm": "head"},),
    table=QWEN3_5,
    harmless=QWEN3_5_SILENT,
)
# Qwen2 always has biases of q, k and v, and none of the output.
_QWEN2 = _text(
    "qwen2",
    "Qwen2",
    Words(QWEN2_SIZES, window=OFF_SWITCH, fixed={"add_qkv_bias": True}),
    fits=(WITH_WINDOWS | {"add_qkv_bias": True, "add_attention_output_bias": False},),
    harmless=NO_WINDOW,
)
# Qwen3 normalises each head of q and k.
_QWEN3 = _text(
    "qwen3",
    "Qwen3",
    Words(
        _QWEN3_SIZES,
        head_dim=True,
        attention_bias=True,
        window=OFF_SWITCH,
        fixed={"qk_layernorm": "head"},
    ),
    fits=(WITH_WINDOWS | {"qk_layernorm": "head"},),
    harmless=NO_WINDOW,
)
TEXT_FAMILIES = (
    _LLAMA,
    _MISTRAL,
    _PHI3,
    _OLMO2,
    _OLMO3,
    _GEMMA3,
    _SMOLLM3,
    _QWEN3_5,
    _QWEN2,
    _QWEN3,
)
