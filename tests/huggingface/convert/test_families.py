"""Tables of families: names and shapes match our models, defaults and fields match the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.config.run import RunConfig, flatten, with_values
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.layers import stack, vision
from megacp.engine.models.build import build_chunks
from megacp.engine.models.costs import run_parameters
from megacp.huggingface.convert.families import FAMILIES, of_config, of_values
from megacp.huggingface.convert.tables import NAMINGS, RELEASED
from megacp.huggingface.convert.tensors import WIDE, Cast, Info, Mapped, whole
from megacp.verify.cases import MODELS
from tests.huggingface.convert.models import BANDS, Tensors, packed, rope
from tests.huggingface.convert.models import MODELS as THEIRS
from tests.reference.training import GEMMA, GPT_OSS, QWEN3_5

SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True}
GLM = {
    "moe_router_score_function": "sigmoid",
    "moe_ffn_hidden_size": 24,
    "add_qkv_bias": True,
    "rotary_percent": 0.5,
}
OURS: dict[str, dict[str, Any]] = {
    "llama": {"untie_embeddings_and_output_weights": True, "num_query_groups": 4},
    "llama tied with biases": {
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
    },
    "qwen3": {"qk_layernorm": "head", "kv_channels": 16, "num_query_groups": 2},
    "mistral": {"hf_model_type": "mistral", "untie_embeddings_and_output_weights": True},
    "phi3": {"hf_model_type": "phi3", "num_query_groups": 2},
    "qwen2": {"add_qkv_bias": True, "num_query_groups": 2},
    "gemma3_text": {
        **GEMMA,
        "softmax_scale": 0.25,
        "embedding_multiplier": 8.0,
        "num_query_groups": 2,
    },
    "qwen3_5_text": QWEN3_5,
    "olmo2": MODELS["tiny_olmo2"],
    "mixtral": {"num_experts": 4, "num_query_groups": 2},
    "olmoe": {"num_experts": 4, "qk_layernorm": "all_heads", "moe_ffn_hidden_size": 32},
    "qwen3_moe": {
        "num_experts": 4,
        "qk_layernorm": "head",
        "moe_layer_freq": "[0,1]",
        "moe_ffn_hidden_size": 32,
    },
    "qwen3_5_moe": {**QWEN3_5, "num_experts": 4, **SHARED},
    "glm4_moe": {
        **{**SHARED, "moe_shared_expert_gate": False, "moe_router_num_groups": 2, "num_experts": 4},
        **GLM,
    },
    "gpt_oss": {**GPT_OSS, "moe_ffn_hidden_size": 32},
    "smollm3": MODELS["tiny_smollm3"],
    "molmo2": {**MODELS["tiny_vlm"], "qk_layernorm": "head", "add_qkv_bias": True},
}
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "vocab_size": 211,
}


def values_of(changes: dict[str, Any]) -> dict[str, Any]:
    return flatten(with_values(RunConfig(), {**SMALL, **changes}))


def tensors_of(changes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    config = with_values(RunConfig(), {**SMALL, **changes})
    (chunk,) = build_chunks(config, build_grid(GridShape(), 0))
    return {
        piece.name: piece.global_shape
        for p in (*chunk.parameters(), *chunk.buffers())
        for piece in spec_of(p).pieces
    }


@pytest.mark.parametrize("layout", NAMINGS)
@pytest.mark.parametrize("name", OURS)
def test_the_tables_hold_each_tensor_of_our_models_once(name: str, layout: str) -> None:
    values = values_of(OURS[name])
    links = of_values(values).links(values, layout)
    ours = [named for link in links for named in link.ours]
    assert len({named.name for named in ours}) == len(ours)
    assert {named.name: named.shape for named in ours} == tensors_of(OURS[name])
    theirs = [named.name for link in links for named in link.theirs]
    assert len(set(theirs)) == len(theirs)


def test_experts_of_every_layer_are_as_wide_as_the_librarys_mlp() -> None:
    """The model has no dense MLP, so no other width is possible."""
    written = FAMILIES["olmoe"].config(values_of(OURS["olmoe"]))
    assert (written["intermediate_size"], written["num_experts"]) == (32, 4)


def test_a_share_of_rotated_channels_is_written_where_the_class_has_one_of_its_own() -> None:
    values = values_of(OURS["glm4_moe"]) | {"rotary_percent": 1.0}
    written = FAMILIES["glm4_moe"].config(values)
    assert of_config(written).values(written)["rotary_percent"] == 1.0


@pytest.mark.parametrize("name", THEIRS)
def test_described_tensors_have_the_shapes_and_the_treatment_of_the_librarys_modules(
    name: str,
) -> None:
    """Weights of linears are matrices; weights of embeddings are tables."""
    pytest.importorskip("transformers")
    model = THEIRS[name]()
    content, theirs = model.config.to_dict(), dict(model.named_parameters())
    shapes = of_config(content).opened(Tensors(theirs)).infos
    values = of_config(content).values(content)
    config = with_values(RunConfig(), values)
    tensors = (
        *stack.model_tensors(config.model),
        *vision.tower_tensors(config),
        *vision.connector_tensors(config),
    )
    treated = {tensor.name: tensor.treated for tensor in tensors}
    assert run_parameters(config) == sum(parameter.numel() for parameter in theirs.values())
    for link in of_config(content).links(values, of_config(content).layout_of(shapes)):
        for named in link.theirs if not link.theirs[0].name.endswith(WIDE) else ():
            owner, _, field = named.name.rpartition(".")
            module, expected = model.get_submodule(owner), "vector"
            if (
                isinstance(module, nn.Embedding)
                or owner == "lm_head"
                or field == "positional_embedding"
            ):
                expected = "table"
            elif (hasattr(module, "num_experts") and not field.endswith("bias")) or (
                isinstance(module, (nn.Linear, nn.Conv3d)) and field == "weight"
            ):
                expected = "matrix"
            assert (named.shape, {expected}) == (
                shapes[named.name].shape,
                {treated[o.name] for o in link.ours},
            ), named


@pytest.mark.parametrize("name", FAMILIES)
def test_an_absent_field_means_what_the_library_takes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    library = transformers.AutoConfig.for_model(name)
    library, table = getattr(library, "text_config", library), FAMILIES[name].defaults
    derived = {
        "num_key_value_heads": library.num_attention_heads,
        "head_dim": library.hidden_size // 32,
    }
    assert {k: derived[k] if v is None else v for k, v in table.items()} == {
        k: getattr(library, k) for k in table
    }
    theta = {
        "smollm3": 2_000_000.0,
        "olmo3": 500_000.0,
        "gemma3_text": 1e6,
        "mixtral": 1e6,
        "gpt_oss": 150_000.0,
    }.get(name, 10_000.0)
    assert (
        library.rope_parameters.get("full_attention", library.rope_parameters)["rope_theta"]
        == theta
    )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "molmo2"])
def test_every_field_that_the_library_writes_is_known_and_its_default_is_taken(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, family = transformers.AutoConfig.for_model(name), FAMILIES[name]
    changes = {"sliding_window": None} if name == "mistral" else {}
    if name.endswith(
        ("qwen3_5", "qwen3_5_moe")
    ):  # its default tower does not fit its default decoder
        config.vision_config.out_hidden_size = config.text_config.hidden_size
        changes = {"vision_config": {"out_hidden_size": config.text_config.hidden_size}}
    assert family.values({**config.to_dict(), **changes}) == family.values(
        {"model_type": name, **changes}
    )


def test_absent_fields_of_a_vision_tower_mean_what_the_library_takes() -> None:
    transformers = pytest.importorskip("transformers")
    sections = {"text_config": {"hidden_size": 3584}, "vision_config": {}, "adapter_config": {}}
    values = FAMILIES["molmo2"].values({"model_type": "molmo2", **sections})
    library = transformers.Molmo2Config(**sections)
    written = FAMILIES["molmo2"].config({**flatten(RunConfig()), **values})
    for section in sections:
        theirs = getattr(library, section).to_dict()
        ours = {
            k: v for k, v in written[section].items() if k not in ("rope_theta", "rope_scaling")
        }
        assert ours.items() <= theirs.items()


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "molmo2 native"])
def test_a_config_comes_back_as_it_was(name: str) -> None:
    pytest.importorskip("transformers")
    content = THEIRS[name]().config.to_diff_dict()
    family = of_config(content)
    values = family.values(content)
    for layout in NAMINGS if family.sections else NAMINGS[:1]:
        back = family.values(family.config({**flatten(RunConfig()), **values}, layout))
        if "vision_feature_layers" in back:
            back["vision_feature_layers"] = tuple(x % 3 - 3 for x in back["vision_feature_layers"])
        assert back == values


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor"),
    (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 4.0}},
        "rope_scaling.beta_fast",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 1}},
        "scaling.mscale",
    ),
    ("llama", {"rope_parameters": rope(1.0, rope_type="dynamic")}, "rope_parameters.rope_type"),
    (
        "llama",
        {"rope_parameters": rope(1.0, attention_factor=2.0)},
        "rope_parameters.attention_factor",
    ),
    ("llama", {"rope_parameters": {"full_attention": rope(1.0)}}, "rope_parameters"),
    ("llama", {"rope_theta": "big"}, "rope_theta"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
    ("llama", {"embedding_multiplier": 12}, "embedding_multiplier"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"hidden_size": "4096"}, "hidden_size"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved is unknown"),
    ("llama", {"is_decoder": 0}, "is_decoder is unknown"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    (
        "mistral",
        {"layer_types": ["sliding_attention"]},
        "layer_types is unknown",
    ),  # masks ask any config
    ("qwen3", {"registers_of_mine": 4, "auto_map": {}}, "registers_of_mine is unknown"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": LINEAR, "full_attention": {}}},
        "sliding_attention",
    ),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type"),
    ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("olmo2", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("qwen3", {"head_dim": None}, "head_dim"),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]},
        "layer_types",
    ),
    ("molmo2", {"text_config": 5}, "text_config"),
    ("molmo2", {"text_config": {"qk_norm_type": "olmo"}}, "text_config.qk_norm_type"),
    ("molmo2", {"text_config": {"norm_after": True}}, "text_config.norm_after"),
    ("molmo2", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ("molmo2", {"text_config": {"additional_vocab_size": 0}}, "text_config.additional_vocab_size"),
    (
        "molmo2",
        {"text_config": {"rope_scaling": LINEAR, "rope_scaling_layers": [0]}},
        "rope_scaling_layers",
    ),
    ("molmo2", {"vision_config": {"image_size": [378, 336]}}, "vision_config.image_size"),
    ("molmo2", {"vision_config": {"num_position_embeddings": 7}}, "num_position_embeddings"),
    ("molmo2", {"adapter_config": {"vision_feature_layer": [3, 1]}}, "vision_feature_layer"),
    ("molmo2", {"adapter_config": {"vision_feature_layer": [24]}}, "vision_feature_layer"),
    ("molmo2", {"vision_config": {"num_key_value_heads": 8}}, "vision_config.num_key_value_heads"),
    ("molmo2", {"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act"),
    ("molmo2", {"adapter_config": {"text_hidden_size": 1}}, "adapter_config.text_hidden_size"),
    ("molmo2", {"vision_config": {"registers": 4}}, "vision_config.registers"),
    (
        "mixtral",
        {"num_local_experts": 4, "num_experts": 8},
        "num_experts is 8, but megacp can only express 4",
    ),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmoe", {"sliding_window": 8}, "sliding_window is unknown"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts"),
    ("qwen3_moe", {"mlp_only_layers": 5}, "mlp_only_layers 5"),
    ("qwen3_moe", {"decoder_sparse_step": 25}, "decoder_sparse_step 25: no layer has experts"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
    ("glm4_moe", {"first_k_dense_replace": 46}, "first_k_dense_replace 46: no layer has experts"),
    ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 0}},
        "rope_parameters.truncate",
    ),
    ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is unknown"),
    (
        "gpt2",
        {},
        "qwen3_5_text, qwen2, qwen3, mixtral, olmoe, qwen3_moe, qwen3_5_moe_text, glm4_moe, gpt_oss, molmo2",
    ),
]


@pytest.mark.parametrize(("name", "content", "field"), REFUSED, ids=str)
def test_what_cannot_be_expressed_is_refused_by_the_name_of_its_field(
    name: str, content: dict[str, Any], field: str
) -> None:
    content = {"model_type": name, **content}
    with pytest.raises(ValueError, match="config.json: ") as refused:
        of_config(content).values(content)
    assert field in str(refused.value)


PUBLISHED_QWEN3_5 = {
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
PUBLISHED_QWEN3_5 |= {"output_gate_type": "swish"}
PUBLISHED_QWEN3_5 |= {
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "full_attention_interval": 4,
}
ANY = {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.5",
    "use_cache": True,
    "initializer_range": 0.02,
}
ANY |= {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
INTERVALS = {
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "layer_types": ["full_attention"] * 36,
}
YARN_POSITIONS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
HARMLESS: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"model_type": "qwen3_5_text", **PUBLISHED_QWEN3_5},
    "Qwen3.5-MoE": {
        "model_type": "qwen3_5_moe_text",
        **PUBLISHED_QWEN3_5,
        "router_aux_loss_coef": 0.001,
    },
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "router_aux_loss_coef": 0.01,
        "mlp_only_layers": [],
        "sliding_window": 8,
    },
    "gpt-oss": {
        **{
            "model_type": "gpt_oss",
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "rope_theta": 150000,
        },
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False} | YARN_POSITIONS,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "Gemma 3": {"model_type": "gemma3_text", "cache_implementation": "hybrid"},
    "SmolLM2": {
        "model_type": "llama",
        "rope_interleaved": False,
        "layer_types": ["full_attention"] * 32,
    },
    "a fine-tune": {"model_type": "qwen3", "_model_name_or_path": "a", "unsloth_model": {"b": 1}},
    "Qwen2.5": {
        "model_type": "qwen2",
        **ANY,
        "use_mrope": False,
        "max_window_layers": 28,
        "sliding_window": 131072,
    },
    "Phi-4": {
        "model_type": "phi3",
        **ANY,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attention_bias": False,
    },
    "SmolLM3": {
        "model_type": "smollm3",
        **ANY,
        **INTERVALS,
        "max_window_layers": 28,
        "pretraining_tp": 2,
    },
    "nulls": {"model_type": "llama", "quantization_config": None, "sliding_window": None},
    "an older library": {
        "model_type": "qwen3",
        "is_decoder": False,
        "pruned_heads": {},
        "top_p": 0.9,
        "num_beams": 1,
    },
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_field_that_says_what_is_so_without_it_is_harmless(name: str) -> None:
    content = HARMLESS[name]
    architecture = of_config(content)
    assert architecture.values(content) == architecture.values(
        {"model_type": content["model_type"]}
    )


def test_an_older_config_of_olmo3_stretches_its_full_layers_alone() -> None:
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    old = {"rope_theta": 500_000, "rope_scaling": yarn, "max_position_embeddings": 65536}
    values = FAMILIES["olmo3"].values({"model_type": "olmo3", **old})
    assert (values["rope_scaling"], values["window_rotary_base"]) == ("yarn", 500_000.0)


def test_full_layers_of_a_gemma_are_every_so_many_th_or_named() -> None:
    kinds = [f"{'full' if i % 3 == 2 else 'sliding'}_attention" for i in range(26)]
    named, counted = (
        FAMILIES["gemma3_text"].values({"model_type": "gemma3_text", **one})
        for one in ({"layer_types": kinds}, {"sliding_window_pattern": 3})
    )
    assert named == counted


UNSAID: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"qk_layernorm": "head"}, "--qk-layernorm"),
    ("llama", {"norm_position": "after"}, "--norm-position"),
    ("olmo2", {"qk_layernorm": "all_heads"}, "--norm-position"),
    ("auto", {"qk_layernorm": "head", "norm_position": "after"}, "--qk-layernorm"),
    ("qwen2", {"add_qkv_bias": True, "no_rope_freq": "2"}, "--no-rope-freq"),
    ("auto", {**GEMMA, "embedding_multiplier": 8.0}, "--softmax-scale"),
    ("auto", {**GEMMA, "softmax_scale": 0.25}, "--embedding-multiplier"),
    ("llama", {"window_rotary_base": 5.0}, "--window-rotary-base"),
    ("phi3", {"rope_scaling": "yarn"}, "rope_scaling.rope_type"),
    ("auto", {"hf_model_type": "qwen3"}, "--qk-layernorm"),
    ("qwen3", {}, "--qk-layernorm"),
    ("llama", {"add_qkv_bias": True}, "--add-attention-output-bias"),
    ("qwen3", {"qk_layernorm": "head", "add_mlp_bias": True}, "--add-mlp-bias"),
    (
        "auto",
        {"additional_vocab_size": 8, "untie_embeddings_and_output_weights": True},
        "--additional-vocab-size",
    ),
    ("auto", {"hidden_size": 60, "kv_channels": 8}, "hidden_size"),
    ("auto", MODELS["tiny_vlm"], "--qk-layernorm"),
    (
        "auto",
        {**MODELS["tiny_vlm"], "qk_layernorm": "head", "image_attention": "causal"},
        "--image-attention",
    ),
    ("molmo2", {"qk_layernorm": "head"}, "vision_config.num_hidden_layers"),
    ("llama", {"num_experts": 8}, "--num-experts"),
    ("auto", {"num_experts": 8, "moe_layer_freq": "[0,1]"}, "--moe-layer-freq"),
    ("auto", {"num_experts": 8, "moe_router_pre_softmax": True}, "--moe-router-pre-softmax"),
    ("olmoe", {"num_experts": 8, "qk_layernorm": "head"}, "--qk-layernorm"),
    ("qwen3_moe", {"qk_layernorm": "head"}, "--num-experts"),
]


@pytest.mark.parametrize(("wanted", "changes", "flag"), UNSAID, ids=str)
def test_a_flag_that_the_library_has_no_word_for_is_refused_by_its_name(
    wanted: str, changes: dict[str, Any], flag: str
) -> None:
    values = values_of(changes)
    with pytest.raises(ValueError, match="this model cannot be exported") as refused:
        (of_values(values) if wanted == "auto" else FAMILIES[wanted]).config(values)
    assert flag in str(refused.value)


NEAREST: list[tuple[dict[str, Any], str]] = [
    ({"qk_layernorm": "head", "norm_position": "after"}, "olmo2: --qk-layernorm is 'head'"),
    ({"window_size": 9, "qk_layernorm": "all_heads"}, "mistral: --qk-layernorm is 'all_heads'"),
    (
        {"num_experts": 4, "norm_position": "after", "qk_layernorm": "all_heads"},
        "olmoe: --norm-position is 'after'",
    ),
    ({"no_rope_freq": "2", "qk_layernorm": "head"}, "smollm3: --qk-layernorm is 'head'"),
    ({"linear_attention_freq": "2"}, "llama: --linear-attention-freq is '2'"),
    (
        {"window_size": 9, "add_qkv_bias": True, "add_attention_output_bias": True},
        "llama: --window-size is 9",
    ),
]


@pytest.mark.parametrize(("changes", "told"), NEAREST, ids=str)
def test_a_model_of_no_family_is_told_the_nearest_and_what_misfits(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(
        ValueError, match="^this model cannot be exported: .* nearest is "
    ) as refused:
        of_values(values_of(changes))
    assert f"nearest is {told}" in str(refused.value)


@pytest.mark.parametrize("name", [name for name in OURS if "hf_model_type" not in OURS[name]])
def test_a_model_fits_one_family_only(name: str) -> None:
    values = values_of(OURS[name])
    assert [one.name for one in FAMILIES.values() if one.distance(values) == (0, 0)] == [
        of_values(values).name
    ]


LOST_IN_VISION = [
    ({"window_size": 9}, "--window-size"),
    ({"mlp_activation": "geglu"}, "--mlp-activation"),
    ({"apply_layernorm_1p": True}, "--apply-layernorm-1p"),
    ({"softmax_scale": 0.3}, "--softmax-scale"),
]


@pytest.mark.parametrize(("changes", "told"), LOST_IN_VISION, ids=str)
def test_a_vision_model_whose_text_part_its_class_cannot_compute_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    """The library's class would load such a folder and compute a different model."""
    values = values_of({**OURS["molmo2"], **changes})
    with pytest.raises(ValueError, match=f"this model cannot be exported as molmo2: {told} is "):
        FAMILIES["molmo2"].config(values)


def test_a_dense_model_that_is_named_as_one_with_experts_is_refused_by_its_flag() -> None:
    with pytest.raises(
        ValueError,
        match="this model cannot be exported as glm4_moe: .*--moe-router-score-function is 'softmax'",
    ):
        FAMILIES["glm4_moe"].config(values_of({}))


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1": (
        {
            "eos_token_id": [128001, 128008, 128009],
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "rope_scaling": {
                **BANDS,
                "original_max_position_embeddings": 8192,
                "factor": 8.0,
                "rope_type": "llama3",
            },
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
    transformers = pytest.importorskip("transformers")
    content, expected = PUBLISHED[name]
    values = FAMILIES["llama"].values({"model_type": "llama", **content})
    assert {key: values[key] for key in expected} == expected
    written = FAMILIES["llama"].config({**flatten(RunConfig()), **values})
    library, again = transformers.LlamaConfig(**content), transformers.LlamaConfig(**written)
    parameters = {key: value for key, value in library.rope_parameters.items() if key != "type"}
    assert parameters == again.rope_parameters


def test_a_released_tower_without_its_last_layers_is_read_as_the_library_reads_it() -> None:
    transformers = pytest.importorskip("transformers")
    released = {
        "model_type": "molmo2",
        "vit_config": {
            "num_hidden_layers": 27,
            "image_default_input_size": [378, 378],
            "image_num_pos": 729,
        },
        "adapter_config": {"vit_layers": [-3, -9]},
        "text_config": {
            "hidden_size": 3584,
            "qkv_bias": True,
            "layer_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    }
    values = FAMILIES["molmo2"].values(released)
    library = transformers.Molmo2Config(**released)
    assert values["vision_num_layers"] == library.vision_config.num_hidden_layers == 25
    assert (
        values["vision_feature_layers"]
        == tuple(library.adapter_config.vision_feature_layer)
        == (24, 18)
    )
    assert (
        values["add_qkv_bias"] and values["norm_epsilon"] == 1e-5 and values["rotary_base"] == 1e6
    )


class Memory(Tensors):
    """A source that counts the bytes that are read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.read = list[tuple[str, int, int]]()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.read.append((name, start, stop))
        return super().rows(name, start, stop)


def test_a_mapping_reads_the_rows_it_needs_and_no_others() -> None:
    values = values_of(
        {**MODELS["tiny_vlm"], "qk_layernorm": "head", "vocab_size": 5, "additional_vocab_size": 3}
    )
    table = torch.arange(8 * 64.0).view(8, 64)
    cut = {"model.transformer.wte.embedding": Info((3, 64), torch.float32)}
    halves = FAMILIES["molmo2"].links(values, RELEASED, cut)[:1]
    source = Memory(
        dict(zip([named.name for named in halves[0].theirs], table.split([3, 5]), strict=True))
    )
    ours = Mapped(source, halves, to_ours=True)
    assert torch.equal(whole(ours, "embedding.weight"), table)
    source.read.clear()
    released = Mapped(ours, FAMILIES["molmo2"].links(values, RELEASED)[:1], to_ours=False)
    first, second = released.infos
    assert torch.equal(whole(released, first), table[:5]) and torch.equal(
        whole(released, second), table[5:]
    )
    assert source.read == [
        ("model.transformer.wte.embedding", 0, 3),
        ("model.transformer.wte.new_embedding", 0, 2),
        ("model.transformer.wte.new_embedding", 2, 5),
    ]
    assert whole(Cast(released, torch.bfloat16), first).dtype is torch.bfloat16


def test_matrices_in_four_bits_are_those_that_the_library_unpacks() -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    ends = {"gate_up_proj": (64, 96), "down_proj": (96, 32)}  # [2 I, h] and [h, I]
    given = {
        f"experts.{end}": packed(*sizes, seed=i) for i, (end, sizes) in enumerate(ends.items())
    }
    folder = Tensors(
        {f"a.{name}{part}": x for name, parts in given.items() for part, x in parts.items()}
    )
    library = Tensors(
        {f"a.{name}": convert_moe_packed_tensors(*parts.values()) for name, parts in given.items()}
    )
    found, expected = (FAMILIES["gpt_oss"].opened(source) for source in (folder, library))
    assert (
        library.infos["a.experts.gate_up_proj"].shape == (3, 96, 64)
        and found.infos == expected.infos
    )
    assert all(torch.equal(whole(found, name), whole(expected, name)) for name in expected.infos)
    written = FAMILIES["gpt_oss"].closed(found, {"num_experts": 3})
    assert all(torch.equal(whole(written, name), x) for name, x in library.tensors.items())
    assert found.rows("a.experts.gate_up_proj", 70, 75).equal(
        whole(found, "a.experts.gate_up_proj")[70:75]
    )
