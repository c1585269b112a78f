"""Train Qwen3-VL with random weights on sharded images and text, with the Trainer of transformers.

    torchrun --standalone --nproc-per-node 2 examples/hf_vlm.py

Compared with ordinary use of the Trainer, only one line is new: `shard_sequences`. Every rank gets
the whole batch from the processor. It runs the vision tower on its own images, and the language
model on its own tokens. On GPUs, configure FSDP2 in the Trainer as usual.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Trainer, TrainingArguments

from megacp.integrations import shard_sequences

IMAGE, TOKENS_OF_IMAGE, PIXELS = 120, 16, 3 * 2 * 4 * 4
"""The id of the image token, the number of merged patches in an image of 8 x 8 patches, and the
number of values in a patch of two frames.
"""


def build() -> Qwen3VLForConditionalGeneration:
    """Return a model with three text layers and two tower layers, whose features are also added in
    the first two text layers.
    """
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
    }
    text |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rope_parameters": rope,
    }
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
    }
    tower |= {
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=tower, **ids)
    )


def rows(count: int, seq_length: int) -> list[dict[str, torch.Tensor]]:
    """Return rows as a processor would, each with a text and an image."""
    found = []
    for _ in range(count):
        ids, kinds = torch.randint(0, 100, (seq_length,)), torch.zeros(seq_length, dtype=torch.long)
        # The image follows ten text tokens. Its tokens have kind 1.
        kinds[10 : 10 + TOKENS_OF_IMAGE] = 1
        ids[kinds == 1] = IMAGE
        patches = torch.randn(4 * TOKENS_OF_IMAGE, PIXELS)
        found.append({"input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": patches})
    return found


def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows of equal length, and concatenate the patches of all images."""
    found = {
        name: torch.stack([row[name] for row in batch])
        for name in ("input_ids", "mm_token_type_ids")
    }
    found["labels"] = found["input_ids"].masked_fill(found["mm_token_type_ids"] == 1, -100)
    found["pixel_values"] = torch.cat([row["pixel_values"] for row in batch])
    return {**found, "image_grid_thw": torch.tensor([[1, 8, 8]] * len(batch))}


def main() -> int:
    """Train for some steps and print the losses, which equal those on one process."""
    parser = argparse.ArgumentParser(
        description="Train a tiny Qwen3-VL on sharded sequences with the Trainer."
    )
    parser.add_argument(
        "--cp-size",
        type=int,
        default=2,
        help="number of ranks that share a row; 1 uses the Trainer unchanged (default: 2)",
    )
    parser.add_argument("--seq-length", type=int, default=99)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default="hf_vlm_out")
    options = parser.parse_args()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
    )
    trainer = Trainer(
        build(), arguments, train_dataset=rows(32, options.seq_length), data_collator=collate
    )
    # The only line that differs from ordinary use of the Trainer.
    if options.cp_size > 1:
        shard_sequences(trainer, options.cp_size)
    trainer.train()
    if trainer.args.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(
            f"losses on {trainer.args.world_size} ranks: "
            f"{', '.join(f'{loss:.4f}' for loss in losses)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
