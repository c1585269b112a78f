"""Stock models of transformers train in a block as on one process, or all ranks refuse them.

The models keep the attention modules of the library.
"""

from __future__ import annotations

import argparse
import functools
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.attention.context_parallel import fused_states
from megacp.attention.context_parallel.fused_states import FUSED, fused_recur
from megacp.attention.ops.mask import Metadata
from megacp.attention.ops.recurrence import gated_delta_rule
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import single_axis
from megacp.integrations.context import context_parallel
from megacp.integrations.loop import shift_labels, sum_gradients
from megacp.integrations.mask import trees_of
from megacp.integrations.transformers import register_with_transformers
from tests.integrations import test_matrix
from tests.integrations.test_context import TWO, axis_of, rollouts, transport_on
from tests.ranks import grid, run_ranks
from tests.reference.fused import chunk_gated_delta_rule
from tests.reference.precision import float32_is_float64

ROOT = Path(__file__).resolve().parents[2]
VOCAB, TOKENS = 61, 48
SIZES: dict[str, Any] = {
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
STRETCHES = {
    "one": [[(0, 48)], [(0, 48)]],
    "packed": [[(0, 7), (0, 24), (0, 17)], [(0, 30), (0, 18)]],
    "trees": [
        [(0, 20), (15, 6), (9, 6), (12, 5), (0, 7), (3, 4)],
        [(0, 13), (8, 10), (8, 9), (14, 6), (8, 10)],
    ],
}
"""First position and length of each stretch in each of two batch rows."""


def build(model: str, attention: str, **changes: Any) -> Any:
    """Return a random float64 model, equal in every process."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: test)"
    )
    register_with_transformers()
    name = re.sub("For[A-Z].*", "", model)
    settings = {**SIZES, **changes}
    if name == "Qwen2VL":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
        settings = {"text_config": {**settings, "rope_parameters": rope}, "vision_config": vision}
    config_class = getattr(
        transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config"
    )
    kinds = (
        model,
        *(name + end for end in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")),
    )
    model_class = next(
        x
        for x in (getattr(transformers, kind, None) for kind in kinds)
        if x and hasattr(x, "forward")
    )
    torch.manual_seed(1)
    return model_class._from_config(
        config_class(**settings, attn_implementation=attention)
    ).double()


@functools.cache
def tokens_of(documents: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, position ids and numbers of stretches, each `[2, 48]`.

    Stretches that continue the same token start with the same token id.
    """
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    rows = STRETCHES[documents]
    positions = torch.stack(
        [torch.cat([torch.arange(first, first + n) for first, n in row]) for row in rows]
    )
    numbers = torch.stack(
        [torch.cat([torch.full((n,), i) for i, (_, n) in enumerate(row)]) for row in rows]
    )
    for row, places in zip(ids, positions.tolist(), strict=True):
        for path in rollouts(places):
            row[path[1:]] = row[torch.tensor(path[:-1]) + 1]
    return ids, positions, numbers


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Case(NamedTuple):
    """A training configuration."""

    model: str
    ranks: int
    transport: str
    layout: str
    documents: str = "packed"
    tokens: int = TOKENS
    """Number of tokens of each row; the remaining ones of 48 are cut off."""
    option: str = ""


CASES = [
    Case("Llama", 2, "p2p", "zigzag", option="cache"),
    Case("Llama", 2, "all_gather", "balanced", "one", 47),
    Case("Qwen3", 2, "a2a", "contiguous"),
    Case("Llama", 2, "kv_exchange", "zigzag", "one"),
    Case("Qwen3", 4, "p2p", "contiguous"),
    Case("Llama", 4, "a2a", "balanced", "one", 47),
    Case("Qwen3", 4, "a2a+p2p", "zigzag"),
    Case("Qwen3", 4, "kv_exchange", "zigzag_document", option="recomputed"),
    Case("Llama", 2, "kv_exchange", "balanced", "trees"),
    Case("Qwen3", 4, "a2a", "zigzag", "trees"),
]


@functools.cache
@float32_is_float64(pytest.MonkeyPatch())
def reference(model: str, documents: str, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of the model with its own attention.

    It gets one document or rollout at a time and shifts the labels itself. A token that several
    rollouts share counts in each of them.
    """
    net, (ids, positions, _) = build(model, "sdpa", head_dim=8), tokens_of(documents)
    losses, counted = [], 0
    for row, places in zip(ids, positions[:, :tokens].tolist(), strict=True):
        for document in (row[path] for path in rollouts(places)):
            logits = net(document[None], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits[:-1], document[1:], reduction="sum"))
            counted += len(document) - 1
    loss = torch.stack(losses).sum() / counted
    loss.backward()
    return loss.detach(), gradients_of(net)


@float32_is_float64(pytest.MonkeyPatch())
def train_on_ranks(rank: int, world_size: int) -> list[Any]:
    """Return the loss of each case and, on rank 0, the gradients."""
    found = []
    for case in CASES:
        axis, net = axis_of(case.ranks), build(case.model, "megacp", head_dim=8)
        if case.option == "recomputed":
            net.gradient_checkpointing_enable({"use_reentrant": False})
        ids, positions, documents = (x[:, : case.tokens].clone() for x in tokens_of(case.documents))
        labels, times = shift_labels(ids, documents), torch.zeros(2, case.tokens)
        for row, places in zip(times, positions.tolist(), strict=True):
            for path in rollouts(places):
                # a label counts once for each rollout in which the token has it
                row[path[:-1]] += 1
        counted = times.sum()
        with context_parallel(
            axis,
            model=net,
            buffers=[ids, positions, labels, times],
            buffer_seq_dims=[1, 1, 1, 1],
            pad_values=[0, 0, -100, 0],
            document_ids=trees_of(positions) if case.documents == "trees" else documents,
            transport=transport_on(case.transport, axis),
            layout=case.layout,
        ) as context:
            logits = net(ids, position_ids=positions, use_cache=case.option == "cache").logits
            cross = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            loss = (cross * times.flatten()).sum() / counted
            loss.backward()
            assert len(context.plans) == 1, "planned again in a later layer"
        sum_gradients(net.parameters(), axis)
        found.append((all_reduce(loss.detach(), axis), gradients_of(net) if rank == 0 else None))
    return found


@pytest.mark.slow
def test_stock_models_train_on_several_ranks_as_on_one() -> None:
    results = run_ranks(train_on_ranks, 4, timeout=200)
    for number, case in enumerate(CASES):
        want_loss, want = reference(case.model, case.documents, case.tokens)
        losses, gradients = zip(*(result[number] for result in results[: case.ranks]), strict=True)
        assert max(abs(loss - want_loss) for loss in losses) <= 1e-12 * want_loss, case
        for name, grad in gradients[0].items():
            assert (grad - want[name]).abs().max() <= 1e-10 * want[name].abs().max(), (case, name)


class Use(NamedTuple):
    """A stock model, its use, and the message that all ranks must raise.

    The message is empty if the gradients must be exact.
    """

    model: str
    said: str = ""
    changes: dict[str, Any] = {}
    layout: str = "zigzag"
    use: str = ""
    """A combination of no positions, packed, axes, behind, reentrant, twice, filled up, labels; or
    the name of another attention.
    """


LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}
LONGROPE |= {"long_factor": [3.0] * 4, "original_max_position_embeddings": 30}
DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
LLAMA4: dict[str, Any] = {
    **EXPERTS,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [0, 1],
}
BERT: dict[str, Any] = {
    "is_decoder": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FORGOTTEN = "receives no position_ids"
ANGLES = "angles depend on the longest position, which is (0|24) on one rank and (1|48) on another"

USES = [
    Use("Llama", FORGOTTEN, layout="contiguous", use="no positions"),
    Use("Bert", FORGOTTEN, BERT, use="no positions"),
    Use("Qwen2VL", FORGOTTEN, use="no positions"),
    Use("Qwen2VL", use="axes"),
    Use(
        "Qwen2VL",
        "do not count up by one.* give document_ids",
        layout="contiguous",
        use="axes, packed",
    ),
    Use("Llama", ANGLES, {"rope_parameters": LONGROPE}, "contiguous"),
    Use("Llama", "", {"rope_parameters": LONGROPE}),  # both ranks have tokens of the last half
    Use(
        "Llama",
        "",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 48}},
        "contiguous",
    ),
    Use("Llama", ANGLES, {**DYNAMIC, "max_position_embeddings": 30}, "contiguous"),
    Use("Mistral", "", {"sliding_window": 32}, "contiguous"),
    Use("Mistral", "", {"sliding_window": 47}, use="filled up"),
    Use("Mistral", "", {"sliding_window": 46}, use="filled up"),
    Use("Llama4", "", {**LLAMA4, "floor_scale": 48, "attention_chunk_size": 47}, use="filled up"),
    Use("Llama4", "attn_temperature_tuning", {**LLAMA4, "floor_scale": 47}, use="filled up"),
    Use("Llama", 'attn_implementation="eager"', use="eager"),
    Use("Mistral", 'attn_implementation="sdpa"', layout="contiguous", use="sdpa"),
    Use(
        "Llama",
        r"recomputed after its block has ended: call backward\(\) inside the block",
        use="behind",
    ),
    Use("Llama", use="reentrant"),
    Use("Llama", "receives labels: .* shift_labels .* num_items_in_batch", use="labels"),
    Use(
        "Llama",
        "create_graph=True: attention across ranks cannot be differentiated twice",
        use="twice",
    ),
    Use("LlamaForSequenceClassification", "pools the sequence into one output"),
    Use(
        "Mixtral",
        r"SFTConfig\(router_aux_loss_coef=0.0\)",
        {"output_router_logits": True, **EXPERTS},
    ),
    Use("T5", "does not accept position_ids", {"d_model": 32, "d_kv": 8, "d_ff": 48}),
]


def loss_of(net: Any, ids: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
    options = {} if positions is None else {"position_ids": positions}
    logits = net(
        ids, **options, **({} if type(net).__name__.startswith("T5") else {"use_cache": False})
    ).logits
    if logits.shape[:-1] != labels.shape:
        return logits.sum()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
        2 * TOKENS - 2
    )


def batch_of(case: Use) -> list[Tensor]:
    """Return token ids, shifted labels and position ids; `packed` has documents of 20 tokens."""
    length = TOKENS - 1 if case.use == "filled up" else TOKENS
    ids = tokens_of("one")[0][:, :length].clone()
    positions = torch.arange(length).repeat(2, 1) % (20 if "packed" in case.use else TOKENS)
    return [
        ids,
        shift_labels(ids),
        positions[None].repeat(3, 1, 1) if "axes" in case.use else positions,
    ]


def error_in_a_block(case: Use, axis: Any) -> float:
    """Return the largest error of the gradients of all ranks.

    It is relative to one process with the library's own attention.
    """
    net = build(
        case.model, case.use if case.use in ("eager", "sdpa") else "megacp", **case.changes
    ).eval()
    ids, labels, positions = batch_of(case)
    if case.use in ("behind", "reentrant"):
        net.train()
        net.gradient_checkpointing_enable({"use_reentrant": True})
        net.enable_input_require_grads()
    block = context_parallel(
        axis,
        buffers=[ids, labels, positions],
        buffer_seq_dims=[1, 1, -1],
        pad_values=[0, -100, 0],
        layout=case.layout,
        model=net,
    )
    with block:
        if case.use == "labels":
            net(ids, position_ids=positions, labels=labels, shift_labels=labels)
        loss = loss_of(net, ids, labels, None if case.use == "no positions" else positions)
        if case.use == "twice":
            torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        elif case.use != "behind":
            loss.backward()
    if case.use == "behind":
        loss.backward()
    sum_gradients(net.parameters(), axis)
    stock = build(case.model, "sdpa", **case.changes).eval()
    loss_of(stock, *batch_of(case)).backward()
    found, want = gradients_of(net), gradients_of(stock)
    assert found.keys() == want.keys()
    return max(
        float((found[name] - x).abs().max() / x.abs().max().clamp_min(1e-9))
        for name, x in want.items()
    )


def use_on_ranks(rank: int, world_size: int) -> list[str | float]:
    """Return this rank's refusal or error for each use."""
    found: list[str | float] = []
    for case in USES:
        try:
            with pytest.MonkeyPatch.context() as patch, float32_is_float64(patch):
                found.append(error_in_a_block(case, grid(cp=world_size).cp))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_uses_that_would_be_wrong_are_refused_by_all_ranks_and_right_ones_are_exact() -> None:
    for case, first, second in zip(USES, *run_ranks(use_on_ranks, 2, timeout=280), strict=True):
        if case.said:
            assert first == second and re.search(case.said, str(first)), (case, first, second)
        else:
            assert not isinstance(first, str) and max(first, second) <= 1e-10, (case, first, second)


def seen_on_one_rank(rank: int, world_size: int) -> list[str]:
    """Return a rank's messages for wrong values that only one rank can detect, and then for correct
    values.
    """
    from transformers.masking_utils import create_causal_mask

    net = build("Llama", "megacp")
    # documents of 30 and 18 tokens; the second rank begins at token 24
    packed, positions, documents = (x[1:] for x in tokens_of("packed"))
    arguments = {"config": net.config, "past_key_values": None, "attention_mask": None}
    said = []
    for name in ("packed", "padding", "overlay", "right"):
        buffers = [
            packed.clone(),
            positions.clone(),
            torch.arange(TOKENS)[None] < TOKENS - 3 * (name == "padding"),
        ]
        block = context_parallel(
            axis_of(2),
            model=net,
            buffers=buffers,
            buffer_seq_dims=[1] * 3,
            document_ids=None if name == "packed" else documents,
            layout="contiguous",
        )
        try:
            with block, torch.no_grad():
                if name == "padding":  # found after the first call
                    net(buffers[0], position_ids=buffers[1])
                if name == "overlay":  # the first two tokens see each other
                    together = torch.where(
                        torch.arange(24)[None] < (2 if axis_of(2).rank == 0 else 0), 0, -1
                    )
                    create_causal_mask(
                        inputs_embeds=torch.zeros(1, 24, 32),
                        block_sequence_ids=together,
                        **arguments,
                    )
                net(buffers[0], position_ids=buffers[1], attention_mask=buffers[2])
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_what_one_rank_alone_can_see_is_refused_by_all_ranks_alike() -> None:
    """No rank waits for another rank's keys until a timeout."""
    patterns = [
        "rank 1: position_ids do not count up by one.* give document_ids",
        r"rank 1: attention_mask \(1, 24\) has 3 zeros that do not match this rank's padding",
        "rank 0: this model adds its own mask",
        "^$",
    ]
    for said in run_ranks(seen_on_one_rank, 4, timeout=100):
        for pattern, text in zip(patterns, said, strict=True):
            assert re.search(pattern, text), (pattern, text)


def test_masks_of_a_model_that_the_block_does_not_have_are_refused() -> None:
    net, documents = build("Llama", "megacp"), tokens_of("packed")[2]
    sliding = build(
        "Qwen3",
        "megacp",
        head_dim=8,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=0,
    )
    for model, given, said in (
        (
            net,
            {"attention_mask": torch.ones(2, TOKENS)},
            "24 queries and 48 keys.* must be in the buffers",
        ),
        (
            sliding,
            {"is_causal": False},
            "window of 16 tokens without a causal mask, in a sequence of 48",
        ),
        (
            net,
            {"sliding_window": 16},
            "LlamaAttention needs a window of 16 tokens, but its mask has none",
        ),
        (net, {"position_bias": torch.ones(1)}, "LlamaAttention needs position_bias"),
        (net, {"cu_seq_lens_q": torch.ones(1)}, "LlamaAttention needs cu_seq_lens_q"),
    ):
        ids, positions, _ = (x.clone() for x in tokens_of("packed"))
        buffers = [ids, positions]
        block = context_parallel(
            TWO, model=model, buffers=buffers, buffer_seq_dims=[1, 1], document_ids=documents
        )
        with pytest.raises(ValueError, match=said), block, torch.no_grad():
            model(ids, position_ids=positions, use_cache=False, **given)


def test_spans_past_a_window_are_refused() -> None:
    """In PaliGemma 2 the whole prefix sees itself; in Gemma 3 windows also apply inside images."""
    sliding = build("Mistral", "megacp", sliding_window=16)
    ids, positions, _ = (x[:1].clone() for x in tokens_of("one"))
    rule = Metadata.of_documents(np.zeros(TOKENS, int), span=np.arange(TOKENS) < 20)
    block = context_parallel(
        TWO, model=sliding, buffers=[ids, positions], buffer_seq_dims=[1, 1], document_ids=rule
    )
    with (
        pytest.raises(ValueError, match="exceed a window of 16 tokens, in a sequence of 48"),
        block,
    ):
        sliding(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("whole_rule", [False, True])
def test_an_overlay_needs_the_whole_rule(whole_rule: bool) -> None:
    from transformers.masking_utils import create_causal_mask

    net, zeros = build("Llama", "megacp"), torch.zeros(1, TOKENS).long()
    text, positions = zeros[0].clone().numpy(), torch.arange(TOKENS)[None]
    ids = Metadata.of_documents(text) if whole_rule else zeros.clone()
    x = torch.zeros(1, TOKENS, 32)
    arguments = {
        "config": net.config,
        "past_key_values": None,
        "attention_mask": None,
        "inputs_embeds": x,
    }
    overlay = {"or_mask_function": lambda b, h, q, k: q == q}
    block = context_parallel(
        TWO, buffers=[x, positions, zeros], buffer_seq_dims=[1, 1, 1], document_ids=ids
    )
    with pytest.raises(ValueError, match="no attention was called") as caught, block:
        assert create_causal_mask(position_ids=positions, **arguments) is None
        if whole_rule:
            assert create_causal_mask(position_ids=positions, **arguments, **overlay) is None
        else:
            with pytest.raises(ValueError, match="Metadata with these spans"):
                create_causal_mask(**arguments, **overlay)
        assert (
            create_causal_mask(position_ids=positions, block_sequence_ids=zeros, **arguments)
            is None
        )
    assert ("Metadata with these spans" in str(caught.value)) != whole_rule


def test_outside_of_a_block_the_registered_attention_is_the_stock_one() -> None:
    ours, stock = build("Qwen3", "megacp", head_dim=8), build("Qwen3", "sdpa", head_dim=8)
    ids, positions, _ = tokens_of("packed")
    padding = torch.ones(2, TOKENS)
    padding[0, 45:] = 0
    with torch.no_grad():
        for inputs in (
            {},
            {"position_ids": positions, "use_cache": False},
            {"attention_mask": padding},
        ):
            assert torch.equal(ours(ids, **inputs).logits, stock(ids, **inputs).logits)
        steps = [
            net.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
            for net in (ours, stock)
        ]
    assert torch.equal(*steps)
    with pytest.raises(ValueError, match="needs a soft cap"):
        ours(ids, softcap=30.0)


def example(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Return the losses of the example's steps, over the ranks and on one process."""
    path = str(ROOT / "examples" / "hf_context_parallel.py")
    options = argparse.Namespace(steps=1, seq_length=250, transport="p2p", layout="balanced")
    return runpy.run_path(path)["train"](grid(cp=world_size).cp, torch.device("cpu"), options)


@pytest.mark.slow
def test_the_example_has_the_losses_of_one_process() -> None:
    for ((sharded, alone),) in run_ranks(example, 2):
        assert abs(sharded - alone) <= 1e-4


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_states_take_the_dtypes_of_autocast_and_backward_behind_it(weights: torch.dtype) -> None:
    """The Trainer calls models in this way with bf16."""
    row = next(row for row in test_matrix.MODELS if row.name == "qwen3_5_text")
    model = test_matrix.build(row, register_with_transformers()).to(weights)
    ids, positions, _, documents = (x.clone() for x in test_matrix.batch())
    options = {"buffers": [ids, positions], "buffer_seq_dims": [1, 1], "document_ids": documents}
    with context_parallel(single_axis("cp"), model=model, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, position_ids=positions).logits.float().square().mean()
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_states_of_the_library_take_the_kernel_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check packed documents in float64, with a reference in place of the kernel."""
    row, kernels = next(row for row in test_matrix.MODELS if row.name == "qwen3_5_text"), []
    model = test_matrix.build(row, register_with_transformers()).double()

    def loss() -> torch.Tensor:
        ids, positions, _, documents = (x.clone() for x in test_matrix.batch())
        options = {
            "buffers": [ids, positions],
            "buffer_seq_dims": [1, 1],
            "document_ids": documents,
        }
        with context_parallel(single_axis("cp"), model=model, **options):
            return model(ids, position_ids=positions).logits.square().mean()

    ours = loss()
    monkeypatch.setitem(FUSED, (gated_delta_rule, "cpu", torch.float64), fused_recur)
    monkeypatch.setattr(
        fused_states, "flash_linear_attention", lambda: kernels.append(1) or chunk_gated_delta_rule
    )
    assert abs(loss() - ours) <= 1e-12 * ours and kernels
