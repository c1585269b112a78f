"""A tiny model folder and a hundred chats in several formats."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch

from tests.huggingface.convert.models import qwen3
from tests.prepare.templates.public import TEMPLATES, write_tokenizer

PAIRS = [(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(100)]


def write_model(folder: Path) -> Path:
    """Write a random Qwen3 with a tokenizer and Qwen's chat template."""
    write_tokenizer(folder, chat_template=TEMPLATES["qwen_25"])
    torch.manual_seed(0)
    model = qwen3(vocab_size=1000, tie_word_embeddings=True, max_position_embeddings=4096)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_messages(folder: Path) -> Path:
    """Write PAIRS as OpenAI's messages."""
    records = []
    for question, answer in PAIRS:
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        records.append({"messages": turns})
    path = folder / "chats.json"
    path.write_text(json.dumps(records))
    return path


def write_sharegpt(folder: Path) -> Path:
    """Write PAIRS in the format of ShareGPT."""
    records = []
    for question, answer in PAIRS:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        records.append({"conversations": turns})
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(records))
    return path


def write_alpaca(folder: Path) -> Path:
    """Write PAIRS in the format of Alpaca."""
    records = []
    for question, answer in PAIRS:
        records.append({"instruction": question, "input": "", "output": answer})
    path = folder / "alpaca.json"
    path.write_text(json.dumps(records))
    return path


def write_csv(folder: Path) -> Path:
    """Write PAIRS as a table with the columns question and answer."""
    path = folder / "pairs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *PAIRS])
    return path


def write_text(folder: Path) -> Path:
    """Write a plain text."""
    path = folder / "book.txt"
    path.write_text("\n".join(f"{question} {answer}" for question, answer in PAIRS) * 20)
    return path
