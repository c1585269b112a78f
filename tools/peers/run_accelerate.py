"""Train transformers' Llama with Accelerate 1.15: DDP or FSDP2 at dp 2, or context parallelism with
FSDP2.

Patches: Accelerate enables FSDP2 only on accelerators, so with FSDP2 this script pretends to have
several of them. Ring attention uses the CPU kernel (cpu_ring.py). DDP and FSDP2 divide gradients by
the number of ranks, so losses are multiplied by this number.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from cpu_ring import allow_cpu_kernel
from stepping import IGNORED, Train, Work, serve, summed, token_loss
from transformers import AutoModelForCausalLM


def accelerator_of(work: Work) -> Accelerator:
    """Return an Accelerator for the grid."""
    if work.options.get("data") != "shard" and work.axes["cp"] == 1:
        return Accelerator(cpu=True)
    allow_cpu_kernel()
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    sizes = (
        {"cp_size": work.axes["cp"]} if work.axes["cp"] > 1 else {"dp_shard_size": work.axes["dp"]}
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))


def build(work: Work) -> Train:
    """Return the training step of the prepared model."""
    accelerator = accelerator_of(work)
    model = AutoModelForCausalLM.from_pretrained(
        work.weights, attn_implementation="sdpa", dtype=torch.float32
    )
    model.config.use_cache = False
    model, optimizer = accelerator.prepare(model, work.optimizer(model.parameters()))
    model.train()
    ranks = work.world_size if dist.get_world_size() > 1 else 1
    positions = torch.arange(work.length)[None]

    def backward(ids: torch.Tensor, targets: torch.Tensor, denominator: float) -> float:
        ids, targets, extra = ids.clone(), targets.clone(), {}
        # Without cp, position ids would only make transformers look for packed sequences.
        if work.axes["cp"] > 1:
            extra["position_ids"] = positions.repeat(len(ids), 1)
        buffers = [ids, targets, *extra.values()]
        with accelerator.maybe_context_parallel(
            buffers, [1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            # Inside this block, Accelerate shards the buffers across cp.
            loss = token_loss(model(input_ids=ids, **extra).logits, targets, denominator)
            accelerator.backward(loss * ranks)
        return loss.item()

    def train(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        denominator, total = float((labels != IGNORED).sum()), 0.0
        parts = work.microbatches(tokens, labels)
        # Gradients are exchanged only in the last microbatch.
        for ids, targets in parts[:-1]:
            with accelerator.no_sync(model):
                total += backward(ids, targets, denominator)
        total += backward(*parts[-1], denominator)
        accelerator.clip_grad_norm_(model.parameters(), work.adamw["clip_grad"])
        optimizer.step()
        return summed(total, work.world_size)

    return train


if __name__ == "__main__":
    serve(build)
