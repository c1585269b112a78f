"""Stock models that would train wrongly over a sharded sequence are refused by all ranks; right ones are exact."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.huggingface.door.context import context_parallel
from megacp.huggingface.door.loop import shift_labels, sum_gradients
from megacp.huggingface.door.mask import batch_mask
from megacp.huggingface.door.transformers import register_with_transformers
from tests.ranks import grid, run_ranks

TOKENS, VOCAB = 48, 61
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "experts_implementation": "eager",  # the grouped product is not made for float64
}
SCAN: dict[str, Any] = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
LLAMA4: dict[str, Any] = {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "no_rope_layers": [0, 1]}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}
LONGROPE |= {"long_factor": [3.0] * 4, "original_max_position_embeddings": 30}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Case(NamedTuple):
    """A stock model, how it is used, and what all ranks must say; nothing where the gradients must be exact."""

    kind: str
    said: str = ""
    changes: dict[str, Any] = {}
    attention: str = "megacp"
    layout: str = "zigzag"
    use: str = ""
    """Of: no positions, packed, axes, checkpoint, twice, model, filled up."""


MIXING = "layers of type"
FORGOTTEN = "is given no position_ids: it would count the tokens of each rank from 0"
EAGER = 'attn_implementation="eager" of transformers'
STOCK = 'attn_implementation="sdpa" of transformers'
DYNAMIC = (
    "this model's rotary angles depend on the longest position, which is (0|1|24) on one rank and (1|48) on another"
)

FAST = [
    Case("Lfm2", MIXING, {"layer_types": ["conv", "full_attention"]}),
    Case("Qwen3", "", {"layer_types": ["full_attention"] * 2}),
    Case("Llama", FORGOTTEN, layout="contiguous", use="no positions"),
    Case("Bert", FORGOTTEN, {"is_decoder": True, **NO_DROPOUT}, use="no positions"),
    Case("Bert", "", {"is_decoder": True, **NO_DROPOUT}),
    Case("Llama", DYNAMIC, {"rope_parameters": LONGROPE}, layout="contiguous"),
    Case("Llama", "", {"rope_parameters": LONGROPE}),  # both ranks have tokens of the last half
    Case("Llama", "", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 48}}, layout="contiguous"),
    Case("Mistral", STOCK, {"sliding_window": 32}, "sdpa", "contiguous"),
    Case("Mistral", "window of 32 tokens in a sequence of 48", {"sliding_window": 32}, layout="contiguous"),
    Case("Mistral", "", {"sliding_window": 47}, use="filled up"),
    Case("Mistral", "window of 46 tokens in a sequence of 47", {"sliding_window": 46}, use="filled up"),
    Case("Llama4", "", {**LLAMA4, "floor_scale": 48, "attention_chunk_size": 47}, use="filled up"),
    Case("Llama4", r"from 47 tokens on \(attn_temperature_\w+\): 47", {**LLAMA4, "floor_scale": 47}, use="filled up"),
    Case("Llama", EAGER, attention="eager"),
    Case("Qwen2VL", FORGOTTEN, use="no positions"),
    Case("Qwen2VL", "", use="axes"),
    Case("Qwen2VL", "do not count up by one .* give document_ids", use="axes, packed", layout="contiguous"),
    Case("Llama", "recomputed after its block was left: call backward inside the block", use="checkpoint"),
    Case("Llama", "create_graph=True: attention over ranks cannot be differentiated twice", use="twice"),
    Case("LlamaForSequenceClassification", "pools the sequence into one answer"),
    Case("Mixtral", "load-balancing loss is not a sum over tokens", {"output_router_logits": True, **EXPERTS}),
    Case("BartForCausalLM", "takes no position_ids: it numbers the tokens of each rank from 0 by itself"),
    Case(
        "T5", "asks for position_bias|queries and .* keys|takes no position_ids", {"d_model": 32, "d_kv": 8, "d_ff": 48}
    ),
    Case(
        "Llama",
        DYNAMIC,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
        | {"max_position_embeddings": 30},
        layout="contiguous",
    ),
    Case("Bamba", MIXING, {**SCAN, "attn_layer_indices": [1]}),
]


def build(case: Case) -> Any:
    """A random model in float64; the same in every process."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    register_with_transformers()
    name = re.sub("For[A-Z].*", "", case.kind)
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    settings = {**TEXT, **case.changes, "attn_implementation": case.attention}
    if name == "Qwen2VL":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
        text = {**settings, "rope_parameters": rope}
        settings = {"text_config": text, "vision_config": vision, "attn_implementation": case.attention}
    config = config_class(**settings)
    name = name.removesuffix("Text")
    kinds = (case.kind, *(name + end for end in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")))
    model_class = next(x for x in (getattr(transformers, kind, None) for kind in kinds) if x and hasattr(x, "forward"))
    torch.manual_seed(1)
    return model_class._from_config(config).double().eval()


def tokens(case: Case) -> tuple[Tensor, Tensor]:
    """Token ids `[2, 48]` (`filled up`: 47) and their position ids; `packed`: documents of 20 tokens."""
    length = TOKENS - 1 if case.use == "filled up" else TOKENS
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(length)[None].expand(2, -1)
    positions = positions % 20 if "packed" in case.use else positions.clone()
    return ids, positions[None].repeat(3, 1, 1) if "axes" in case.use else positions


def loss_of(net: Any, ids: Tensor, positions: Tensor | None, labels: Tensor) -> Tensor:
    inputs = {} if positions is None else {"position_ids": positions}
    out = net(ids, **inputs) if type(net).__name__.startswith(("T5", "Mamba")) else net(ids, use_cache=False, **inputs)
    logits = out.logits
    if logits.shape[:-1] != labels.shape:
        return logits.sum()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * TOKENS - 2)


def whole(case: Case) -> list[Tensor]:
    """Gradients of one process with the library's own attention."""
    net = build(case._replace(attention="sdpa"))
    ids, positions = tokens(case)
    loss_of(net, ids, positions, shift_labels(ids)).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def in_a_block(case: Case, axis: Any) -> list[Tensor]:
    """Gradients of all ranks."""
    net = build(case)
    ids, positions = tokens(case)
    labels = shift_labels(ids)
    if case.use == "checkpoint":
        net.train()
        net.gradient_checkpointing_enable({"use_reentrant": True})
        net.enable_input_require_grads()
    block = context_parallel(
        axis,
        buffers=[ids, positions, labels],
        buffer_seq_dims=[1, -1, 1],
        pad_values=[0, 0, -100],
        layout=case.layout,
        model=net,
    )
    with block:
        loss = loss_of(net, ids, None if "no positions" in case.use else positions, labels)
        if case.use == "twice":
            torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        elif case.use != "checkpoint":
            loss.backward()
    if case.use == "checkpoint":
        loss.backward()
    sum_gradients(net.parameters(), axis)
    return [p.grad for p in net.parameters() if p.grad is not None]


def try_on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, float]]:
    """For each case what this rank says, and how far its gradients are from those of one process."""
    found = []
    for case in cases:
        try:
            gradients = in_a_block(case, grid(cp=world_size).cp)
        except ValueError as error:
            found.append((str(error), 0.0))
            continue
        pairs = zip(gradients, whole(case), strict=True)
        found.append(("", max(((x - y).abs().max() / y.abs().max().clamp_min(1e-9)).item() for x, y in pairs)))
    return found


def check(cases: list[Case]) -> None:
    """Both ranks refuse with one message, or are exact; float64, angles are fp32 of the same values everywhere."""
    for case, first, second in zip(cases, *run_ranks(try_on_ranks, 2, cases, timeout=280), strict=True):
        assert first[0] == second[0], (case, first, second)
        assert re.search(case.said, first[0]) if case.said else not first[0], (case, first)
        assert max(first[1], second[1]) <= 1e-10, (case, first, second)


@pytest.mark.slow
def test_stock_models_that_would_be_wrong_are_refused_and_right_ones_are_exact() -> None:
    """Would catch layers, angles, positions, windows and losses of one rank's tokens, and refusals without a cause."""
    check(FAST)


def test_positions_of_several_axes_may_differ_but_never_go_back_in_a_document() -> None:
    """Would catch packed rows of a model with images whose documents see each other, and images taken for an error."""
    text = np.arange(8)[None]
    picture = np.stack([[[0, 1, 2, 2, 2, 2, 4, 5]], [[0, 1, 2, 2, 3, 3, 4, 5]], [[0, 1, 2, 3, 2, 3, 4, 5]]])
    packed = np.where(np.arange(8) < 6, picture, picture[:, :, [0, 1, 2, 3, 4, 5, 0, 1]])
    one, two = batch_mask(None, 8), batch_mask(torch.arange(8) // 6, 8)
    assert one.misplaced(picture, text) == "" and two.misplaced(packed, text) == ""
    assert one.misplaced(packed, text) == "position_ids go back 1 times within a document"
    longer = batch_mask(None, 16)
    assert longer.misplaced(np.stack([text] * 3), text + 8).startswith("position_ids are 0, 1, 2, ... on this rank")
