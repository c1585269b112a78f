"""Train on packed rows that several ranks share, with the Trainer of transformers.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

The model is a tiny Llama with random weights. A row contains several documents, and position ids
restart at each of them. Compared with ordinary use of the Trainer, only one line is new:
`shard_sequences`. On GPUs, configure FSDP2 in the Trainer as usual.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megacp.integrations import shard_sequences

VOCAB = 512


def rows(count: int, seq_length: int) -> list[dict[str, torch.Tensor]]:
    """Return packed rows.

    The first token of a document has no label, because its predecessor is in another document.
    """
    found = []
    for _ in range(count):
        # Two documents per row, split at a random position.
        cut = int(torch.randint(1, seq_length, ()))
        positions = torch.cat([torch.arange(cut), torch.arange(seq_length - cut)])
        ids = torch.randint(0, VOCAB, (seq_length,))
        found.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(positions == 0, -100),
                "position_ids": positions,
            }
        )
    return found


def main() -> int:
    """Train for some steps and print the losses, which equal those on one process."""
    parser = argparse.ArgumentParser(
        description="Train on sharded sequences with the Trainer of transformers."
    )
    parser.add_argument(
        "--cp-size",
        type=int,
        default=2,
        help="number of ranks that share a row; 1 uses the Trainer unchanged (default: 2)",
    )
    parser.add_argument("--seq-length", type=int, default=250)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default="hf_trainer_out")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
    )
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)),
        arguments,
        train_dataset=rows(32, options.seq_length),
    )
    # The only line that differs from ordinary use of the Trainer.
    if options.cp_size > 1:
        shard_sequences(trainer, options.cp_size)
    trainer.train()
    if trainer.args.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(
            f"losses on {trainer.args.world_size} ranks: "
            f"{', '.join(f'{loss:.5f}' for loss in losses)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
