"""Each causal model of transformers in this table is exact over two ranks, or both ranks refuse it.

No model is wrong without an error. A model is exact if a row of one document and a packed row give
the results of the library for each separate document. This test produces the table in
docs/trl_and_accelerate.md, and `python -m tests.integrations.test_matrix` prints it.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megacp.distributed.collectives import all_reduce
from megacp.huggingface.convert.families import FAMILIES, TRAINED_BY_THE_TRAINER
from megacp.huggingface.convert.text_part import TEXT_PARTS
from megacp.integrations.context import context_parallel
from megacp.integrations.loop import shift_labels, sum_gradients
from megacp.integrations.transformers import register_with_transformers
from tests.ranks import grid, run_ranks
from tests.reference.precision import float32_is_float64

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trl_and_accelerate.md"
TOKENS, VOCAB = 48, 61
WIDTHS = {
    32: "hidden_size d_model n_embd word_embed_proj_dim embedding_size",
    48: "intermediate_size ffn_dim n_inner ffn_hidden_size mlp_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    16: "q_lora_rank kv_lora_rank",
    8: "head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state mamba_d_head mamba_headdim",
    4: "num_attention_heads n_head num_heads attention_heads num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers n_layer num_layers num_key_value_heads num_experts_per_tok",
    1: "n_group topk_group n_shared_experts",
    128: "max_position_embeddings n_positions",
    VOCAB: "vocab_size",
    0.0: "attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout dropout activation_dropout "
    "attention_probs_dropout_prob hidden_dropout_prob residual_dropout embedding_dropout layerdrop",
}
SMALL = {name: size for size, names in WIDTHS.items() for name in names.split()}
SMALL |= {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
MLA = {
    "head_dim": None,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
EXACT, WINDOW = "exact", "exact, layers that look 16 tokens back"
STATES = "exact, layers with a state or a convolution"
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
MAMBA = dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4)
MAMBA |= dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16)
MAMBA |= dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "mamba_expand"), 2)
MAMBA |= dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8)
W16, LATER = {"sliding_window": 16}, {"use_sliding_window": True, "max_window_layers": 1}
GEMMA4 = {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
GEMMA4 |= {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_bidirectional_attention": "vision",
}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}


class Model(NamedTuple):
    """A row of the table."""

    name: str
    """`model_type` in the config."""
    found: str
    """EXACT, WINDOW, STATES, or a part of the refusal that all ranks raise."""
    changes: dict[str, Any] = {}
    """Config fields in addition to SMALL; None keeps the library's default."""


MODELS = [
    *(
        Model(name, EXACT)
        for name in (
            "apertus arcee bert bert-generation biogpt bitnet cohere diffllama electra ernie4_5 exaone4 gemma glm glm4 "
            "gpt2 gpt_neox granite helium hunyuan_v1_dense llama mistral mixtral nemotron olmo olmo2 olmoe opt "
            "persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta seed_oss smollm3 stablelm starcoder2 "
            "granitemoe llama4_text"
        ).split()
    ),
    Model("deepseek_v2", EXACT, MLA),
    Model("deepseek_v3", EXACT, MLA),
    *(
        Model(name, WINDOW, W16)
        for name in (
            "cohere2 cohere2_moe cwm exaone4 gemma2 gemma3_text gpt_oss granite_swa mimo_v2_flash ministral ministral3 "
            "mistral olmo3 phi3 vaultgemma"
        ).split()
    ),
    Model("gemma4_text", WINDOW, W16 | GEMMA4),
    Model("llama4_text", WINDOW, {"attention_chunk_size": 16}),
    Model("qwen2_moe", WINDOW, W16 | LATER),
    Model("bart", "does not accept position_ids"),
    Model("blenderbot", "does not accept position_ids"),
    Model("lfm2", STATES, {"layer_types": ["conv", "full_attention"]}),
    Model("lfm2_moe", STATES, {"layer_types": ["conv", "full_attention"]}),
    *(
        Model(name, STATES, LINEAR)
        for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
    ),
    Model("bamba", STATES, MAMBA | {"attn_layer_indices": [1]}),
    Model("falcon_h1", STATES, MAMBA | {"mamba_d_ssm": 64}),
    Model("granitemoehybrid", STATES, MAMBA | {"shared_intermediate_size": 24} | LINEAR),
    Model(
        "nemotron_h",
        STATES,
        MAMBA | {"layers_block_type": LINEAR["layer_types"], "ssm_state_size": 8},
    ),
    Model(
        "zamba2",
        STATES,
        MAMBA | {"layers_block_type": ["linear_attention", "hybrid"], "num_mem_blocks": 1},
    ),
    Model("bailing_hybrid", "layers of type linear_attention"),
    *(Model(name, "does not accept position_ids") for name in ("bloom", "mpt", "rwkv")),
    Model("xglm", "no attention was called"),
    Model("codegen", "RuntimeError"),
    Model("gptj", "KeyError"),
    *(Model(name, "layers of type linear_attention") for name in ("mamba", "recurrent_gemma")),
]


def build(row: Model, attention: str) -> Any:
    """Return a random float64 model, equal in every process.

    Attention is eager if the library has no SDPA for the model.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.name])
    known = model_class.config_class()
    wanted = {**SMALL, **row.changes}
    names = {*vars(known), *known.attribute_map}
    given = {name: value for name, value in wanted.items() if value is not None and name in names}
    torch.manual_seed(1)
    config = model_class.config_class(**given)
    config._experts_implementation = "eager"  # the fast implementation does not support float64
    chosen = "eager" if attention == "sdpa" and not model_class._supports_sdpa else attention
    return model_class._from_config(config, attn_implementation=chosen).double().eval()


def loss_of(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the cross-entropy, summed over tokens.

    The model gets position ids only if its signature accepts them.
    """
    takes = "position_ids" in inspect.signature(model.forward).parameters
    logits = model(
        input_ids=ids, use_cache=False, **({"position_ids": positions} if takes else {})
    ).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batch() -> tuple[torch.Tensor, ...]:
    """Return token ids, position ids, shifted labels and document ids, each `[2, 48]`.

    The first row has packed documents, and the second row is one document.
    """
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    lengths = [[7, 24, 17], [TOKENS]]
    documents = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return ids, positions, shift_labels(ids, documents), documents


def trained(row: Model, axis: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients over the ranks of `axis`.

    Without an axis, train in one process with the library's own attention.
    """
    with pytest.MonkeyPatch.context() as patch, float32_is_float64(patch):
        model = build(row, "sdpa" if axis is None else register_with_transformers())
        *buffers, documents = batch()
        if axis is None:
            parts = [(i, documents[i] == n) for i in range(2) for n in documents[i].unique()]
            loss = torch.stack(
                [loss_of(model, *(x[i, here][None] for x in buffers)) for i, here in parts]
            ).sum()
            loss.backward()
        else:
            transport = ("kv_exchange", "p2p", "a2a", "all_gather")[MODELS.index(row) % 4]
            options = {"buffers": buffers, "buffer_seq_dims": [1, 1, 1], "transport": transport}
            with context_parallel(axis, model=model, document_ids=documents, **options):
                loss = loss_of(model, *buffers)
                loss.backward()
    if axis is not None:
        loss = all_reduce(loss.detach(), axis)
        sum_gradients(model.parameters(), axis)
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def compared(rank: int, world_size: int) -> list[str]:
    """Return the result for each model; all ranks must agree."""
    return [found(row, world_size) for row in MODELS]


def found(row: Model, world_size: int) -> str:
    """Return EXACT, a refusal, or the size of the error."""
    try:
        loss, gradients = trained(row, grid(cp=world_size).cp)
    except Exception as error:
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    want_loss, want = trained(row)
    largest = max(x.abs().max() for x in want.values())
    # relative to the model's largest gradient, because that of a key bias is 0 up to rounding
    error = max((gradients[name] - x).abs().max() / largest for name, x in want.items())
    right = (
        gradients.keys() == want.keys()
        and abs(loss - want_loss) <= 1e-12 * want_loss
        and error <= 1e-10
    )
    return EXACT if right else f"WRONG: loss {loss} for {want_loss}, gradients off by {error:.1e}"


def table(results: list[str]) -> str:
    """Return the rows of the documented table: a result and its models."""
    groups: dict[str, list[str]] = {}
    for row, said in zip(MODELS, results, strict=True):
        found = f"refused: {row.found}" if row.found in said else said
        if said == EXACT:
            found = row.found
        groups.setdefault(found, []).append(row.name.replace("_", "\\_"))
    lines = [
        f"| {found} | {len(names)} | {', '.join(sorted(names))} |"
        for found, names in groups.items()
    ]
    return "\n".join(["| | | `model_type` |", "|---|---|---|", *lines])


@pytest.mark.slow
def test_no_model_is_silently_wrong_and_the_page_has_the_table_that_is_found() -> None:
    results = run_ranks(compared, 2, timeout=300)
    for row, *said in zip(MODELS, *results, strict=True):
        assert said[0] == said[1], row
        right = said[0] == EXACT if row.found.startswith(EXACT) else row.found in said[0]
        assert right, (row.name, said[0])
    assert table(results[0]) in PAGE.read_text(encoding="utf-8"), table(results[0])


if __name__ == "__main__":
    print(table(run_ranks(compared, 2, timeout=300)[0]))


def test_the_converter_names_the_trainer_for_exact_types_it_does_not_convert() -> None:
    exact = {row.name for row in MODELS if row.found.startswith(EXACT)}
    named = {*TRAINED_BY_THE_TRAINER}
    assert named <= exact - {*FAMILIES, *TEXT_PARTS}
    assert {"deepseek_v3", "qwen3_next", "gpt2"} <= named
