"""Compare a model's logits and loss on several grids of CPU ranks with those of transformers.

    python examples/logits_with_transformers.py out/smollm2

The row is the first 20 kB of the standard library's argparse module. Both sides compute in float32,
whose relative rounding error is up to 2^-24 = 6e-8. A logit results from about 200 products and
norms, and sums of up to 1,536 terms have errors of about 40 roundings: sqrt(200) x 40 x 6e-8 = 3e-5
of the largest logit. The tolerance is three times this value. The loss is a mean of thousands of
terms whose errors have both signs; its tolerance is 1e-6. The exit status is 1 if a grid differs by
more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megacp.distributed.grid import build_grid
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.step import ParallelModel
from megacp.huggingface.convert.start import open_start
from megacp.training.loop.state import RunState, load_weights
from megacp.verify.spawn import RankPool

LOGITS, LOSS = 1e-4, 1e-6
GRIDS = {
    "one process": {},
    "tp 3": {"tensor_model_parallel_size": 3},
    "cp 2": {"context_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
}


def of_library(folder: Path, text: str, place: Path) -> tuple[PackedBatch, float]:
    """Return the text as a row, and its loss in transformers.

    Write the logits, float32 [tokens, vocabulary], to the file `place`.
    """
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")[
        "input_ids"
    ][0]
    ids = ids[: len(ids) // 12 * 12]  # a multiple of 12, so that no grid needs padding
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            ids[None]
        ).logits[0]
    np.save(place, logits.numpy())
    labels, weights = ids.roll(-1), torch.ones(len(ids))
    weights[-1] = 0  # the last token predicts nothing
    # Use float64, because the float32 sum in torch's cross entropy has an error of 3e-6.
    pieces = zip(*(whole.split(512) for whole in (logits, labels, weights)), strict=True)
    loss = sum(
        (w * torch.nn.functional.cross_entropy(x.double(), y, reduction="none")).sum()
        for x, y, w in pieces
    )
    # One document without branches: every token attends to all earlier tokens of the row.
    leave = np.full(len(ids), len(ids), np.int32)
    row = PackedBatch(
        ids.numpy(), labels.numpy(), weights.numpy(), np.arange(len(ids)), leave, 0 * leave, (0,)
    )
    return row, float(loss) / row.weight_sum


def of_rank(
    rank: int, world_size: int, folder: Path, axes: dict[str, int], row: PackedBatch, place: Path
) -> tuple[float, float]:
    """Return the row's loss on a grid, and the largest difference between this rank's logits and
    those of transformers, as a fraction of the largest logit.
    """
    flags = {
        **axes,
        "load_hf": str(folder),
        "seq_length": len(row),
        "global_batch_size": 1,
        "dtype": "float32",
    }
    config, weights, _ = open_start(with_values(RunConfig(), flags), flags)
    model = ParallelModel(config, build_grid(config.grid_shape(world_size), rank))
    load_weights(model, weights, RunState())
    # The logits file is memory-mapped, so ranks read only the rows that they compare.
    planned, expected, worst = model.plan(row), np.load(place, mmap_mode="r"), [0.0]

    def compare(head: Any, given: tuple[Any, ...], loss: object) -> None:
        logits = head.logits(given[0]).numpy()  # [t, rows of the vocabulary here]
        first = head.table.first
        # The name of a token is its position in the row.
        for ours, number in zip(logits, planned.share.token_names, strict=True):
            worst.append(float(np.abs(ours - expected[number, first : first + len(ours)]).max()))

    # Only the last pipeline stage has the head. Under tp, each rank has a part of the vocabulary.
    if model.chunks[-1].is_last:
        model.chunks[-1].head.register_forward_hook(compare)
    return model.evaluate([planned], row.weight_sum), max(worst) / float(np.abs(expected).max())


def main(folder: Path, characters: int = 20_000) -> int:
    """Print a line for each grid; return 1 if any grid differs."""
    text, same = Path(argparse.__file__).read_text(encoding="utf-8")[:characters], True
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        place = Path(made) / "logits.npy"
        row, loss = of_library(folder, text, place)
        print(
            f"{len(row)} tokens          loss  differs by   logits by\ntransformers{loss:13.8f}",
            flush=True,
        )
        for name, axes in GRIDS.items():
            ranks = max(axes.values(), default=1)
            with RankPool(ranks, max(1, torch.get_num_threads() // ranks)) as pool:
                found = pool.run(of_rank, folder, axes, row, place)
            of_loss, of_logits = abs(found[0][0] - loss) / loss, max(worst for _, worst in found)
            print(f"{name:<12}{found[0][0]:13.8f}{of_loss:12.1e}{of_logits:12.1e}", flush=True)
            same = same and of_loss <= LOSS and of_logits <= LOGITS
    print(
        f"allowed in float32: loss {LOSS:g}, logits {LOGITS:g}: "
        f"{'THE SAME' if same else 'DIFFERENT'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
