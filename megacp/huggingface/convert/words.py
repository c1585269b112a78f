"""The decoder that all families share: names of tensors, fields of a config.json, and the families of text.

A family is a table of tensor names and two functions: `from_hf` reads a config as our flags, `to_hf` writes them. What
`to_hf` cannot say is found by reading its config again (`Family.config`). Rows of q and k are in the library's order
(rotary by halves), which is ours; nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megacp.engine.config.model import ModelConfig, skip_pattern
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.engine.layers.moe import MOE, correction_tensor
from megacp.engine.layers.stack import decoder_tensors, layers_of
from megacp.engine.layers.vision import connector_tensors, tower_tensors
from megacp.huggingface.convert.config_json import FURTHER_LAYERS, LAYER_TYPES, ConfigJson, Values, rope_fields, shown
from megacp.huggingface.convert.tensors import Info, Joined, Link, Named, Shape, Source

EMBEDDING, HEAD = "embedding.weight", "head.weight"
"""Our names of the two tensors that a model may tie."""
NATIVE, RELEASED = "native", "released"
NAMINGS = (NATIVE, RELEASED)
Table = Mapping[str, str | tuple[str, ...]]
"""Their tensor -> ours, or ours stacked; `{i}` counts decoder layers, `{v}` those of a tower, `{e}` experts."""

_LINEARS = {f"self_attn.{x}_proj": f"attention.{x}" for x in "qkv"} | {"self_attn.o_proj": "attention.output"}
_LINEARS |= {f"mlp.{x}_proj": f"mlp.{x}" for x in ("gate", "up", "down")}
DECODER: dict[str, str | tuple[str, ...]] = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attention_norm.weight",
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attention.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attention.k_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
    **{f"model.layers.{{i}}.{theirs}.weight": f"layers.{{i}}.{ours}.weight" for theirs, ours in _LINEARS.items()},
    **{f"model.layers.{{i}}.{theirs}.bias": f"layers.{{i}}.{ours}.bias" for theirs, ours in _LINEARS.items()},
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
}
"""Llama, Mistral, Qwen2, Qwen3, SmolLM3. A tensor that a model does not have is left out."""
OLMO2 = {
    {
        "model.layers.{i}.input_layernorm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "model.layers.{i}.post_attention_layernorm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    }.get(theirs, theirs): ours
    for theirs, ours in DECODER.items()
}
_AFTER = {
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attention_output_norm.weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers.{i}.mlp_output_norm.weight",
}
GEMMA3 = DECODER | _AFTER
_DELTA = {
    **{f"in_proj_{x}.weight": f"{x}.weight" for x in "zba"},
    **{"dt_bias": "dt_bias", "A_log": "A_log", "norm.weight": "norm.weight", "out_proj.weight": "output.weight"},
}
QWEN3_5: dict[str, str | tuple[str, ...]] = {
    **DECODER,
    **{f"model.layers.{{i}}.linear_attn.{x}": f"layers.{{i}}.linear_attention.{ours}" for x, ours in _DELTA.items()},
    **{
        f"model.layers.{{i}}.linear_attn.{theirs}.weight": tuple(
            f"layers.{{i}}.linear_attention.{ours}{x}.weight" for x in "qkv"
        )
        for theirs, ours in (("in_proj_qkv", ""), ("conv1d", "convolution_"))
    },
}
PHI3 = {
    **{theirs: ours for theirs, ours in DECODER.items() if "_proj" not in theirs},
    "model.layers.{i}.self_attn.qkv_proj.weight": tuple(f"layers.{{i}}.attention.{x}.weight" for x in "qkv"),
    "model.layers.{i}.self_attn.o_proj.weight": "layers.{i}.attention.output.weight",
    "model.layers.{i}.mlp.gate_up_proj.weight": ("layers.{i}.mlp.gate.weight", "layers.{i}.mlp.up.weight"),
    "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down.weight",
}


def model_of(values: Values) -> ModelConfig:
    """The decoder that flags say."""
    return with_values(RunConfig(), values).model


def shapes_of(values: Values) -> dict[str, Shape]:
    """Global shapes of a model's tensors by our names, without padding, and of what is saved beside them; a tied head
    is none of them.
    """
    config = with_values(RunConfig(), values)
    tensors = (*decoder_tensors(config.model), *tower_tensors(config), *connector_tensors(config))
    found = {tensor.name: tensor.shape for tensor in tensors}
    if config.model.moe_router_score_function == "sigmoid":
        tensor = correction_tensor(config.model)
        routed = (layer.name for layer in layers_of(config.model) if layer.mlp is MOE)
        found |= {f"{name}.{MOE.name}.{tensor.name}": tensor.shape for name in routed}
    return found


def links_of(
    table: Table, shapes: Mapping[str, Shape], layers: int, tower_layers: int = 0, experts: int = 0
) -> list[Link]:
    """A table with its counters filled in, as far as `shapes` has the tensors of a row."""
    found = []
    for i in range(max(1, layers, tower_layers)):
        for (theirs, ours), e in ((row, e) for row in table.items() for e in range(experts if "{e}" in row[0] else 1)):
            count = layers if "{i}" in theirs else tower_layers if "{v}" in theirs else 1
            names = [name.format(i=i, v=i, e=e) for name in ((ours,) if isinstance(ours, str) else ours)]
            if i < count and all(name in shapes for name in names):
                parts = tuple(Named(name, shapes[name]) for name in names)
                rows = sum(part.shape[0] for part in parts)
                found.append(Link((Named(theirs.format(i=i, v=i, e=e), (rows, *parts[0].shape[1:])),), parts))
    return found


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
"""Defaults of transformers' LlamaConfig; None: hidden size / heads, and as many groups as heads."""
_PLAIN: Values = {
    **dict.fromkeys(("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"), False),
    **{"norm_position": "before", "qk_layernorm": "off", "no_rope_freq": None},
    **{"window_size": None, "window_attn_skip_freq": None, "window_rotary_base": None},
    **{"linear_attention_freq": None, "linear_attention_rule": "gated_delta", "attention_output_gate": False},
    **{"mlp_activation": "swiglu", "apply_layernorm_1p": False, "softmax_scale": None, "embedding_multiplier": 1.0},
    **{"rotary_percent": 1.0, "num_experts": 0},
    **{"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False, "moe_router_bias": False},
    **{"moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": 1.0},
    **{"moe_router_num_groups": 1, "moe_router_group_topk": 1},
    **{"softmax_type": "vanilla", "yarn_correction_range_round_to_int": True},
    **{"additional_vocab_size": 0, "vision_num_layers": 0},
}
"""What our flags are where a family's config has no word for them."""


def sizes_from_hf(
    c: ConfigJson,
    defaults: Values,
    section: str = "",
    theta: float = 1e4,
    kinds: Collection[str] = (),
    part: float | None = None,
) -> Values:
    """The flags that every decoder's config speaks of; `theta`, `kinds` and `part` as in `ConfigJson.rope`."""

    def size(name: str, high: int = 2**31 - 1) -> int:
        return c.number(section + name, defaults[name], high=high)

    values = {"num_layers": size("num_hidden_layers", 4096), "hidden_size": size("hidden_size")}
    heads = values["num_attention_heads"] = size("num_attention_heads")
    # a class without a dense MLP has no width of one
    inner = "intermediate_size" if "intermediate_size" in defaults else "moe_intermediate_size"
    values |= {"ffn_hidden_size": size(inner), "vocab_size": size("vocab_size")}
    groups, width, even = defaults["num_key_value_heads"], defaults.get("head_dim"), values["hidden_size"] // heads
    null_heads, null_width = None if section else heads, None if width else even  # as the library's own types
    values["num_query_groups"] = c.number(f"{section}num_key_value_heads", groups or heads, null=null_heads)
    values["kv_channels"] = c.number(f"{section}head_dim", width or even, null=null_width)
    positions = values["max_position_embeddings"] = values["seq_length"] = size("max_position_embeddings")
    values |= c.rope(positions, section, theta, kinds, part)
    values["norm_epsilon"] = c.number(f"{section}rms_norm_eps", defaults["rms_norm_eps"], float, 1e-30, 1.0)
    values["init_method_std"] = c.number(f"{section}initializer_range", 0.02, float, 0.0, 1e6)
    c.only(section, hidden_act="silu", attention_dropout=0.0)
    return values


def sizes_to_hf(v: Values, has_head_dim: bool = True) -> Values:
    """The inverse; a class without `head_dim` reads one all the same, and needs it where the sizes say otherwise."""
    content = {
        "num_hidden_layers": v["num_layers"],
        "hidden_size": v["hidden_size"],
        "intermediate_size": v["ffn_hidden_size"],
        "num_attention_heads": v["num_attention_heads"],
        "num_key_value_heads": model_of(v).query_groups,
        "head_dim": model_of(v).head_dim,
        "vocab_size": v["vocab_size"],
        "max_position_embeddings": v["max_position_embeddings"] or v["seq_length"],
        "rms_norm_eps": v["norm_epsilon"],
        "initializer_range": v["init_method_std"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **rope_fields(v),
    }
    if not has_head_dim and content["head_dim"] == v["hidden_size"] // v["num_attention_heads"]:
        del content["head_dim"]
    return content


@dataclass(frozen=True)
class Words:
    """What the config of a text family says beside its sizes, and what its class has where the config is silent."""

    sizes: Values = field(default_factory=lambda: SIZES)
    theta: float = 1e4
    rope_kinds: Collection[str] = ()
    tied: bool = False
    head_dim: bool = False
    """Whether the class has a field of the name; it reads one all the same."""
    attention_bias: bool = False
    mlp_bias: bool = False
    window: str = ""
    """What says which layers have a sliding window: `sliding_window` (all), `use_sliding_window` or `layer_types`."""
    rotary_part: float | None = None
    """The part of a head that is turned where the config is silent; None: whole heads, and nothing else."""
    every: int = 4
    """One layer of so many is full, where the config does not say which."""
    has_pattern: bool = False
    """Whether `sliding_window_pattern` says where the full layers are, when `layer_types` does not."""
    fixed: Values = field(default_factory=dict)

    def from_hf(self, c: ConfigJson) -> Values:
        """Our flags from a config."""
        v = _PLAIN | sizes_from_hf(c, self.sizes, "", self.theta, self.rope_kinds, self.rotary_part) | self.fixed
        v |= self._windows(c, v["num_layers"], v["max_position_embeddings"], v["window_rotary_base"])
        v["untie_embeddings_and_output_weights"] = not c.switch("tie_word_embeddings", self.tied)
        if self.attention_bias:
            v |= dict.fromkeys(("add_qkv_bias", "add_attention_output_bias"), c.switch("attention_bias"))
        if self.mlp_bias:
            v["add_mlp_bias"] = c.switch("mlp_bias")
        return v

    def _windows(self, c: ConfigJson, layers: int, positions: int, own_rotary: float | None) -> Values:
        """The flags of sliding windows; one as long as the longest text is none, but for a rotary embedding there."""
        on = c.switch(_OFF) if self.window == _OFF else bool(self.window)
        width = c.get("sliding_window", self.sizes.get("sliding_window")) if on else None
        if width is None:
            c.full_attention(layers)
            return {}
        width = c.checked("sliding_window", width, positions, int, 1, 2**31 - 1)
        every = c.number("sliding_window_pattern", 6) if self.has_pattern else self.every
        types = [_SLIDING] * layers if self.window == "sliding_window" else c.get("layer_types")
        if types is None:
            first = c.number("max_window_layers", 28, low=0) if self.window == _OFF else 0
            sliding = [i >= first and (self.window == _OFF or (i + 1) % every) for i in range(layers)]
            types = [_SLIDING if one else _FULL for one in sliding]
        if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {_SLIDING, _FULL}:
            c.faults.append(
                f"layer_types is {shown(types)}, expected {_SLIDING} or {_FULL} for each of {layers} layers"
            )
            return {}
        full = [kind == _FULL for kind in types]
        if all(full) or (width >= positions and own_rotary is None):
            return {}
        return {"window_size": width, "window_attn_skip_freq": layer_pattern(full, "01")}

    def to_hf(self, v: Values) -> Values:
        """A config from our flags."""
        content = sizes_to_hf(v, self.head_dim)
        content["tie_word_embeddings"] = not v["untie_embeddings_and_output_weights"]
        if self.rotary_part is not None:  # what the class reads where nothing is written
            content["rope_parameters"]["partial_rotary_factor"] = v["rotary_percent"]
        if self.attention_bias:
            content["attention_bias"] = v["add_qkv_bias"]
        if self.mlp_bias:
            content["mlp_bias"] = v["add_mlp_bias"]
        if self.window:
            content["sliding_window"] = v["window_size"]
        if self.window in (_OFF, "layer_types"):
            content["layer_types"] = [_SLIDING if layer.window else _FULL for layer in layers_of(model_of(v))]
        if self.window == _OFF:
            content["use_sliding_window"] = v["window_size"] is not None
        if self.window == _OFF and _SLIDING in content["layer_types"]:
            content["max_window_layers"] = content["layer_types"].index(_SLIDING)
        return content


@dataclass(frozen=True)
class Olmo3Words(Words):
    """Words of a class that names each kind of layer's rotary embedding; older configs stretch only full ones."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        if v["rope_scaling"] != "none" and not isinstance(c.get("rope_parameters"), dict):
            v["window_rotary_base"] = v["rotary_base"]
        return v

    def to_hf(self, v: Values) -> Values:
        content = super().to_hf(v)
        far = content["rope_parameters"]
        near = {"rope_type": "default", "rope_theta": v["window_rotary_base"]} if v["window_rotary_base"] else far
        return content | {"rope_parameters": {_SLIDING: near, _FULL: far}}


@dataclass(frozen=True)
class Gemma3Words(Olmo3Words):
    """Words of a class that scales its embedding, says its scale of scores, and gates by GELU."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        if not isinstance(c.get("rope_parameters"), dict):
            v["window_rotary_base"] = c.number("rope_local_base_freq", 1e4, float, 1.0, 1e12)
        c.only(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
        c.only(final_logit_softcapping=None, attn_logit_softcapping=None)
        scale = c.number("query_pre_attn_scalar", 256) ** -0.5
        return v | {"softmax_scale": scale, "embedding_multiplier": v["hidden_size"] ** 0.5}

    def to_hf(self, v: Values) -> Values:
        content = super().to_hf(v) | {"hidden_activation": "gelu_pytorch_tanh"}
        del content["hidden_act"]
        content["rope_local_base_freq"] = v["window_rotary_base"] or v["rotary_base"]
        return content | {"query_pre_attn_scalar": round(resolved(v)["softmax_scale"] ** -2)}


@dataclass(frozen=True)
class Qwen35Words(Words):
    """Words of a class in whose layers a gated delta rule may stand instead of attention."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        layers, every = v["num_layers"], c.number("full_attention_interval", 4)
        c.only(attn_output_gate=True, mlp_only_layers=[])
        if (gate := c.get("output_gate_type", "silu")) not in ("silu", "swish"):
            c.faults.append(f"output_gate_type is {shown(gate)}, megacp can only express silu")
        kinds = c.get("layer_types") or [_FULL if (i + 1) % every == 0 else _STATE for i in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {_STATE, _FULL}:
            c.faults.append(f"layer_types is {shown(kinds)}, expected {_STATE} or {_FULL} for each of {layers} layers")
        elif _STATE in kinds:
            full = [kind == _FULL for kind in kinds]
            v["linear_attention_freq"] = layer_pattern(full, "01") or "[1]"
        return v | {name: c.number(name, default) for name, default in _DELTA_SIZES.items()}

    def _windows(self, c: ConfigJson, layers: int, positions: int, own_rotary: float | None) -> Values:
        return {}

    def to_hf(self, v: Values) -> Values:
        kinds = [_STATE if layer.has_state else _FULL for layer in layers_of(model_of(v))]
        return super().to_hf(v) | {"layer_types": kinds} | {name: v[name] for name in _DELTA_SIZES}


_DELTA_SIZES = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
_DELTA_SIZES |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
_OFF, _STATE = "use_sliding_window", "linear_attention"
_SLIDING, _FULL = LAYER_TYPES


MISTRAL = {**SIZES, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
MISTRAL |= {"sliding_window": 4096}
_NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
PHI3_SIZES = {**_NO_HEAD_DIM, "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064}
PHI3_SIZES |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
OLMO2_SIZES = {**_NO_HEAD_DIM, "vocab_size": 50304, "rms_norm_eps": 1e-5}
SMOLLM3 = {**_NO_HEAD_DIM, "num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16}
SMOLLM3 |= {"num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 32768}
QWEN3 = {**SIZES, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936}
QWEN3 |= {"max_position_embeddings": 32768}
GEMMA3_SIZES = {**SIZES, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256}
GEMMA3_SIZES |= {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}
GEMMA3_SIZES |= {"max_position_embeddings": 131_072, "sliding_window": 4096}
QWEN3_5_SIZES = {**SIZES, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4}
QWEN3_5_SIZES |= {"head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 32768}
QWEN2 = {name: value for name, value in QWEN3.items() if name != "head_dim"}


@dataclass(frozen=True)
class LlamaWords(Words):
    """Words of a class that asks for whole heads."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        if v["hidden_size"] % v["num_attention_heads"]:
            c.faults.append(f"hidden_size {v['hidden_size']} is no multiple of num_attention_heads")
        return v


def experts_of(values: Values | None) -> int:
    """The number of experts that flags say; 0 for none, or if there are no flags."""
    return values["num_experts"] if values is not None else 0


def layer_pattern(without: list[bool], digits: str = "10") -> str | None:
    """The flag that says which layers go without: every N-th of them, or one by one; `digits`: of those and others."""
    if not any(without):
        return None
    every = without.index(True) + 1
    if without == [(layer + 1) % every == 0 for layer in range(len(without))]:
        return str(every)
    return f"[{','.join(digits[not one] for one in without)}]"


def routed_layers(values: Values) -> list[bool]:
    """Which layers have experts."""
    return [layer.mlp is MOE for layer in layers_of(model_of(values))]


def expert_pattern(routed: list[bool]) -> str:
    """The flag that says which layers have experts, one by one."""
    return "1" if all(routed) else f"[{','.join(str(int(one)) for one in routed)}]"


@dataclass(frozen=True)
class SmolLM3Words(Words):
    """Words of a class with layers that have no rotary embedding."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        every, count = c.number("no_rope_layer_interval", 4), v["num_layers"]
        rotates = c.get("no_rope_layers")  # 1 is a layer with a rotary embedding
        if rotates is None:
            rotates = [int((layer + 1) % every != 0) for layer in range(count)]
        if isinstance(rotates, list) and len(rotates) >= count and all(x in (0, 1) for x in rotates):
            v["no_rope_freq"] = layer_pattern([x == 0 for x in rotates[:count]])
        else:
            c.faults.append(f"no_rope_layers is {shown(rotates)}, expected 0 or 1 for each of {count} layers")
        return v

    def to_hf(self, v: Values) -> Values:
        without = [not layer.rotates for layer in layers_of(model_of(v))]
        every = layer_pattern(without)
        content = super().to_hf(v) | {"no_rope_layers": [int(not one) for one in without]}
        return content | ({"no_rope_layer_interval": int(every)} if every is not None and every.isdigit() else {})


def resolved(values: Values) -> Values:
    """Flags with None as what it stands for, and counted layers counted from the front."""
    found = dict(values)
    if "num_query_groups" in values:
        model = model_of(values)
        found |= {"num_query_groups": model.query_groups, "kv_channels": model.head_dim}
        found["softmax_scale"] = model.attention_scale
    if not values.get("max_position_embeddings"):
        found["max_position_embeddings"] = values.get("seq_length")
    patterns = (("no_rope_freq", "10"), ("window_attn_skip_freq", "01"), ("linear_attention_freq", "01"))
    for name, digits in patterns:
        if (freq := values.get(name)) is not None:
            pattern = skip_pattern(f"--{name.replace('_', '-')}", freq, digits[0])
            found[name] = layer_pattern([pattern[i % len(pattern)] for i in range(values["num_layers"])], digits)
    if values.get("num_experts"):
        routed, width = routed_layers(values), model_of(values).expert_hidden_size
        found |= {"moe_layer_freq": expert_pattern(routed), "moe_ffn_hidden_size": width}
        if all(routed):  # no MLP is left that has a width of its own
            found["ffn_hidden_size"] = width
    if values.get("vision_num_layers"):
        found["connector_ffn_hidden_size"] = values["connector_ffn_hidden_size"] or found["ffn_hidden_size"]
        layers = values.get("vision_feature_layers") or ()
        found["vision_feature_layers"] = tuple(i % values["vision_num_layers"] for i in layers)
    return found


@dataclass(frozen=True)
class Family:
    """An architecture of the library."""

    name: str
    """`model_type` of the library."""
    cls: str
    """The library's class with a head."""
    defaults: Values
    """What absent sizes mean to the library."""
    from_hf: Callable[[ConfigJson], Values]
    to_hf: Callable[[Values], Values]
    table: Table
    harmless: frozenset[str] = frozenset()
    """Fields without a meaning beside those that are read."""
    sections: tuple[str, ...] = ()
    """Objects of the config whose fields are read."""
    token_fields: Mapping[str, str] = field(default_factory=dict)
    """Ids of image tokens that stand in the config, by the names of the image rules."""
    usual_further_layers: ClassVar[int] = 0
    """Layers that predict further tokens whatever the config says, as the library has it."""
    in_turns: ClassVar[bool] = False
    """Whether rows of gate and up stand in turns in a stack of experts."""
    token_order: tuple[str, ...] = ()
    """The image tokens in the order of their ids behind the vocabulary, where no rules are known."""

    def values(
        self, content: Mapping[str, Any], left_out: list[str] | None = None, unused: list[str] | None = None
    ) -> Values:
        """Return our flags from a config.json.

        `left_out` is filled with fields that change nothing in the library, `unused` with lines about fields whose
        effect is elsewhere. ValueError lists fields at fault and those not known.
        """
        config = ConfigJson(self.native(content), self.sections)
        values = self.from_hf(config)
        config.refuse_unknown(self.harmless, self.name)
        if config.faults:
            raise ValueError("config.json: " + "; ".join(config.faults))
        if left_out is not None:
            left_out += config.left_out
        if unused is not None:
            unused += config.unused_lines()
        return values

    def config(self, values: Values, layout: str = NATIVE) -> dict[str, Any]:
        """A config.json from our flags. ValueError lists those that are others when it is read again."""
        content = self.to_hf(values)
        config = ConfigJson(content, self.sections)
        back = self.from_hf(config)
        ours, read = resolved(values), resolved(back)
        faults = list(config.faults)
        faults += [
            f"{flag(name)} is {ours[name]!r}, this architecture can only express {read[name]!r}"
            for name in back
            if name != "seq_length" and ours[name] != read[name]
        ]
        if faults:
            raise ValueError(f"this model is no {self.name}: " + "; ".join(faults))
        return {"architectures": [self.cls], "model_type": self.name, **self.spelled(content, layout)}

    def native(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config in the library's own spelling."""
        return content

    def spelled(self, content: Values, layout: str) -> Values:
        """A config in the spelling of a layout."""
        return content

    def links(self, values: Values, layout: str = NATIVE, infos: Mapping[str, Info] | None = None) -> list[Link]:
        """All tensors; `infos`: of the file that is read."""
        return self.links_of_table(self.table, values)

    def links_of_table(self, table: Table, values: Values) -> list[Link]:
        """A table with its counters filled in."""
        counts = values["num_layers"], values["vision_num_layers"], values["num_experts"]
        return links_of(table, shapes_of(values), *counts)

    def further_layers(self, content: Mapping[str, Any]) -> int:
        """Return how many layers after the last predict further tokens; the library leaves them out."""
        counts = [value for name, value in self.native(content).items() if FURTHER_LAYERS.search(name)]
        known = [count for count in counts if type(count) is int and count >= 0]
        return max([*known, self.usual_further_layers])

    def opened(self, source: Source, values: Values | None = None) -> Source:
        """A folder's tensors as `links` has them. ValueError for stacks that do not fit `values`, if given."""
        return Joined(source, experts_of(values))

    def closed(self, source: Source, values: Values) -> Source:
        """The inverse, of a folder that is written."""
        return source

    def links_of_modules(self, values: Values) -> list[Link]:
        """All tensors as the library's modules hold them: adapters stand beside these."""
        return self.links(values)

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        """The layout that a file is in."""
        return NATIVE


NO_WINDOW = frozenset({"sliding_window", "max_window_layers"})
"""Keys without a meaning while `use_sliding_window` is false."""


def _text(name: str, cls: str, words: Words, table: Table = DECODER) -> Family:
    harmless = NO_WINDOW if words.window == _OFF else frozenset[str]()
    if words.rope_kinds:  # of scaled rotary embeddings alone, which are refused
        harmless = frozenset({"original_max_position_embeddings"})
    if words is QWEN3_5_WORDS:
        harmless = QWEN3_5_SILENT
    if words.has_pattern:
        harmless = frozenset({"_sliding_window_pattern", "rope_local_base_freq"})
    return Family(name, f"{cls}ForCausalLM", words.sizes, words.from_hf, words.to_hf, table, harmless)


_LLAMA = LlamaWords(head_dim=True, attention_bias=True, mlp_bias=True)
_OLMO2 = Words(OLMO2_SIZES, attention_bias=True, fixed={"norm_position": "after", "qk_layernorm": "all_heads"})
_OLMO3 = Olmo3Words(
    OLMO2_SIZES | {"sliding_window": 4096},
    5e5,
    attention_bias=True,
    window="layer_types",
    fixed={"norm_position": "after", "qk_layernorm": "all_heads"},
)
_GEMMA3 = Gemma3Words(
    GEMMA3_SIZES,
    1e6,
    tied=True,
    head_dim=True,
    attention_bias=True,
    window="layer_types",
    has_pattern=True,
    fixed={"norm_position": "both", "qk_layernorm": "head", "apply_layernorm_1p": True, "mlp_activation": "geglu"},
)
QWEN3_5_SILENT = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"})
"""Keys of layers that predict further tokens, which the library leaves out as well, and of a dtype that is ours."""
QWEN3_5_WORDS = Qwen35Words(
    QWEN3_5_SIZES,
    head_dim=True,
    attention_bias=True,
    rotary_part=0.25,
    fixed={"qk_layernorm": "head", "apply_layernorm_1p": True, "attention_output_gate": True},
)
_SMOLLM3 = SmolLM3Words(SMOLLM3, 2e6, tied=True, attention_bias=True, mlp_bias=True, window=_OFF)
_QWEN3 = Words(QWEN3, head_dim=True, attention_bias=True, window=_OFF, fixed={"qk_layernorm": "head"})
TEXT_FAMILIES = (
    _text("llama", "Llama", _LLAMA),
    _text("mistral", "Mistral", Words(MISTRAL, head_dim=True, window="sliding_window")),
    _text("phi3", "Phi3", Words(PHI3_SIZES, rope_kinds=("default",), window="sliding_window"), PHI3),
    _text("olmo2", "Olmo2", _OLMO2, OLMO2),
    _text("olmo3", "Olmo3", _OLMO3, OLMO2),
    _text("gemma3_text", "Gemma3", _GEMMA3, GEMMA3),
    _text("smollm3", "SmolLM3", _SMOLLM3),
    _text("qwen3_5_text", "Qwen3_5", QWEN3_5_WORDS, QWEN3_5),
    _text("qwen2", "Qwen2", Words(QWEN2, window=_OFF, fixed={"add_qkv_bias": True})),
    _text("qwen3", "Qwen3", _QWEN3),
)
