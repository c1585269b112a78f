"""Tiny random Llama, Qwen3 and Molmo2 text models of Hugging Face give the same logits with their weights copied in."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.data.batch import PackedBatch
from megacp.core.models.build import build_chunks
from tests.ranks import grid, run_ranks
from tests.reference.sharding import fill
from tests.reference.training import Values, config_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

VOCAB, TOKENS = 97, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
OURS: Values = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_layers": 3,
    "num_query_groups": 2,
    "dtype": "float32",
}
NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def llama(tied: bool, scaled: bool, biased: bool = False) -> tuple[Any, Values]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    values: Values = {**OURS, "rotary_base": 500.0, "norm_epsilon": 1e-5}
    if scaled:  # original 16 positions: the row of 40 tokens meets all three bands of frequencies
        bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
        rope |= {"rope_type": "llama3", "factor": 8.0, **bands}
        values |= {"rope_scaling": "llama3", "rope_scaling_factor": 8.0, "rope_original_max_positions": 16}
    if biased:
        values |= {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True}
    config = transformers.LlamaConfig(
        **SIZES,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        attention_bias=biased,
        mlp_bias=biased,
        rms_norm_eps=1e-5,
    )
    return transformers.LlamaForCausalLM(config), {**values, "untie_embeddings_and_output_weights": not tied}


def qwen3(tied: bool) -> tuple[Any, Values]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = transformers.Qwen3Config(
        **SIZES, head_dim=16, rope_parameters=rope, tie_word_embeddings=tied, rms_norm_eps=1e-6
    )
    values = {**OURS, "qk_layernorm": True, "kv_channels": 16, "norm_epsilon": 1e-6}
    return transformers.Qwen3ForCausalLM(config), {**values, "untie_embeddings_and_output_weights": not tied}


class Molmo2Text(torch.nn.Module):
    """Molmo2's text tower with its head, under the names of the other models."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        modeling = importlib.import_module("transformers.models.molmo2.modeling_molmo2")
        self.model = modeling.Molmo2TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(tokens).last_hidden_state))


def molmo2() -> tuple[Any, Values]:
    """The tower of Molmo2 4B and 8B: Qwen3's norms, and an embedding of more rows than the head."""
    sizes = {**SIZES, "vocab_size": VOCAB - 8, "additional_vocab_size": 8, "head_dim": 16, "rms_norm_eps": 1e-6}
    rope = {"rope_type": "default", "rope_theta": 5_000.0}
    config = transformers.Molmo2Config(text_config={**sizes, "rope_parameters": rope}).text_config
    config._attn_implementation = "eager"
    values = {**OURS, "qk_layernorm": True, "kv_channels": 16, "norm_epsilon": 1e-6, "rotary_base": 5_000.0}
    extra = {"vocab_size": VOCAB - 8, "additional_vocab_size": 8, "untie_embeddings_and_output_weights": True}
    return Molmo2Text(config), {**values, **extra}


MODELS = {
    "llama": lambda: llama(tied=False, scaled=False),
    "llama tied, llama3 scaling": lambda: llama(tied=True, scaled=True),
    "llama with biases, llama3 scaling": lambda: llama(tied=False, scaled=True, biased=True),
    "qwen3": lambda: qwen3(tied=False),
    "qwen3 tied": lambda: qwen3(tied=True),
    "molmo2 text": molmo2,
}


def their_name(name: str) -> str:
    """The transformers name of one of our global tensors."""
    whole = {
        "embedding.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "final_norm.weight": "model.norm.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, rest = name.split(".", 2)
    inner, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{NAMES[inner]}.{kind}"


class Renamed(dict[str, torch.Tensor]):
    """Their state dict, read by our names."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(their_name(name))


def one_document() -> PackedBatch:
    """One unpacked document: transformers has no pack mask."""
    rng, zeros = np.random.default_rng(0), np.zeros(TOKENS, np.int32)
    tokens = rng.integers(0, VOCAB, TOKENS)
    return PackedBatch(tokens, tokens, np.ones(TOKENS, np.float32), np.arange(TOKENS), zeros, zeros, zeros, (0,))


def our_logits(
    rank: int, world_size: int, shape: dict[str, int], values: Values, state: dict[str, torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    mine, config = grid(**shape), config_of(values, shape)
    (chunk,) = build_chunks(config, mine)
    fill(chunk, Renamed(state))
    layout = LAYOUTS["zigzag"]
    batch = shard_batch(one_document(), mine.cp, layout, tp=mine.tp.size)
    with torch.no_grad():
        return batch.token_names.numpy(), chunk.local_logits(None, batch).numpy()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"cp": 2}], ids=str)
@pytest.mark.slow
def test_logits_equal_those_of_transformers(name: str, shape: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, values = MODELS[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # norms away from 1, biases away from 0, scores away from 0
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.2)
        expected = model.eval()(torch.from_numpy(one_document().tokens)[None]).logits[0].numpy()
    state = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    results = run_ranks(our_logits, 2, shape, values, state) if shape else [our_logits(0, 1, shape, values, state)]
    if "tp" in shape:
        found = np.concatenate([logits for _, logits in results], 1)
    else:
        found = np.concatenate([logits for _, logits in results])[np.argsort(np.concatenate([p for p, _ in results]))]
    assert found.shape == expected.shape and np.abs(expected).max() > 1
    # fp32 through 3 layers: sums in another order, 2^-24 of the largest logit times a few dozen
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
