"""Text to tokens as Megatron's preprocessing does: a pool of processes, a JSON line and a call of
the tokenizer each.

The writer is megatron-core's own. The loop around it stands in no package: it is that of Megatron's
tool, told again. Lines go to the workers by chunks of 32, and ids come back as lists. `--batch N`
gives the tokenizer N texts at once. Prints the seconds from before the pool starts to the closed
files: importing torch and megatron-core is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer

CHUNK = 32
END = "<|endoftext|>"


class Encoder:
    """What a worker holds: the tokenizer and the id that ends a document."""

    tokenizer: Tokenizer
    end: int

    @classmethod
    def start(cls, path: str) -> None:
        """Called once in each worker."""
        cls.tokenizer = Tokenizer.from_file(path)
        cls.end = cls.tokenizer.token_to_id(END)

    @classmethod
    def encode(cls, lines: list[bytes]) -> list[list[int]]:
        """The ids of some records' texts."""
        texts = [json.loads(line)["text"] for line in lines]
        if len(texts) == 1:
            return [[*cls.tokenizer.encode(texts[0]).ids, cls.end]]
        return [[*found.ids, cls.end] for found in cls.tokenizer.encode_batch(texts)]


def batches(path: Path, size: int) -> Iterator[list[bytes]]:
    """The lines of a file, some at a time."""
    with path.open("rb") as lines:
        while batch := list(itertools.islice(lines, size)):
            yield batch


def main() -> None:
    """Write `OUTPUT.bin` and `OUTPUT.idx`."""
    parser = argparse.ArgumentParser(
        description="Megatron's way of preprocessing text, to be measured beside ours."
    )
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    vocabulary = Tokenizer.from_file(arguments.tokenizer).get_vocab_size()
    writer = IndexedDatasetBuilder(f"{arguments.output}.bin", dtype=DType.optimal_dtype(vocabulary))
    with multiprocessing.Pool(arguments.workers, Encoder.start, (arguments.tokenizer,)) as pool:
        for documents in pool.imap(
            Encoder.encode, batches(arguments.input, arguments.batch), CHUNK
        ):
            for ids in documents:
                writer.add_document(np.asarray(ids), [len(ids)])
    writer.finalize(f"{arguments.output}.idx")
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    main()
