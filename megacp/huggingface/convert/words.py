"""Fields of a decoder's config.json: sizes and settings that most families share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from megacp.engine.config.model import ModelConfig, skip_pattern
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.stack import layers_of
from megacp.huggingface.convert.config_json import LAYER_TYPES, ConfigJson, Values, shown
from megacp.huggingface.convert.rope import read_rope, rope_fields

# The field that turns sliding windows off by default.
OFF_SWITCH = "use_sliding_window"
_SLIDING, _FULL = LAYER_TYPES


def model_of(values: Values) -> ModelConfig:
    """Return the decoder config for these flags."""
    return with_values(RunConfig(), values).model


# Defaults of transformers' LlamaConfig. None for head_dim means hidden size / heads; None for
# num_key_value_heads means one group per head.
SIZES: Values = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
# Values of our flags, unless the family's config has a field for them.
UNWRITTEN: Values = {
    "add_qkv_bias": False,
    "add_attention_output_bias": False,
    "add_mlp_bias": False,
    "norm_position": "before",
    "qk_layernorm": "off",
    "no_rope_freq": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "window_rotary_base": None,
    "linear_attention_freq": None,
    "linear_attention_rule": "gated_delta",
    "attention_output_gate": False,
    "mlp_activation": "swiglu",
    "apply_layernorm_1p": False,
    "softmax_scale": None,
    "embedding_multiplier": 1.0,
    "rotary_percent": 1.0,
    "num_experts": 0,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_bias": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "softmax_type": "vanilla",
    "yarn_correction_range_round_to_int": True,
    "additional_vocab_size": 0,
    "vision_num_layers": 0,
}


def sizes_from_hf(
    c: ConfigJson,
    defaults: Values,
    section: str = "",
    theta: float = 1e4,
    kinds: Collection[str] = (),
    part: float | None = None,
) -> Values:
    """Return the flags for the config fields that all decoders share.

    `section` is the prefix of the fields' names; `theta`, `kinds` and `part` are as in `read_rope`.
    """

    def size(name: str, high: int = 2**31 - 1) -> int:
        return c.number(section + name, defaults[name], high=high)

    values = {"num_layers": size("num_hidden_layers", 4096), "hidden_size": size("hidden_size")}
    heads = size("num_attention_heads")
    values["num_attention_heads"] = heads
    # A class without a dense MLP has no field for its width.
    inner = "intermediate_size" if "intermediate_size" in defaults else "moe_intermediate_size"
    values |= {"ffn_hidden_size": size(inner), "vocab_size": size("vocab_size")}
    groups = defaults["num_key_value_heads"]
    width = defaults.get("head_dim")
    even = values["hidden_size"] // heads  # the width of a head if no field sets it
    # A null is valid only for fields that are optional in the library's config class.
    null_heads = None if section else heads
    null_width = None if width else even
    values["num_query_groups"] = c.number(
        f"{section}num_key_value_heads", groups or heads, null=null_heads
    )
    values["kv_channels"] = c.number(f"{section}head_dim", width or even, null=null_width)
    # The model's maximum is the default sequence length of training.
    positions = size("max_position_embeddings")
    values["max_position_embeddings"] = positions
    values["seq_length"] = positions
    values |= read_rope(c, positions, section, theta, kinds, part)
    values["norm_epsilon"] = c.number(
        f"{section}rms_norm_eps", defaults["rms_norm_eps"], float, 1e-30, 1.0
    )
    values["init_method_std"] = c.number(f"{section}initializer_range", 0.02, float, 0.0, 1e6)
    c.only(section, hidden_act="silu", attention_dropout=0.0)
    return values


def sizes_to_hf(v: Values, has_head_dim: bool = True) -> Values:
    """Return the config fields for these flags; the inverse of `sizes_from_hf`.

    If the class has no field `head_dim` (`has_head_dim` is false), it is written only if the width
    of a head differs from hidden size / number of heads.
    """
    model = model_of(v)
    content = {
        "num_hidden_layers": v["num_layers"],
        "hidden_size": v["hidden_size"],
        "intermediate_size": v["ffn_hidden_size"],
        "num_attention_heads": v["num_attention_heads"],
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "vocab_size": v["vocab_size"],
        "max_position_embeddings": v["max_position_embeddings"] or v["seq_length"],
        "rms_norm_eps": v["norm_epsilon"],
        "initializer_range": v["init_method_std"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **rope_fields(v),
    }
    # Classes without the field compute the same width.
    if not has_head_dim and content["head_dim"] == v["hidden_size"] // v["num_attention_heads"]:
        del content["head_dim"]
    return content


@dataclass(frozen=True)
class Words:
    """A text family's config fields in addition to its sizes, and the library's defaults."""

    sizes: Values = field(default_factory=lambda: SIZES)
    theta: float = 1e4
    rope_kinds: Collection[str] = ()
    tied: bool = False
    head_dim: bool = False
    """Whether the library's class declares this field; every class reads it."""
    attention_bias: bool = False
    mlp_bias: bool = False
    window: str = ""
    """The field that selects the layers with a sliding window: `sliding_window` (all layers),
    `use_sliding_window` or `layer_types`; empty for a family without windows.
    """
    rotary_part: float | None = None
    """Default for the rotated fraction of each head; None if the class can rotate only whole heads.
    """
    every: int = 4
    """By default, every N-th layer has full attention."""
    has_pattern: bool = False
    """Whether the config may have `sliding_window_pattern`, which sets `every`."""
    fixed: Values = field(default_factory=dict)

    def from_hf(self, c: ConfigJson) -> Values:
        """Return our flags for a config."""
        sizes = sizes_from_hf(c, self.sizes, "", self.theta, self.rope_kinds, self.rotary_part)
        # Later values have priority: common defaults, the config's sizes, then the class's values.
        v = UNWRITTEN | sizes | self.fixed
        v |= self.windows_of(
            c, v["num_layers"], v["max_position_embeddings"], v["window_rotary_base"]
        )
        v["untie_embeddings_and_output_weights"] = not c.switch("tie_word_embeddings", self.tied)
        if self.attention_bias:
            has_bias = c.switch("attention_bias")
            v["add_qkv_bias"] = has_bias
            v["add_attention_output_bias"] = has_bias
        if self.mlp_bias:
            v["add_mlp_bias"] = c.switch("mlp_bias")
        return v

    def windows_of(
        self, c: ConfigJson, layers: int, positions: int, own_rotary: float | None
    ) -> Values:
        """Return the flags for sliding windows; empty if all layers have full attention.

        A window that spans the maximum sequence length is ignored unless its layers have their own
        rotary base.
        """
        on = c.switch(OFF_SWITCH) if self.window == OFF_SWITCH else bool(self.window)
        width = c.get("sliding_window", self.sizes.get("sliding_window")) if on else None
        if width is None:
            c.full_attention(layers)
            return {}
        # Which layers have the window depends on the family's field.
        width = c.checked("sliding_window", width, positions, int, 1, 2**31 - 1)
        types = self._layer_types(c, layers)
        is_list = isinstance(types, list) and len(types) == layers
        if not is_list or not {*map(str, types)} <= {_SLIDING, _FULL}:
            c.faults.append(
                f"layer_types is {shown(types)}, expected {_SLIDING} or {_FULL} for each of "
                f"{layers} layers"
            )
            return {}
        full = [kind == _FULL for kind in types]
        # A window this wide masks nothing, so the model is expressed without it.
        if all(full) or (width >= positions and own_rotary is None):
            return {}
        return {"window_size": width, "window_attn_skip_freq": layer_pattern(full, "01")}

    def _layer_types(self, c: ConfigJson, layers: int) -> Any:
        """Return the config's `layer_types` without a check, or the library's default for them."""
        every = c.number("sliding_window_pattern", 6) if self.has_pattern else self.every
        if self.window == "sliding_window":
            return [_SLIDING] * layers
        types = c.get("layer_types")
        if types is not None:
            return types
        if self.window == OFF_SWITCH:
            # The first layers have full attention, all later ones a window.
            first = c.number("max_window_layers", 28, low=0)
            return [_SLIDING if i >= first else _FULL for i in range(layers)]
        return [_SLIDING if (i + 1) % every else _FULL for i in range(layers)]

    def to_hf(self, v: Values) -> Values:
        """Return the config for our flags; the inverse of `from_hf`."""
        # Each setting is written only if the class has a field for it.
        content = sizes_to_hf(v, self.head_dim)
        content["tie_word_embeddings"] = not v["untie_embeddings_and_output_weights"]
        if self.rotary_part is not None:
            # Written even if it is 1, which is not the default of the class.
            content["rope_parameters"]["partial_rotary_factor"] = v["rotary_percent"]
        if self.attention_bias:
            content["attention_bias"] = v["add_qkv_bias"]
        if self.mlp_bias:
            content["mlp_bias"] = v["add_mlp_bias"]
        if self.window:
            content["sliding_window"] = v["window_size"]
        if self.window in (OFF_SWITCH, "layer_types"):
            layers = layers_of(model_of(v))
            content["layer_types"] = [_SLIDING if layer.window else _FULL for layer in layers]
        if self.window == OFF_SWITCH:
            content["use_sliding_window"] = v["window_size"] is not None
        if self.window == OFF_SWITCH and _SLIDING in content["layer_types"]:
            content["max_window_layers"] = content["layer_types"].index(_SLIDING)
        return content


def experts_of(values: Values | None) -> int:
    """Return the number of experts; 0 for a dense model or without flags."""
    return values["num_experts"] if values is not None else 0


def layer_pattern(without: list[bool], digits: str = "10") -> str | None:
    """Return the flag for the layers that lack a feature, or None if all layers have it.

    `without` has one entry per layer. The flag is N if every N-th layer lacks the feature, else a
    list of digits: the first of `digits` for a layer that lacks it, the second for other layers.
    """
    if not any(without):
        return None
    # If the pattern repeats, the first layer that lacks the feature gives N.
    every = without.index(True) + 1
    if without == [(layer + 1) % every == 0 for layer in range(len(without))]:
        return str(every)
    return f"[{','.join(digits[not one] for one in without)}]"


def routed_layers(values: Values) -> list[bool]:
    """Return for each layer whether it has experts."""
    return [layer.is_routed for layer in layers_of(model_of(values))]


def expert_pattern(routed: list[bool]) -> str:
    """Return the flag for the layers with experts: 1 for all layers, else one digit per layer."""
    if all(routed):
        return "1"
    return f"[{','.join(str(int(one)) for one in routed)}]"


def resolved(values: Values) -> Values:
    """Return flags with their effective values, so that equal models have equal flags.

    None becomes the value that it stands for, and vision-tower layers are counted from the front.
    """
    found = dict(values)
    if "num_query_groups" in values:
        # The numbers and widths of heads have defaults that depend on other flags.
        model = model_of(values)
        found |= {"num_query_groups": model.query_groups, "kv_channels": model.head_dim}
        found["softmax_scale"] = model.attention_scale
    if not values.get("max_position_embeddings"):
        found["max_position_embeddings"] = values.get("seq_length")
    # A pattern may have several spellings, such as 4 and a list of digits.
    patterns = (
        ("no_rope_freq", "10"),
        ("window_attn_skip_freq", "01"),
        ("linear_attention_freq", "01"),
    )
    for name, digits in patterns:
        freq = values.get(name)
        if freq is not None:
            pattern = skip_pattern(f"--{name.replace('_', '-')}", freq, digits[0])
            without = [pattern[i % len(pattern)] for i in range(values["num_layers"])]
            found[name] = layer_pattern(without, digits)
    if values.get("num_experts"):
        # The width of experts defaults to the width of the dense MLP.
        routed = routed_layers(values)
        width = model_of(values).expert_hidden_size
        found |= {"moe_layer_freq": expert_pattern(routed), "moe_ffn_hidden_size": width}
        if all(routed):
            # No dense MLP is left, so its width has no effect.
            found["ffn_hidden_size"] = width
    if values.get("vision_num_layers"):
        connector = values["connector_ffn_hidden_size"] or found["ffn_hidden_size"]
        found["connector_ffn_hidden_size"] = connector
        layers = values.get("vision_feature_layers") or ()
        found["vision_feature_layers"] = tuple(i % values["vision_num_layers"] for i in layers)
    return found
