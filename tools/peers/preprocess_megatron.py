"""Tokenize text like Megatron's preprocessing: a pool of processes, with one tokenizer call per
JSON line.

The writer is megatron-core's. No package contains the loop around it, so this script replicates the
loop of Megatron's tool: workers receive chunks of 32 lines and return ids as lists. With
`--batch N`, the tokenizer processes N texts per call. The script prints the seconds from the start
of the pool until the files are closed, excluding the imports of torch and megatron-core.
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
    """The state of a worker: the tokenizer, and the id that ends a document."""

    tokenizer: Tokenizer
    end: int

    @classmethod
    def start(cls, path: str) -> None:
        """Load the tokenizer, once in each worker."""
        cls.tokenizer = Tokenizer.from_file(path)
        cls.end = cls.tokenizer.token_to_id(END)

    @classmethod
    def encode(cls, lines: list[bytes]) -> list[list[int]]:
        """Return the token ids of each record's text."""
        texts = [json.loads(line)["text"] for line in lines]
        if len(texts) == 1:
            return [[*cls.tokenizer.encode(texts[0]).ids, cls.end]]
        return [[*found.ids, cls.end] for found in cls.tokenizer.encode_batch(texts)]


def batches(path: Path, size: int) -> Iterator[list[bytes]]:
    """Yield the lines of a file in batches of `size`."""
    with path.open("rb") as lines:
        while batch := list(itertools.islice(lines, size)):
            yield batch


def main() -> None:
    """Write `OUTPUT.bin` and `OUTPUT.idx`."""
    parser = argparse.ArgumentParser(description="Preprocess text like Megatron, for a comparison.")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="path of a tokenizer.json")
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
