"""A bad image that one rank has seen drops its document on all ranks alike, and the step is that of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.vision import LocalVision
from megacp.core.data.decoding import ImageError
from megacp.core.data.images import Pixels
from megacp.core.data.mock import MockDecoder, MockImages
from megacp.core.training.images import image_loading, without_bad_images
from megacp.core.training.loss import agree
from megacp.core.training.step import ParallelModel
from megacp.verify.parity import ParitySetup, microbatches, prepare
from tests.ranks import grid, run_ranks


class SecondItemBroken(MockDecoder):
    """Every second image or video of a pack cannot be decoded."""

    def __init__(self, images: MockImages) -> None:
        super().__init__(images)

    def _refuse(self, data: bytes) -> None:
        if int.from_bytes(data[16:24], "little") % 2:
            raise ImageError("cut short")

    def image(self, data: bytes) -> Pixels:
        self._refuse(data)
        return super().image(data)

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        self._refuse(data)
        return super().video(data, frames)


def setup_of(shape: dict[str, int], world: int) -> ParitySetup:
    flags = {"tp": "tensor", "pp": "pipeline"}
    values = {f"{flags[axis]}_model_parallel_size": size for axis, size in shape.items() if axis in flags}
    values["context_parallel_size"] = shape.get("cp", 1)
    config = with_values(RunConfig(), {**values, "on_bad_image": "skip", "global_batch_size": 4})
    return prepare(config, frozenset(values), model="tiny_vlm", mask="mixed", world_size=world)


def one_step(rank: int, world: int, setup: ParitySetup, shape: dict[str, int], reference: bool) -> tuple[Any, ...]:
    """(replica, fingerprints, what was left out, loss, gradient norm)."""
    config = setup.reference if reference else setup.config
    mine = grid(**shape)
    model = ParallelModel(config, mine)
    assert setup.rules.images is not None
    loading = image_loading(config, mine, model.rows, SecondItemBroken(setup.rules.images))
    read = microbatches(config, setup.rules, 1, model.rows, loading)
    replica = model.rows.data_rank.index
    batches, reasons = without_bad_images(read, mine, replica)
    agreed = agree(batches, mine, replica=replica)
    loss = model.gradients(batches, 1, agreed.denominator)
    norm = model.optimizer.step(1e-3)
    return replica, [batch.fingerprint() for batch in batches], reasons, loss, norm


LARGER = [pytest.param(shape, marks=pytest.mark.slow) for shape in ({"cp": 2, "pp": 2}, {"dp": 2, "cp": 2})]


@pytest.mark.parametrize("shape", [{"cp": 2}, *LARGER], ids=str)
def test_all_ranks_leave_out_the_same_documents_and_train_like_one_process(shape: dict[str, int]) -> None:
    """Would catch a rank that keeps a document which another drops: a hang, or a loss over other tokens."""
    world = 1
    for size in shape.values():
        world *= size
    setup = setup_of(shape, world)
    results = run_ranks(one_step, world, setup, shape, False)
    (expected,) = run_ranks(one_step, 1, setup, {}, True)
    assert expected[2] and all("cut short" in reason for reason in expected[2])
    assert all(result[2] == results[0][2] for result in results) and sorted(results[0][2]) == sorted(expected[2])
    prints = {replica: fingerprints for replica, fingerprints, *_ in results}
    assert all(fingerprints == prints[replica] for replica, fingerprints, *_ in results)
    for _, _, _, loss, norm in results:
        assert abs(loss / expected[3] - 1) < 1e-12 and abs(norm / expected[4] - 1) < 1e-10


def nothing_bad(rank: int, world: int, setup: ParitySetup) -> bool:
    mine = grid(cp=2)
    model = ParallelModel(setup.config, mine)
    assert setup.rules.images is not None
    loading = image_loading(setup.config, mine, model.rows, MockDecoder(setup.rules.images))
    read = microbatches(setup.config, setup.rules, 1, model.rows, loading)
    batches, reasons = without_bad_images(read, mine, 0)
    return not reasons and all(one is other for one, other in zip(read, batches, strict=True))


def test_sound_images_change_nothing() -> None:
    assert all(run_ranks(nothing_bad, 2, setup_of({"cp": 2}, 2)))


def test_pixels_are_narrowed_before_the_step_without_a_change_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch pixels that travel to the device twice as wide as its tower reads them, or lose bits elsewhere."""
    setup = setup_of({}, 1)
    config = with_values(setup.config, {"dtype": "bfloat16", "on_bad_image": "fail"})
    model = ParallelModel(config, grid())
    loading = image_loading(config, model.grid, model.rows, MockDecoder(setup.rules.images))
    batches = microbatches(config, setup.rules, 1, model.rows, loading)
    rows = [model.plan(batch) for batch in batches]
    assert {row.share.vision.patches.dtype for row in rows} == {torch.bfloat16}
    loss, norm = model.gradients(rows, 1, 100.0), model.optimizer.step(0.0)
    monkeypatch.setattr(LocalVision, "packed_for", lambda share, *_: share)
    assert (model.gradients(batches, 1, 100.0), model.optimizer.step(0.0)) == (loss, norm)
    wide = ParallelModel(setup.reference, grid())
    monkeypatch.undo()
    assert wide.plan(batches[0]).share.vision.patches.dtype == torch.float32, "a float64 model gets them as they are"
