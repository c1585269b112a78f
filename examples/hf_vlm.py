"""A stock model of text and images trains on a sequence that ranks share: Qwen3-VL with random weights.

    torchrun --standalone --nproc-per-node 2 examples/hf_vlm.py

Every rank has the whole batch, as the processor made it. The tower sees whole images, the language model the tokens of
this rank. The losses are those of one process.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis, GridShape
from megacp.distributed.launch import start, stop, world_from_environment
from megacp.sdpa.context import context_parallel
from megacp.sdpa.loop import shift_labels, sum_gradients
from megacp.sdpa.multimodal import cut_multimodal
from megacp.sdpa.transformers import register_with_transformers

IMAGE, TOKENS_OF_IMAGE, PIXELS = 120, 16, 3 * 2 * 4 * 4
"""The image token, merged patches of an image of 8 x 8 patches, and numbers in a patch of two frames."""


def build(device: torch.device) -> Qwen3VLForConditionalGeneration:
    """Three layers of text and two of a tower, whose features also go into the first two layers of text."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "rope_parameters": rope}
    tower: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    tower |= {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    ids = {"image_token_id": IMAGE, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **ids))
    model.set_attn_implementation(register_with_transformers())
    return model.to(device)


def batch_of(rows: int, seq_length: int, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the processor gives to the model, an image a row, and shifted labels."""
    ids = torch.randint(0, 100, (rows, seq_length))
    kinds = torch.zeros_like(ids)
    kinds[:, 10 : 10 + TOKENS_OF_IMAGE] = 1
    ids[kinds == 1] = IMAGE
    batch = {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(rows * 64, PIXELS),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * rows),
    }
    labels = shift_labels(ids.masked_fill(kinds == 1, -100))
    return {name: x.to(device) for name, x in batch.items()}, labels.to(device)


def loss_of(model: Any, batch: dict[str, torch.Tensor], labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The sum over the tokens of this rank, over the tokens of all ranks."""
    logits = model(**batch, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted


def train(axis: Axis, device: torch.device, steps: int, seq_length: int) -> list[tuple[float, float]]:
    """Losses of each step, over the ranks and on one process; all ranks draw the same weights and data."""
    model = build(device)
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    losses = []
    for _ in range(steps):
        batch, labels = batch_of(2, seq_length, device)
        counted = (labels != -100).sum()
        one = loss_of(alone, batch, labels, counted)
        one.backward()
        block = context_parallel(
            axis,
            buffers=[labels],
            buffer_seq_dims=[1],
            pad_values=[-100],
            transport="kv_exchange",
            layout="balanced",
        )
        with block as context, cut_multimodal(model, context):
            loss = loss_of(model, batch, labels, counted)
            loss.backward()
        sum_gradients(model.parameters(), axis)
        losses.append((all_reduce(loss.detach(), axis).item(), one.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> int:
    """Train and print; 1 when the losses are not those of one process."""
    parser = argparse.ArgumentParser(description="A tiny Qwen3-VL of transformers under context parallelism.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq-length", type=int, default=99)
    options = parser.parse_args()
    grid = start(GridShape(cp=world_from_environment().size))
    try:
        losses = train(grid.cp, grid.device, options.steps, options.seq_length)
    finally:
        stop()
    if grid.rank == 0:
        for step, (sharded, alone) in enumerate(losses, 1):
            print(f"step {step}: loss {sharded:.5f} on {grid.cp.size} ranks, {alone:.5f} on one process")
    return int(any(abs(sharded - alone) > 1e-4 for sharded, alone in losses))


if __name__ == "__main__":
    sys.exit(main())
