"""Logits and loss of a model on grids of CPU ranks, beside those of the transformers library: 20 kB of Python as a row.

    python examples/logits_with_transformers.py --model out/smollm2

The text is the beginning of the standard library's argparse. Both compute in float32, which rounds by up to 2^-24 =
6e-8 of a value. A logit passes some 200 matrix products and norms one after another, and sums of up to 1,536 terms err
by some 40 roundings: sqrt(200) x 40 x 6e-8 = 3e-5, `LOGITS` allows three times that. The loss is a mean of thousands of
terms, whose errors have both signs: `LOSS`. The exit status is 1 when a grid differs by more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.batch import PackedBatch
from megacp.core.distributed.grid import build_grid
from megacp.core.models.build import grid_shape
from megacp.core.training.state import RunState, load_weights
from megacp.core.training.step import ParallelModel
from megacp.huggingface.convert.start import open_start
from megacp.verify.spawn import run_ranks

LOGITS, LOSS = 1e-4, 1e-6
"""Largest difference of a logit over the largest logit; difference of the loss over the loss."""
CHARACTERS = 20_000
GRIDS = {"one process": "", "tp 3": "tensor", "cp 2": "context", "pp 2": "pipeline"}
"""The axis that the ranks share the model or the row over."""


def of_library(folder: Path, text: str, place: Path) -> tuple[PackedBatch, float]:
    """The text as a row and its loss; its logits float32 [tokens, vocabulary] are written to `place`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    ids = ids[:, : ids.shape[1] // 12 * 12]  # every grid deals them without padding
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(ids).logits[0]
    np.save(place, logits.numpy())
    # in float64: the sum of torch's float32 cross entropy alone errs by 3e-6 of these
    pieces = zip(logits[:-1].split(512), ids[0, 1:].split(512), strict=True)
    losses = [torch.nn.functional.cross_entropy(x.double(), y, reduction="sum").item() for x, y in pieces]
    tokens = ids[0].numpy()
    weights, leave = np.ones(len(tokens), np.float32), np.full(len(tokens), len(tokens), np.int32)
    weights[-1] = 0  # nothing follows
    labels = np.append(tokens[1:], 0)
    return PackedBatch(tokens, labels, weights, np.arange(len(tokens)), leave, 0 * leave, (0,)), sum(losses) / (
        len(tokens) - 1
    )


def of_rank(rank: int, world_size: int, folder: Path, axis: str, row: PackedBatch, place: Path) -> tuple[float, float]:
    """The loss of the row on a grid, and by how much this rank's part of the logits differs from the library's."""
    flags: dict[str, Any] = {"load_hf": str(folder), "seq_length": len(row), "global_batch_size": 1, "dtype": "float32"}
    flags |= {f"{axis}_{'' if axis == 'context' else 'model_'}parallel_size": world_size} if axis else {}
    config, weights, _ = open_start(with_values(RunConfig(), flags), flags)
    model = ParallelModel(config, build_grid(grid_shape(config, world_size), rank))
    load_weights(model, weights, RunState())
    planned, expected, worst = model.plan(row), np.load(place, mmap_mode="r"), [0.0]

    def compare(head: Any, given: tuple[Any, ...], loss: object) -> None:
        logits = head.logits(given[0]).numpy()  # [t, rows of the vocabulary here]
        column = model.grid.tp.rank * logits.shape[1]
        for number, name in enumerate(planned.share.token_names):  # the place in the row
            theirs = expected[name, column : column + logits.shape[1]]
            worst.append(float(np.abs(logits[number] - theirs).max()))

    if model.chunks[-1].is_last:
        model.chunks[-1].head.register_forward_hook(compare)
    return model.evaluate([planned], row.weight_sum), max(worst) / float(np.abs(expected).max())


def main(argv: Sequence[str] | None = None) -> int:
    """A row for each grid."""
    parser = argparse.ArgumentParser(description="Logits and loss on grids of CPU ranks beside transformers.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder in Hugging Face format")
    folder, same = parser.parse_args(argv).model, True
    text = Path(argparse.__file__).read_text(encoding="utf-8")[:CHARACTERS]
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        place = Path(made) / "logits.npy"
        row, loss = of_library(folder, text, place)
        print(f"{len(row)} tokens of argparse.py\n\n{'':<13}{'loss':>14}{'differs by':>13}{'logits by':>13}")
        print(f"{'transformers':<13}{loss:14.8f}", flush=True)
        for name, axis in GRIDS.items():
            ranks = int(name[-1]) if axis else 1
            found = run_ranks(of_rank, ranks, folder, axis, row, place)
            differences = abs(found[0][0] - loss) / loss, max(worst for _, worst in found)
            print(f"{name:<13}{found[0][0]:14.8f}{differences[0]:13.1e}{differences[1]:13.1e}", flush=True)
            same = same and differences[0] <= LOSS and differences[1] <= LOGITS
    print(f"\nallowed: loss {LOSS:g}, logits {LOGITS:g} (float32): {'THE SAME' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
