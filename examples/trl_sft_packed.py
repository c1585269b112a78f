"""Train with TRL's SFTTrainer, packing and LoRA, on rows that several ranks share.

    torchrun --standalone --nproc-per-node 2 examples/trl_sft_packed.py

TRL 1.16 does not support packing with its own ring attention (`cp_size`). The model is a tiny Llama
with random weights, and the data are random ids. One process with `--cp-size 1` gives the same
losses.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from megacp.integrations import shard_sequences

VOCAB = 512


def documents(count: int) -> Dataset:
    """Return tokenized documents of varying lengths, which the trainer packs."""
    lengths = torch.randint(10, 120, (count,)).tolist()
    return Dataset.from_list(
        [{"input_ids": torch.randint(2, VOCAB, (n,)).tolist()} for n in lengths]
    )


def main() -> int:
    """Train for some steps and print the losses."""
    parser = argparse.ArgumentParser(
        description="Train on sharded sequences with SFTTrainer, packing and LoRA."
    )
    parser.add_argument(
        "--cp-size",
        type=int,
        default=2,
        help="number of ranks that share a row; 1 uses the trainer unchanged (default: 2)",
    )
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default="trl_sft_out")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_attention_heads=8, eos_token_id=1, **sizes)
    )
    # The documents are already token ids; the trainer needs only the special tokens.
    words = models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2")
    arguments = SFTConfig(
        options.output,
        packing=True,
        max_length=options.seq_length,
        max_steps=options.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=documents(200),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), eos_token="w1", pad_token="w0"
        ),
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    # The only line that differs from ordinary use of SFTTrainer.
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
