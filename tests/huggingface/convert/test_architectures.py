"""Tables of architectures: names and shapes are those of our models, defaults and fields are the library's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacp.core.config.run import RunConfig, flatten, with_values
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.distributed.parameter import spec_of
from megacp.core.models.build import build_chunks
from megacp.huggingface.convert.tables import llama, molmo2, olmo2, qwen3, smollm3, windowed
from megacp.huggingface.convert.tables.architectures import ARCHITECTURES, LAYOUTS, of_config, of_values
from megacp.huggingface.convert.tables.mapping import Cast, Info, Mapped, problems, whole
from megacp.huggingface.convert.tables.rope import LIBRARY_THETA
from megacp.verify.parity_config import MODELS
from tests.huggingface.convert.models import BANDS, rope
from tests.huggingface.convert.models import MODELS as THEIRS

DEFAULTS = {
    "Llama": llama.DEFAULTS,
    "Mistral": windowed.MISTRAL_DEFAULTS,
    "Phi3": windowed.PHI3_DEFAULTS,
    "Olmo2": olmo2.DEFAULTS,
    "SmolLM3": smollm3.DEFAULTS,
    "Qwen2": qwen3.QWEN2_DEFAULTS,
    "Qwen3": qwen3.DEFAULTS,
    "Molmo2": molmo2.TEXT_DEFAULTS,
}
"""By the classes of the library."""
OURS: dict[str, dict[str, Any]] = {
    "llama": {"untie_embeddings_and_output_weights": True, "num_query_groups": 4},
    "llama tied with biases": {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True},
    "qwen3": {"qk_layernorm": True, "kv_channels": 16, "num_query_groups": 2},
    "mistral": {"hf_model_type": "mistral", "untie_embeddings_and_output_weights": True},
    "phi3": {"hf_model_type": "phi3", "num_query_groups": 2},
    "qwen2": {"add_qkv_bias": True, "num_query_groups": 2},
    "olmo2": MODELS["tiny_olmo2"],
    "smollm3": MODELS["tiny_smollm3"],
    "molmo2": {**MODELS["tiny_vlm"], "qk_layernorm": True, "vision_num_query_groups": 4, "add_qkv_bias": True},
}
SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "vocab_size": 211}


def values_of(changes: dict[str, Any]) -> dict[str, Any]:
    return flatten(with_values(RunConfig(), {**SMALL, **changes}))


def tensors_of(changes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model that is trained with these flags."""
    config = with_values(RunConfig(), {**SMALL, **changes})
    (chunk,) = build_chunks(config, build_grid(GridShape(), 0))
    return {piece.name: piece.global_shape for p in chunk.parameters() for piece in spec_of(p).pieces}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_the_tables_hold_each_tensor_of_our_models_once(name: str, layout: str) -> None:
    """Would catch a tensor that a new option adds and no table knows."""
    values = values_of(OURS[name])
    links = of_values(values).links(values, layout)
    ours = [named for link in links for named in link.ours]
    assert len({named.name for named in ours}) == len(ours)
    assert {named.name: named.shape for named in ours} == tensors_of(OURS[name])
    theirs = [named.name for link in links for named in link.theirs]
    assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_absent_field_means_what_the_library_takes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    library = getattr(transformers, f"{name}Config")()
    library, table = library.text_config if name == "Molmo2" else library, DEFAULTS[name]
    derived = {"num_key_value_heads": library.num_attention_heads, "head_dim": library.hidden_size // 32}
    assert {k: derived[k] if v is None else v for k, v in table.items()} == {k: getattr(library, k) for k in table}
    theta = 2_000_000.0 if name == "SmolLM3" else LIBRARY_THETA
    assert library.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "Molmo2"])
def test_every_field_that_the_library_writes_is_known_and_its_default_is_taken(name: str) -> None:
    """Would catch a field that a newer library adds."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")()
    changes = {"sliding_window": None} if name == "Mistral" else {}
    architecture = ARCHITECTURES[config.model_type]
    assert architecture.values({**config.to_dict(), **changes}) == architecture.values(
        {"model_type": config.model_type, **changes}
    )


def test_absent_fields_of_a_vision_tower_mean_what_the_library_takes() -> None:
    transformers = pytest.importorskip("transformers")
    sections = {"text_config": {"hidden_size": 3584}, "vision_config": {}, "adapter_config": {}}
    values = ARCHITECTURES["molmo2"].values({"model_type": "molmo2", **sections})
    library = transformers.Molmo2Config(**sections)
    written = ARCHITECTURES["molmo2"].config({**flatten(RunConfig()), **values})
    for section in sections:
        theirs = getattr(library, section).to_dict()
        ours = {k: v for k, v in written[section].items() if k not in ("rope_theta", "rope_scaling")}
        assert ours.items() <= theirs.items()


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "molmo2 native"])
def test_a_config_comes_back_as_it_was(name: str) -> None:
    """Through our flags and both spellings of Molmo2's fields."""
    pytest.importorskip("transformers")
    content = THEIRS[name]().config.to_diff_dict()
    architecture = of_config(content)
    values = architecture.values(content)
    for layout in LAYOUTS if architecture.sections else LAYOUTS[:1]:
        again = architecture.config({**flatten(RunConfig()), **values}, layout)
        back = architecture.values(again)
        if "vision_feature_layers" in back:
            back["vision_feature_layers"] = tuple(x % 3 - 3 for x in back["vision_feature_layers"])
        assert back == values


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama yarn without a factor": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is null"),
    "llama yarn backwards": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": -1}},
        "rope_scaling.beta_fast is -1",
    ),
    "llama yarn in words": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": "no"}},
        "rope_scaling.truncate is 'no', expected true or false",
    ),
    "mistral window of old": ({}, "sliding_window is 4096 and max_position_embeddings 131072: tokens of longer texts"),
    "mistral window": ({"sliding_window": 4095, "max_position_embeddings": 4096}, "sliding_window is 4095 and"),
    "phi3 window": ({"sliding_window": 2047}, "sliding_window is 2047 and max_position_embeddings 4096"),
    "phi3 longrope": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "rope_scaling.rope_type is 'longrope', megacp can express default: its frequencies change when a text passes",
    ),
    "phi3 partial": ({"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75, megacp can only express 1.0"),
    "smollm3 window": ({"use_sliding_window": True}, "use_sliding_window is True"),
    "smollm3 few layers": ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0], expected 0 or 1 for each of 36"),
    "smollm3 no interval": ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, expected a whole number"),
    "olmo2 window": ({"layer_types": ["sliding_attention"]}, "layer_types holds sliding_attention"),
    "llama dynamic": ({"rope_parameters": rope(1.0, rope_type="dynamic")}, "rope_parameters.rope_type is 'dynamic'"),
    "llama attention factor": (
        {"rope_parameters": rope(1.0, attention_factor=2.0)},
        "rope_parameters.attention_factor is 2.0",
    ),
    "llama partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "llama nested rope": ({"rope_parameters": {"full_attention": rope(1.0)}}, "one set of parameters for all layers"),
    "llama bad theta": ({"rope_theta": "big"}, "rope_theta is 'big'"),
    "llama activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "llama dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "llama unknown": ({"embedding_multiplier": 12}, "embedding_multiplier is not known"),
    "llama quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is not known"),
    "llama type": ({"hidden_size": "4096"}, "hidden_size is '4096'"),
    "llama no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a whole number above 0"),
    "llama null rope factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is null"),
    "llama many layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number"),
    "llama true": ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a whole number"),
    "llama fraction": ({"hidden_size": 64.5}, "hidden_size is 64.5, expected a whole number"),
    "llama text for ids": ({"vocab_size": "32000"}, "vocab_size is '32000', expected a whole number"),
    "llama huge": ({"vocab_size": 2**31}, "vocab_size is 2147483648, expected a whole number"),
    "llama null epsilon": ({"rms_norm_eps": None}, "rms_norm_eps is null, expected a number above 0"),
    "llama negative epsilon": ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, expected a number above 0"),
    "llama endless theta": ({"rope_theta": 1e400}, "rope_theta is inf, expected a number above 1"),
    "llama theta of nothing": ({"rope_theta": "a"}, "rope_theta is 'a', expected a number above 1"),
    "llama null theta": ({"rope_parameters": {"rope_theta": None}}, "rope_theta is null, expected a number above 1"),
    "llama rope words": ({"rope_scaling": {"type": ["linear"]}}, "rope_scaling.rope_type is ['linear']"),
    "llama rope text": ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected one set of parameters"),
    "llama endless factor": ({"rope_scaling": {"type": "linear", "factor": 1e400}}, "rope_scaling.factor is inf"),
    "llama half positions": (
        {"rope_scaling": {**BANDS, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16.5}},
        "rope_scaling.original_max_position_embeddings is 16.5, expected a whole number",
    ),
    "llama classes": ({"architectures": [{}]}, "architectures is no list of names"),
    "llama class": ({"architectures": "LlamaForCausalLM"}, "architectures is no list of names"),
    "llama tied in words": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
    "llama biases in words": ({"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
    "llama end": ({"eos_token_id": {"id": 2}}, "eos_token_id is {'id': 2}, expected a token id"),
    "llama ends": ({"eos_token_id": [2, "x"]}, "eos_token_id is [2, 'x'], expected a token id"),
    "qwen3 null width": ({"head_dim": None}, "head_dim is null, expected a whole number"),
    "qwen3 window as a number": ({"use_sliding_window": 0}, "use_sliding_window is 0"),
    "qwen3 layers as objects": ({"layer_types": [{}]}, "layer_types is no list of words"),
    "qwen3 layers as a number": ({"layer_types": 3}, "layer_types is no list of words"),
    "qwen3 few layers": ({"layer_types": ["full_attention"]}, "layer_types has 1 words, num_hidden_layers is 32"),
    "molmo2 section": ({"text_config": 5}, "text_config is no object"),
    "molmo2 released section": ({"vit_config": [1]}, "vit_config is no object"),
    "molmo2 released tower": (
        {"vit_config": {"num_hidden_layers": "27"}},
        "vision_config.num_hidden_layers is '27', expected a whole number",
    ),
    "molmo2 no released layers": ({"vit_config": {"num_hidden_layers": 0}}, "vision_config.num_hidden_layers is 0"),
    "molmo2 many layers": ({"vision_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
    "molmo2 many rows": ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers is 1000000000"),
    "molmo2 activation": ({"vision_config": {"hidden_act": {}}}, "vision_config.hidden_act is {}, allowed are"),
    "molmo2 crop of nothing": ({"vision_config": {"image_size": [0, 0]}}, "vision_config.image_size is [0, 0]"),
    "molmo2 patch": ({"image_patch_id": "7"}, "image_patch_id is '7', expected a token id"),
    "molmo2 scaled words": (
        {"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_scaling_layers": 3}},
        "text_config.rope_scaling_layers is 3",
    ),
    "qwen3 window": ({"use_sliding_window": True}, "use_sliding_window is True"),
    "qwen3 layers": ({"layer_types": ["sliding_attention"]}, "layer_types holds sliding_attention"),
    "molmo2 norms": ({"text_config": {"qk_norm_type": "olmo"}}, "text_config.qk_norm_type is 'olmo'"),
    "molmo2 norm after": ({"text_config": {"norm_after": True}}, "text_config.norm_after is True"),
    "molmo2 tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "molmo2 no rows": ({"text_config": {"additional_vocab_size": 0}}, "text_config.additional_vocab_size is 0"),
    "molmo2 scaled layers": (
        {
            "text_config": {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "rope_scaling_layers": [0],
            }
        },
        "text_config.rope_scaling_layers is [0]",
    ),
    "molmo2 crops": ({"vision_config": {"image_size": [378, 336]}}, "vision_config.image_size is [378, 336]"),
    "molmo2 positions": ({"vision_config": {"num_position_embeddings": 7}}, "num_position_embeddings is 7"),
    "molmo2 unread": ({"adapter_config": {"vision_feature_layer": [3, 1]}}, "leaves layers of vision_config"),
    "molmo2 features": ({"adapter_config": {"vision_feature_layer": [24]}}, "vision_feature_layer is [24]"),
    "molmo2 widths": ({"adapter_config": {"text_hidden_size": 1}}, "adapter_config.text_hidden_size is 1"),
    "molmo2 nested unknown": ({"vision_config": {"registers": 4}}, "vision_config.registers is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_the_name_of_its_field(name: str) -> None:
    content, message = REFUSED[name]
    content = {"model_type": name.split()[0], **content}
    with pytest.raises(ValueError, match="config.json: ") as refused:
        of_config(content).values(content)
    assert message in str(refused.value)


HARMLESS: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "layer_types": ["full_attention"] * 32,
    },
    "a null of a quantizer, a window and a cap": {
        "model_type": "llama",
        "quantization_config": None,
        "sliding_window": None,
        "attn_logit_softcapping": None,
    },
    "an older library": {"model_type": "qwen3", "is_decoder": False, "pruned_heads": {}, "top_p": 0.9, "num_beams": 1},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_field_that_says_what_is_so_without_it_is_harmless(name: str) -> None:
    content = HARMLESS[name]
    architecture = of_config(content)
    assert architecture.values(content) == architecture.values({"model_type": content["model_type"]})


@pytest.mark.parametrize(
    "change", [{"rope_interleaved": True}, {"is_decoder": 0}, {"residual_multiplier": 0.5}], ids=str
)
def test_the_same_field_with_another_value_is_refused(change: dict[str, Any]) -> None:
    (field,) = change
    with pytest.raises(ValueError, match=rf"{field} is not known, so it may change the model \(--ignore-field {field}"):
        ARCHITECTURES["llama"].values({"model_type": "llama", **change})


def test_a_field_is_ignored_by_its_name_when_no_row_knows_it() -> None:
    content = {"model_type": "molmo2", "text_config": {"odd": 3, "hidden_size": 3584}, "other": 1}
    values = ARCHITECTURES["molmo2"].values(content, ("odd", "other"))
    assert values == ARCHITECTURES["molmo2"].values(content, ("text_config.odd", "other"))
    with pytest.raises(ValueError, match="other is not known") as refused:
        ARCHITECTURES["molmo2"].values(content, ("odd",))
    assert "odd is not known" not in str(refused.value)
    for name, message in (("rope_theta", "known and means something"), ("od", "no unknown field of this name")):
        with pytest.raises(ValueError, match=f"--ignore-field {name}: .*{message}"):
            ARCHITECTURES["llama"].values({"model_type": "llama", "rope_theta": 5e5}, (name,))


UNSAID: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms": ("llama", {"qk_layernorm": True}, "--qk-layernorm is True"),
    "norms after": ("llama", {"norm_position": "after"}, "--norm-position is 'after'"),
    "norms before": ("olmo2", {"qk_layernorm": True, "qk_layernorm_scope": "all_heads"}, "--norm-position is 'before'"),
    "norms over heads": ("auto", {"qk_layernorm": True, "norm_position": "after"}, "--qk-layernorm-scope is 'head'"),
    "layers without rope": ("qwen2", {"add_qkv_bias": True, "no_rope_freq": "2"}, "--no-rope-freq is '2'"),
    "yarn in phi3": ("phi3", {"rope_scaling": "yarn"}, "--rope-scaling is 'yarn', this architecture can only express"),
    "a type by its name": ("auto", {"hf_model_type": "qwen3"}, "--qk-layernorm is False"),
    "no norms": ("qwen3", {}, "--qk-layernorm is False"),
    "one bias": ("llama", {"add_qkv_bias": True}, "--add-qkv-bias True and --add-attention-output-bias False differ"),
    "mlp bias": ("qwen3", {"qk_layernorm": True, "add_mlp_bias": True}, "--add-mlp-bias is True"),
    "rows": (
        "auto",
        {"additional_vocab_size": 8, "untie_embeddings_and_output_weights": True},
        "--additional-vocab-size is 8",
    ),
    "width": ("auto", {"hidden_size": 60, "kv_channels": 8}, "--hidden-size 60 is no multiple"),
    "molmo2 norms": ("auto", MODELS["tiny_vlm"], "--qk-layernorm is False"),
    "mask of images": (
        "auto",
        {**MODELS["tiny_vlm"], "qk_layernorm": True, "image_attention": "causal"},
        "--image-attention is 'causal'",
    ),
    "no tower": ("molmo2", {"qk_layernorm": True}, "--vision-num-layers is 0"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_a_flag_that_the_library_has_no_word_for_is_refused_by_its_name(name: str) -> None:
    wanted, changes, message = UNSAID[name]
    values = values_of(changes)
    with pytest.raises(ValueError, match="this model is no ") as refused:
        of_values(values, wanted).config(values)
    assert message in str(refused.value)


def test_null_means_what_the_library_takes_where_it_takes_it() -> None:
    """Would catch 32 groups, Qwen3's default, for a null that means as many groups as heads."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": None}
    assert ARCHITECTURES["qwen3"].values({"model_type": "qwen3", **heads})["num_query_groups"] == 4
    llama = ARCHITECTURES["llama"].values({"model_type": "llama", **heads, "head_dim": None, "hidden_size": 64})
    assert (llama["num_query_groups"], llama["kv_channels"]) == (4, 16)
    for name in ("num_key_value_heads", "head_dim"):
        with pytest.raises(ValueError, match=f"text_config.{name} is null"):
            ARCHITECTURES["molmo2"].values({"model_type": "molmo2", "text_config": {name: None}})


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 2, from before theta was a field": (
        {"hidden_size": 4096, "max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None},
        {"rotary_base": 10_000.0, "rope_scaling": "none", "num_query_groups": 32, "kv_channels": 128},
    ),
    "Llama 3.1": (
        {
            "eos_token_id": [128001, 128008, 128009],
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "rope_scaling": {**BANDS, "original_max_position_embeddings": 8192, "factor": 8.0, "rope_type": "llama3"},
            "torch_dtype": "bfloat16",
            "max_position_embeddings": 131072,
        },
        {
            "rotary_base": 500_000.0,
            "rope_scaling": "llama3",
            "rope_scaling_factor": 8.0,
            "rope_original_max_positions": 8192,
            "seq_length": 131072,
        },
    ),
    "linear, as it was first spelled": (
        {"rope_theta": 1000000, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rotary_base": 1e6, "rope_scaling": "linear", "rope_scaling_factor": 4.0},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_older_versions_are_read_as_the_library_reads_them(name: str) -> None:
    """Would catch a theta or a scaling that is lost because it stands where it stood before version 5."""
    transformers = pytest.importorskip("transformers")
    content, expected = PUBLISHED[name]
    values = ARCHITECTURES["llama"].values({"model_type": "llama", **content})
    assert {key: values[key] for key in expected} == expected
    written = ARCHITECTURES["llama"].config({**flatten(RunConfig()), **values})
    library, again = transformers.LlamaConfig(**content), transformers.LlamaConfig(**written)
    parameters = {key: value for key, value in library.rope_parameters.items() if key != "type"}
    assert parameters == again.rope_parameters


def test_a_model_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model_type is 'gpt2', known are llama, mistral, phi3, olmo2, smollm3, qwen2, qwen3, molmo2"
    ):
        of_config({"model_type": "gpt2"})


def test_a_released_tower_without_its_last_layers_is_read_as_the_library_reads_it() -> None:
    transformers = pytest.importorskip("transformers")
    released = {
        "model_type": "molmo2",
        "vit_config": {"num_hidden_layers": 27, "image_default_input_size": [378, 378], "image_num_pos": 729},
        "adapter_config": {"vit_layers": [-3, -9]},
        "text_config": {"hidden_size": 3584, "qkv_bias": True, "layer_norm_eps": 1e-5, "rope_theta": 1e6},
    }
    values = ARCHITECTURES["molmo2"].values(released)
    library = transformers.Molmo2Config(**released)
    assert values["vision_num_layers"] == library.vision_config.num_hidden_layers == 25
    assert values["vision_feature_layers"] == tuple(library.adapter_config.vision_feature_layer) == (24, 18)
    assert values["add_qkv_bias"] and values["norm_epsilon"] == 1e-5 and values["rotary_base"] == 1e6


class Memory:
    """A source of tensors in memory that counts what is asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.read = tensors, list[tuple[str, int, int]]()
        self.infos = {name: Info(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.read.append((name, start, stop))
        return self.tensors[name][start:stop]


def test_a_mapping_reads_the_rows_it_needs_and_no_others() -> None:
    """An embedding cut at 3 of 8 rows, seen as cut at 5, then as whole again."""
    values = values_of({**MODELS["tiny_vlm"], "qk_layernorm": True, "vocab_size": 5, "additional_vocab_size": 3})
    table = torch.arange(8 * 64.0).view(8, 64)
    halves = molmo2.links(values, molmo2.RELEASED, 3)[:1]
    source = Memory(dict(zip([named.name for named in halves[0].theirs], table.split([3, 5]), strict=True)))
    ours = Mapped(source, halves, to_ours=True)
    assert torch.equal(whole(ours, "embedding.weight"), table)
    source.read.clear()
    released = Mapped(ours, molmo2.links(values, molmo2.RELEASED)[:1], to_ours=False)
    first, second = released.infos
    assert torch.equal(whole(released, first), table[:5]) and torch.equal(whole(released, second), table[5:])
    assert source.read == [
        ("model.transformer.wte.embedding", 0, 3),
        ("model.transformer.wte.new_embedding", 0, 2),
        ("model.transformer.wte.new_embedding", 2, 5),
    ]
    assert whole(Cast(released, torch.bfloat16), first).dtype is torch.bfloat16


def test_old_buffers_are_ignored_and_everything_else_is_told() -> None:
    values = values_of({})
    named = [named for link in llama.links(values) for named in link.theirs]
    infos = {one.name: Info(one.shape, torch.float32) for one in named}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": Info((4,), torch.float32)}
    assert problems({**infos, **extra}, named, ("rotary_emb.inv_freq",)) == []
    assert problems({**infos, **extra}, named) == [f"{next(iter(extra))} is unexpected"]
    assert sum(math.prod(one.shape) for one in named) > 0
