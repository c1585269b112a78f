"""Train transformers' Llama with torch's `fully_shard`, on one process or with dp 2.

Nothing is patched. `fully_shard` is applied to each block, then to the whole model. Gradients are
summed instead of averaged: the loss is already divided by the step's number of tokens, and gloo
lacks the scaled sums that `fully_shard` uses by default.
"""

from __future__ import annotations

import torch
from stepping import IGNORED, Train, Work, plain_sums, serve, summed, token_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM


def build(work: Work) -> Train:
    """Return the training step of the model."""
    model = LlamaForCausalLM.from_pretrained(
        work.weights, attn_implementation="sdpa", dtype=torch.float32
    )
    model.config.use_cache = False
    if work.axes["dp"] > 1:
        mesh = init_device_mesh("cpu", (work.axes["dp"],))
        # Shard each block separately, so that only one block is gathered at a time.
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        plain_sums(model)
    model.train()
    optimizer = work.optimizer(model.parameters())

    def train(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        denominator, total = float((labels != IGNORED).sum()), 0.0
        for ids, targets in work.microbatches(tokens, labels):
            loss = token_loss(model(input_ids=ids).logits, targets, denominator)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.adamw["clip_grad"])
        optimizer.step()
        return summed(total, work.world_size)

    return train


if __name__ == "__main__":
    serve(build)
