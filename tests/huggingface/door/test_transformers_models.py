"""Stock models of transformers, attention included, train in a block as they do on one process."""

from __future__ import annotations

import argparse
import functools
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import single_axis
from megacp.core.ops.mask import Metadata
from megacp.huggingface.door.context import context_parallel
from megacp.huggingface.door.loop import shift_labels, sum_gradients
from megacp.huggingface.door.transformers import register_with_transformers
from tests.huggingface.door.test_context import TWO, axis_of, transport_on
from tests.ranks import grid, run_ranks

ROOT = Path(__file__).resolve().parents[3]
VOCAB, TOKENS = 61, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LENGTHS = {"one": [[48], [48]], "packed": [[7, 24, 17], [30, 18]]}
"""Lengths of the documents in each of two batch rows."""


class Case(NamedTuple):
    """One way to train."""

    model: str
    ranks: int
    transport: str
    layout: str
    documents: str = "packed"
    attention: str = "megacp"
    tokens: int = TOKENS
    """Of each row; the rest of 48 is cut off."""


def build(model: str, attention: str, **changes: Any) -> Any:
    """A random model in float64; the same in every process."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    register_with_transformers()
    config_class, model_class = (getattr(transformers, f"{model}{kind}") for kind in ("Config", "ForCausalLM"))
    torch.manual_seed(1)
    return model_class(config_class(**{**SIZES, "attn_implementation": attention, **changes})).double()


@functools.cache
def tokens_of(documents: str) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, position ids and document ids `[2, 48]`."""
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    lengths = LENGTHS[documents]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    numbers = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths])
    return ids, positions, numbers


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@functools.cache
def reference(model: str, documents: str, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model with its own attention, one document at a time, its labels shifted inside."""
    net, ids = build(model, "sdpa"), tokens_of(documents)[0]
    losses, counted = [], 0
    for row, lengths in zip(ids[:, :tokens], LENGTHS[documents], strict=True):
        for document in row.split([min(n, tokens) for n in lengths] if len(lengths) > 1 else [tokens]):
            logits = net(document[None], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits[:-1], document[1:], reduction="sum"))
            counted += len(document) - 1
    loss = torch.stack(losses).sum() / counted
    loss.backward()
    return loss.detach(), gradients_of(net)


def train(net: Any, case: Case, axis: Any, **call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and summed gradients of a block."""
    ids, positions, documents = (x[:, : case.tokens].clone() for x in tokens_of(case.documents))
    labels = shift_labels(ids, documents)
    counted = (labels != -100).sum()
    with context_parallel(
        axis,
        model=net,
        buffers=[ids, positions, labels],
        buffer_seq_dims=[1, 1, 1],
        pad_values=[0, 0, -100],
        no_restore_buffers={ids, positions, labels},
        document_ids=documents,
        transport=transport_on(case.transport, axis),
        layout=case.layout,
    ):
        logits = net(ids, position_ids=positions, **call).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(net.parameters(), axis)
    return all_reduce(loss.detach(), axis), gradients_of(net)


CASES = [
    Case("Llama", 2, "p2p", "zigzag"),
    Case("Llama", 2, "all_gather", "balanced", tokens=47, documents="one"),
    Case("Qwen3", 2, "a2a", "contiguous"),
    Case("Qwen3", 2, "kv_exchange", "balanced"),
    Case("Llama", 3, "p2p", "balanced"),
    Case("Llama", 3, "all_gather", "contiguous"),
    Case("Qwen3", 3, "p2p", "zigzag"),
    Case("Llama", 3, "kv_exchange", "zigzag", documents="one"),
    Case("Qwen3", 4, "p2p", "contiguous"),
    Case("Llama", 4, "all_gather", "zigzag"),
    Case("Llama", 4, "a2a", "balanced", tokens=47, documents="one"),
    Case("Qwen3", 4, "a2a+p2p", "zigzag"),
    Case("Llama", 4, "a2a+p2p", "balanced"),
    Case("Llama", 4, "kv_exchange", "contiguous"),
    Case("Qwen3", 4, "kv_exchange", "zigzag_document", attention="megacp, recomputed"),
    Case("Llama", 2, "p2p", "zigzag", attention="megacp, cache"),
]


def train_on_ranks(rank: int, world_size: int) -> list[Any]:
    """For each case the loss, and on rank 0 the gradients."""
    found = []
    for case in CASES:
        axis = axis_of(case.ranks)
        if axis.size != case.ranks:
            found.append((None, None))
            continue
        attention, *options = case.attention.split(", ")
        net = build(case.model, attention)
        if "recomputed" in options:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        loss, gradients = train(net, case, axis, use_cache="cache" in options)
        found.append((loss, gradients if rank == 0 else None))
    return found


@pytest.mark.slow
def test_stock_models_train_on_several_ranks_as_on_one() -> None:
    """Would catch wrong positions, documents that leak, a gradient that is not summed, and a cut before the shift.

    float64; norms and angles are float32 inside transformers, of the same values on every rank.
    """
    results = run_ranks(train_on_ranks, 4, timeout=200)
    for number, case in enumerate(CASES):
        want_loss, want = reference(case.model, case.documents, case.tokens)
        losses, gradients = zip(*(result[number] for result in results[: case.ranks]), strict=True)
        assert max(abs(loss - want_loss) for loss in losses) <= 1e-12 * want_loss, case
        for name, grad in gradients[0].items():
            assert (grad - want[name]).abs().max() <= 1e-10 * want[name].abs().max(), (case, name)


def losses_on_ranks(rank: int, world_size: int) -> float:
    """The loss of a model that is given labels and everything it must know; labels alone are refused."""
    axis, net = axis_of(4), build("Llama", "megacp").float()
    ids, positions, documents = (x.clone() for x in tokens_of("packed"))
    labels, shifted = ids.clone(), shift_labels(ids, documents)
    counted = (shifted != -100).sum()
    buffers = [ids, positions, labels, shifted]
    block = context_parallel(axis, model=net, buffers=buffers, buffer_seq_dims=[1] * 4, document_ids=documents)
    with block, torch.no_grad():
        with pytest.raises(ValueError, match="LlamaForCausalLM is given labels: it would shift them inside"):
            net(ids, position_ids=positions, labels=labels)
        with pytest.raises(ValueError, match="give shift_labels .* and num_items_in_batch too"):
            net(ids, position_ids=positions, labels=labels, shift_labels=shifted)
        right = net(ids, position_ids=positions, labels=shifted, shift_labels=shifted, num_items_in_batch=counted).loss
    return all_reduce(right, axis).item()


@pytest.mark.slow
def test_a_model_may_be_given_labels_that_were_shifted_before_and_no_others() -> None:
    """Would catch advice that is wrong, and `labels=` of a cut sequence that is shifted again by the model.

    transformers computes this loss in fp32: 90 terms of about 4.
    """
    want = reference("Llama", "packed", TOKENS)[0].item()
    for right in run_ranks(losses_on_ranks, 4, timeout=200):
        assert abs(right - want) <= 2e-6 * want


def logits_in_a_block(net: Any, documents: Any = None, axis: Any = None, **inputs: Any) -> Tensor:
    """Logits of a cut sequence; on two ranks nothing is sent, as the model is expected to be refused before."""
    ids, positions, _ = (x.clone() for x in tokens_of("packed"))
    masks = [x for x in (inputs.get("attention_mask"),) if x is not None]
    buffers = [ids, positions, *masks]
    with (
        context_parallel(
            axis or TWO, model=net, buffers=buffers, buffer_seq_dims=[1] * len(buffers), document_ids=documents
        ),
        torch.no_grad(),
    ):
        return net(ids, position_ids=positions, **inputs).logits


def said_by(block: Any, call: Any) -> str:
    """The refusal of a call in a block; nothing when it passes."""
    try:
        with block, torch.no_grad():
            call()
    except ValueError as error:
        return str(error)
    return ""


def seen_on_one_rank(rank: int, world_size: int) -> list[str]:
    """What a rank says to values of which only one rank can see that they are wrong, and then to right ones."""
    from transformers.masking_utils import create_causal_mask

    net = build("Llama", "megacp")
    packed, positions, documents = (x[1:] for x in tokens_of("packed"))  # 30 and 18 tokens, cut at 24
    arguments = {"config": net.config, "past_key_values": None, "attention_mask": None}
    cases: list[tuple[str, Tensor | None]] = [("packed", None), ("padding", documents), ("overlay", documents)]
    said = []
    for name, numbers in [*cases, ("right", documents)]:
        ids, places = packed.clone(), positions.clone()
        padding = (torch.arange(TOKENS)[None] < TOKENS - 3) if name == "padding" else torch.ones(1, TOKENS).bool()

        def call(name: str = name, ids: Tensor = ids, places: Tensor = places, padding: Tensor = padding) -> None:
            if name == "overlay":  # the first two tokens see each other
                together = torch.where(torch.arange(24)[None] < (2 if axis_of(2).rank == 0 else 0), 0, -1)
                create_causal_mask(inputs_embeds=torch.zeros(1, 24, 32), block_sequence_ids=together, **arguments)
            net(ids, position_ids=places, attention_mask=padding)

        buffers = [ids, places, padding]
        block = context_parallel(
            axis_of(2),
            model=net,
            buffers=buffers,
            buffer_seq_dims=[1] * 3,
            document_ids=numbers,
            layout="contiguous",
        )
        said.append(said_by(block, call))
    return said


@pytest.mark.slow
def test_what_one_rank_alone_can_see_is_refused_by_all_ranks_alike() -> None:
    """Would catch a rank that raises while the others wait for its keys until they time out."""
    patterns = [
        "rank 1: position_ids do not count up by one .* give document_ids",
        r"rank 1: attention_mask \(1, 24\) has 3 zeros, which are not this rank's padding",
        "rank 0: this model lays a mask of its own",
        "^$",
    ]
    for said in run_ranks(seen_on_one_rank, 4, timeout=100):
        for pattern, text in zip(patterns, said, strict=True):
            assert re.search(pattern, text), (pattern, text)


def test_masks_of_a_model_that_the_block_does_not_have_are_refused() -> None:
    """Would catch windows and caches that are dropped because no mask is built."""
    documents, net = tokens_of("packed")[2], build("Llama", "megacp")
    ids, positions, _ = (x.clone() for x in tokens_of("packed"))
    block = context_parallel(TWO, model=net, buffers=[ids, positions], buffer_seq_dims=[1, 1], document_ids=documents)
    with pytest.raises(ValueError, match="no attention was called"), block:
        with pytest.raises(ValueError, match="24 queries and 48 keys .* must be among the buffers"):
            net(ids, position_ids=positions, attention_mask=torch.ones(2, TOKENS), use_cache=False)
    sliding = build("Qwen3", "megacp", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match="window of 16 tokens in a sequence of 48"):
        logits_in_a_block(sliding, documents)
    for name in ("s_aux", "position_bias", "cu_seq_lens_q"):
        with pytest.raises(ValueError, match=f"LlamaAttention asks for {name}"):
            logits_in_a_block(net, documents, **{name: torch.ones(1)})


def test_an_overlay_needs_the_whole_rule() -> None:
    """Would catch images that no longer see each other because the model's own mask is left out."""
    from transformers.masking_utils import create_causal_mask

    net, zeros = build("Llama", "megacp"), torch.zeros(1, TOKENS).long()
    text = zeros[0].numpy()
    embeddings, positions = torch.zeros(1, TOKENS, 32), torch.arange(TOKENS)[None]
    arguments = {"config": net.config, "past_key_values": None, "attention_mask": None}
    for ids, refused in ((zeros, True), (Metadata(text, text, text, positions[0].numpy()), False)):
        x, p = embeddings.clone(), positions.clone()
        block = context_parallel(TWO, buffers=[x, p, zeros], buffer_seq_dims=[1, 1, 1], document_ids=ids)
        with pytest.raises(ValueError, match="no attention was called") as caught, block:
            assert create_causal_mask(inputs_embeds=x, position_ids=p, **arguments) is None
            if refused:
                with pytest.raises(ValueError, match="Metadata with those spans"):
                    create_causal_mask(inputs_embeds=x, or_mask_function=lambda b, h, q, k: q == q, **arguments)
            else:
                overlay = {"or_mask_function": lambda b, h, q, k: q == q}
                assert create_causal_mask(inputs_embeds=x, position_ids=p, **arguments, **overlay) is None
            assert create_causal_mask(inputs_embeds=x, position_ids=p, block_sequence_ids=zeros, **arguments) is None
        assert ("Metadata with those spans" in str(caught.value)) == refused


def test_outside_of_a_block_the_registered_attention_is_the_stock_one() -> None:
    """Would catch a model that can no longer be evaluated, padded, packed or asked for the next token."""
    ours, stock = build("Qwen3", "megacp"), build("Qwen3", "sdpa")
    ids, positions, _ = tokens_of("packed")
    padding = torch.ones(2, TOKENS)
    padding[0, 45:] = 0
    with torch.no_grad():
        for inputs in ({}, {"position_ids": positions, "use_cache": False}, {"attention_mask": padding}):
            assert torch.equal(ours(ids, **inputs).logits, stock(ids, **inputs).logits)
        steps = [net.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for net in (ours, stock)]
    assert torch.equal(*steps)
    with pytest.raises(ValueError, match="asks for softcap"):
        ours(ids, softcap=30.0)


def test_one_rank_attends_as_the_stock_model_does_with_padding_and_packing() -> None:
    """Would catch a mask of the block that is not the one transformers makes of positions and padding."""
    axis, (ids, positions, documents) = single_axis("cp"), tokens_of("packed")
    with torch.no_grad():
        packed = build("Llama", "sdpa")(ids, position_ids=positions, use_cache=False).logits
        net = build("Llama", "megacp")
        # float64, sums of at most 48 terms
        torch.testing.assert_close(logits_in_a_block(net, documents, axis), packed, rtol=1e-12, atol=1e-12)
        padding = torch.ones(2, TOKENS)
        padding[0, 40:] = 0
        want = build("Llama", "sdpa")(ids, position_ids=positions, attention_mask=padding).logits
        numbers = torch.where(padding.bool(), 0, -1)
        rule = Metadata(numbers.view(-1).numpy(), *torch.zeros(2, 2 * TOKENS).long().numpy(), torch.arange(96).numpy())
        found = logits_in_a_block(net, rule, axis, attention_mask=padding)
        torch.testing.assert_close(found[padding.bool()], want[padding.bool()], rtol=1e-12, atol=1e-12)


def example(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Losses of the example's steps, over the ranks and on one process."""
    path = str(ROOT / "examples" / "hf_context_parallel.py")
    options = argparse.Namespace(steps=1, seq_length=250, transport="p2p", layout="balanced")
    return runpy.run_path(path)["train"](grid(cp=world_size).cp, torch.device("cpu"), options)


@pytest.mark.slow
def test_the_example_has_the_losses_of_one_process() -> None:
    """Would catch an example that no longer runs."""
    for ((sharded, alone),) in run_ranks(example, 2):
        assert abs(sharded - alone) <= 1e-4
