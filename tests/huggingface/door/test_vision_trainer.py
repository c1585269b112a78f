"""The stock Trainer with models of text and images on several ranks gives the weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.huggingface.door.accelerate import shard_sequences
from tests.huggingface.door.test_accelerate import STEPS, TOKENS, Found, launched, of_trainer, same
from tests.huggingface.door.test_multimodal import IMAGE, MODELS, TOLERANCE, build
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TILE = 3 * 2 * 4 * 4
"""Numbers of a patch of the Qwen towers."""


def rows(name: str, count: int) -> list[dict[str, Any]]:
    """Rows of unequal lengths with no, one or two images."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        length = int(torch.randint(40, TOKENS, (), generator=generator))
        ids, kinds = torch.randint(0, 64, (length,), generator=generator), torch.zeros(length, dtype=torch.long)
        sizes = [(1, 4, 4), (1, 4, 8)][: number % 3]
        begin = 3
        for _, height, width in sizes:
            tokens = 4 if name == "Gemma3" else height * width // 4
            kinds[begin : begin + tokens] = 1
            begin += tokens + 5
        patches = sum(height * width for _, height, width in sizes)
        shape = (len(sizes), 3, 16, 16) if name == "Gemma3" else (patches, TILE)
        pixels = torch.randn(shape, generator=generator).double()
        found.append({"ids": ids.masked_fill(kinds == 1, IMAGE), "kinds": kinds, "pixels": pixels, "sizes": sizes})
    return found


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As a processor does: text is filled up, images stand end to end."""
    pads = [TOKENS - len(row["ids"]) for row in batch]

    def filled(values: list[Tensor], pad: int) -> Tensor:
        return torch.stack([F.pad(x, (0, n), value=pad) for x, n in zip(values, pads, strict=True)])

    kinds = filled([row["kinds"] for row in batch], 0)
    found = {
        "input_ids": filled([row["ids"] for row in batch], 0),
        "attention_mask": filled([torch.ones_like(row["ids"]) for row in batch], 0),
        "labels": filled([row["ids"].masked_fill(row["kinds"] == 1, -100) for row in batch], -100),
    }
    pixels = torch.cat([row["pixels"] for row in batch])
    grids = [size for row in batch for size in row["sizes"]]
    named = {"token_type_ids": kinds} if pixels.dim() == 4 else {"mm_token_type_ids": kinds}
    if not grids:  # as a processor that is given no image
        return found | named
    named |= (
        {"pixel_values": pixels}
        if pixels.dim() == 4
        else {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    )
    return found | named


def with_images(rank: int, world_size: int, name: str, folder: str, options: dict[str, Any]) -> Found:
    """The stock Trainer; `cp_size` is no option of it."""
    from transformers import Trainer, TrainingArguments

    options = {**options}
    cp_size = options.pop("cp_size", None)
    with launched(rank, world_size):
        backend = "gloo" if world_size > 1 else None
        arguments = TrainingArguments(folder, remove_unused_columns=False, ddp_backend=backend, **{**STEPS, **options})
        data = {"train_dataset": rows(name, 13), "eval_dataset": rows(name, 7), "data_collator": collate}
        trainer = Trainer(build(name, "sdpa"), arguments, **data)
        if cp_size:
            shard_sequences(trainer, cp_size)
        return of_trainer(trainer)


@pytest.mark.parametrize("name", MODELS)
def test_the_stock_trainer_trains_a_model_that_sees_on_two_ranks_as_on_one(tmp_path: Path, name: str) -> None:
    """Two of the models divide their loss by a batch's tokens; would catch a mean over one rank's, and lost images."""
    options = {"gradient_accumulation_steps": 2}
    (want,) = run_ranks(with_images, 1, name, str(tmp_path), options, timeout=120)
    for found in run_ranks(with_images, 2, name, str(tmp_path), {**options, "cp_size": 2}, timeout=120):
        same(found, want, max(1e-12, TOLERANCE[name]))


def of_other_rows(rank: int, world_size: int, folder: str) -> str:
    """What is said of a step whose ranks hold other rows."""
    from transformers import Trainer, TrainingArguments

    with launched(rank, world_size):
        arguments = TrainingArguments(folder, remove_unused_columns=False, ddp_backend="gloo", **STEPS)
        trainer = Trainer(build("Qwen2_5_VL", "sdpa"), arguments)
        shard_sequences(trainer, 2)
        with pytest.raises(ValueError) as error:
            trainer._prepare_context_parallel_inputs(None, collate(rows("Qwen2_5_VL", 2 + rank)[-2:]))
        return str(error.value)


def test_ranks_with_other_images_and_rows_are_refused(tmp_path: Path) -> None:
    """Would catch a loader that deals to each rank, whose images would become those of another row."""
    for said in run_ranks(of_other_rows, 2, str(tmp_path)):
        assert "the 2 ranks that share a row hold other rows" in said


def test_processes_with_rows_of_their_own_are_averaged_as_the_trainer_does(tmp_path: Path) -> None:
    """dp 2 x cp 2 is what two processes without context parallelism are; would catch a sum over dp."""
    want = run_ranks(with_images, 2, "Qwen2_5_VL", str(tmp_path), {}, timeout=120)[0]
    for found in run_ranks(with_images, 4, "Qwen2_5_VL", str(tmp_path), {"cp_size": 2}, timeout=120):
        same((found[0], found[1], want[2]), want, 1e-12)
