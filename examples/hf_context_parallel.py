"""Train an unmodified transformers model on sharded sequences, and compare its losses with those on
one process.

    torchrun --standalone --nproc-per-node 2 examples/hf_context_parallel.py --transport kv_exchange
    --layout balanced

The model is a tiny Llama with random weights, and a row contains packed documents.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis
from megacp.distributed.shape import GridShape
from megacp.integrations import context_parallel, register_with_transformers
from megacp.integrations.loop import shift_labels, sum_gradients
from megacp.training.start.launch import join, rendezvous, stop, world_from_environment

VOCAB = 512
DOCUMENTS = (0.1, 0.55, 0.35)
"""Length of each document as a share of the row."""


def batch(seq_length: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return token ids, position ids, shifted labels and document ids, each `[1, S]`.

    They are the same on every rank.
    """
    # The last document gets the tokens that remain after rounding.
    lengths = [int(seq_length * share) for share in DOCUMENTS]
    lengths[-1] = seq_length - sum(lengths[:-1])
    ids = torch.randint(0, VOCAB, (1, seq_length))
    # Position ids restart in each document; document ids number the documents.
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])[None]
    return tuple(x.to(device) for x in (ids, positions, shift_labels(ids, documents), documents))


def summed_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss summed over this rank's tokens.

    The caller divides it by the number of labels on all ranks.
    """
    logits = model(ids, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sharded_step(
    model: LlamaForCausalLM, data: tuple[torch.Tensor, ...], axis: Axis, options: argparse.Namespace
) -> torch.Tensor:
    """Run the forward and backward pass on the ranks of `axis`; return the whole row's loss."""
    ids, positions, labels, documents = data
    counted = (labels != -100).sum()
    # Inside the block, each buffer contains only the tokens of this rank. Shorter parts are padded.
    with context_parallel(
        axis,
        model=model,
        buffers=[ids, positions, labels],
        buffer_seq_dims=[1, 1, 1],
        pad_values=[0, 0, -100],
        document_ids=documents,
        transport=options.transport,
        layout=options.layout,
    ):
        loss = summed_loss(model, ids, positions, labels) / counted
        loss.backward()
    # Each rank has its tokens' gradient. The loss is already divided by all labels, so sum them.
    sum_gradients(model.parameters(), axis)
    return all_reduce(loss.detach(), axis)


def one_process_step(model: LlamaForCausalLM, data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Run the same step on the whole row.

    Outside a `context_parallel` block, the registered attention calls that of transformers.
    """
    ids, positions, labels, _ = data
    loss = summed_loss(model, ids, positions, labels) / (labels != -100).sum()
    loss.backward()
    return loss.detach()


def train(
    axis: Axis, device: torch.device, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Return each step's losses on all ranks and on one process.

    All ranks draw the same random weights and data.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
    }
    sizes |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "attn_implementation": register_with_transformers(),
    }
    # transformers' wrapper hides the type of Module.to.
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device)  # type: ignore[arg-type]
    # As a reference, each rank also trains a copy of the model on the whole row.
    alone = copy.deepcopy(model)
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    losses = []
    for _ in range(options.steps):
        data = batch(options.seq_length, device)
        losses.append(
            (sharded_step(model, data, axis, options).item(), one_process_step(alone, data).item())
        )
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> int:
    """Train and print the losses; return 1 if they differ from those on one process."""
    parser = argparse.ArgumentParser(
        description="Train a tiny transformers Llama with context parallelism."
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N")
    parser.add_argument(
        "--seq-length",
        type=int,
        default=250,
        metavar="S",
        help="tokens per row, padded if not divisible by the number of ranks (default: 250)",
    )
    parser.add_argument(
        "--transport",
        choices=[row.name for row in TRANSPORTS.values() if not row.needs_sizes],
        default="p2p",
    )
    parser.add_argument("--layout", choices=list(LAYOUTS), default="zigzag")
    options = parser.parse_args()
    world = world_from_environment()
    grid = join(rendezvous(world, 60.0), GridShape(cp=world.size))
    try:
        losses = train(grid.cp, grid.device, options)
    finally:
        stop()
    if grid.rank == 0:
        for step, (sharded, alone) in enumerate(losses, 1):
            print(
                f"step {step}: loss {sharded:.5f} on {grid.cp.size} ranks, {alone:.5f} on one "
                "process"
            )
    return int(any(abs(sharded - alone) > 1e-4 for sharded, alone in losses))


if __name__ == "__main__":
    sys.exit(main())
