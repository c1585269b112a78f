"""From JSONL with images and a video to a training step: ranks compute the step of one process."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel import fused_states, plan, state_plan
from megacp.attention.context_parallel.fused_states import FUSED, fused_convolved
from megacp.attention.ops.recurrence import convolved_delta_rule
from megacp.engine.config.run import RunConfig, flag, flatten, with_values
from megacp.engine.config.yaml_file import to_yaml
from megacp.engine.models import vision
from megacp.engine.rows.vision import LocalVision
from megacp.engine.step.step import ParallelModel
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading
from megacp.training.data.loader import PackedLoader
from megacp.training.data.mock import MockDecoder, MockImages
from megacp.training.data.reader import PackedDataset
from megacp.training.data.vision.decoding import RulesDecoder
from megacp.training.data.vision.rules import ImageError, Pixels
from megacp.training.loop.denominator import agree_on_step
from megacp.training.loop.images import image_loading, without_bad_images
from megacp.training.loop.sources import loader_options, open_sources
from megacp.verify import command as parity
from megacp.verify.cases import MODELS
from megacp.verify.parity import ParitySetup, microbatches, prepare
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.packs.builds import run as build
from tests.ranks import grid, run_ranks
from tests.reference.fused import chunk_gated_delta_rule
from tests.training.data.datasets import damage
from tests.training.runs import train_on_rank


def image_part(width: int, height: int, seed: int) -> dict[str, str]:
    return {
        "type": "image",
        "base64": base64.b64encode(encoded(noise(width, height, seed))).decode(),
    }


def write_dataset(folder: Path) -> Path:
    """Return records with one to three images and answers as branches, one with a video, some text."""
    records: list[dict[str, Any]] = []
    for i in range(10):
        images = [image_part(16 + 4 * j, 12 + 3 * i, 10 * i + j) for j in range(1 + i % 3)]
        answers = [f" answer {i}", f" another {i}"]
        records.append(
            {"content": [{"type": "text", "text": "look "}, *images], "branches": answers}
        )
        records.append({"text": f"nothing but text {i} " * 4})
    movie = base64.b64encode(video(40)).decode()
    records.append(
        {"content": [{"type": "video", "base64": movie}, {"type": "text", "text": "it moves"}]}
    )
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    build([source], folder / "packed", image_rules=TINY, seq_length=512, cp_degrees=(1, 2))
    return folder / "packed"


def config_for(data: Path, **values: Any) -> RunConfig:
    sizes = {**MODELS["tiny_vlm"], "vocab_size": 0}
    run = {
        "data_path": str(data),
        "seq_length": 512,
        "dtype": "float64",
        "global_batch_size": 6,
        "num_workers": 2,
    }
    return with_values(RunConfig(), {**sizes, **run, "cp_comm_type": "p2p", **values})


def first_step(rank: int, world: int, config: RunConfig, shape: dict[str, int]) -> tuple[Any, ...]:
    """Return (loss, gradient norm, strategies, decoded patches, number of dropped documents)."""
    config, sources = open_sources(config)
    mine = grid(**shape)
    model = ParallelModel(config, mine)
    images = image_loading(config, mine, model.rows, sources.decoder)
    rows = model.rows
    with PackedLoader(
        sources.train, loader_options(config, rows.packs), rows.data_rank, 0, images
    ) as loader:
        read = loader.next_step()
    batches, reasons = without_bad_images(read, mine, rows.data_rank.index)
    agreed = agree_on_step(batches, mine, replica=rows.data_rank.index)
    loss = model.gradients(batches, 1, agreed.denominator)
    norm = model.optimizer.step(1e-3)
    decoded = sum(len(batch.vision.patches) for batch in batches if batch.vision is not None)
    strategies = {
        batch.vision.strategy
        for batch in batches
        if batch.vision is not None and batch.vision.num_crops
    }
    return loss, norm, strategies, decoded, reasons


def test_a_stored_dataset_is_decoded_by_ranks_as_by_one_process(tmp_path: Path) -> None:
    dataset = PackedDataset(write_dataset(tmp_path))
    decoder = RulesDecoder(TINY)
    seen_video = False
    for i in range(len(dataset)):
        packs = [dataset.pack(i)]
        batch = collate(packs, loading=ImageLoading(decoder))
        whole = batch.vision
        assert whole is not None
        if not whole.num_crops:
            continue
        assert whole.strategy == "stored"
        for ranks in (2, 3):
            parts = [
                collate(packs, loading=ImageLoading(decoder, r, ranks)).vision for r in range(ranks)
            ]
            assert all(part is not None for part in parts)
            patches = np.concatenate([part.patches for part in parts if part is not None])
            assert np.array_equal(patches, whole.patches)
            assert {part.strategy for part in parts if part} == {
                "stored" if ranks == 2 else "computed"
            }
        assert packs[0].images is not None
        frames = packs[0].images.units["frame"]
        seen_video |= bool((frames >= 0).sum() > 5)
        # exactly the tokens to which the transformers library's processor gives token type 1
        assert np.array_equal(batch.span > 0, np.isin(batch.tokens, list(TINY.token_ids.values())))
    assert seen_video


LARGER = pytest.param({"cp": 2, "pp": 2}, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"cp": 2}, LARGER], ids=str)
def test_a_step_on_a_stored_dataset_is_that_of_one_process(
    tmp_path: Path, shape: dict[str, int]
) -> None:
    data = write_dataset(tmp_path)
    (expected,) = run_ranks(first_step, 1, config_for(data), {})
    grid_flags = {
        "context_parallel_size": shape["cp"],
        "pipeline_model_parallel_size": shape.get("pp", 1),
    }
    ranks = run_ranks(
        first_step, int(np.prod(list(shape.values()))), config_for(data, **grid_flags), shape
    )
    assert expected[2] == {"stored"} and expected[3] > 4
    assert sum(rank[3] for rank in ranks) == expected[3], (
        "each crop is decoded once, on the first stage"
    )
    for loss, norm, strategies, _, _ in ranks:
        assert strategies == {"stored"}
        assert abs(loss / expected[0] - 1) < 1e-12 and abs(norm / expected[1] - 1) < 1e-10


@pytest.mark.slow
def test_a_damaged_image_ends_the_run_with_the_flag_that_leaves_its_document_out(
    tmp_path: Path,
) -> None:
    data = write_dataset(tmp_path)
    for path in data.glob("shard_*/images.bin"):
        stored = path.read_bytes()
        # change the pixel data of every PNG; the headers still have the right sizes
        for place in range(len(stored)):
            if stored[place : place + 4] == b"IDAT":
                damage(path, place + 6, b"\xff" * 8)
    with pytest.raises(
        Exception, match=r"record of .*records.jsonl at byte \d+: image \d+: .*--on-bad-image skip"
    ):
        run_ranks(first_step, 2, config_for(data, context_parallel_size=2), {"cp": 2})


def flags_of(config: RunConfig, folder: Path) -> list[str]:
    """Return the command line of all values that differ from the defaults."""
    folder.mkdir()
    defaults = flatten(RunConfig())
    words = ["--log-file", str(folder / "log.jsonl")]
    for name, value in flatten(config).items():
        if value != defaults[name]:
            values = value if isinstance(value, tuple) else [value]
            words += [flag(name)] if value is True else [flag(name), *map(str, values)]
    return words


@pytest.mark.slow
def test_a_run_tells_how_images_are_dealt_what_it_left_out_and_has_the_losses_of_one_process(
    tmp_path: Path,
) -> None:
    data = write_dataset(tmp_path)
    path = sorted(data.glob("shard_*/images.bin"))[0]
    damage(path, path.read_bytes().index(b"IDAT") + 6, b"\xff" * 8)
    values: dict[str, Any] = {"on_bad_image": "skip", "train_iters": 3}
    values |= {"valid_data_path": str(data), "eval_interval": 3, "eval_iters": 2}
    runs = []
    for ranks in (1, 2):
        log = tmp_path / f"{ranks}.jsonl"
        config = config_for(data, context_parallel_size=ranks, log_file=str(log), **values)
        assert run_ranks(train_on_rank, ranks, config) == [0] * ranks
        runs.append([json.loads(line) for line in log.read_text().splitlines()])
    figures = [[row["loss"] for row in rows if "loss" in row] for rows in runs]
    assert len(figures[0]) == 4
    left_out = [
        [(row["step"], row["text"]) for row in rows if row["kind"] == "note"] for rows in runs
    ]
    assert left_out[0] and left_out[0] == left_out[1]
    assert all("dropped a document: pack 0, record of" in text for _, text in left_out[0])
    np.testing.assert_allclose(figures[1], figures[0], rtol=1e-9)


def test_a_model_that_does_not_fit_the_images_is_refused_with_the_flags(tmp_path: Path) -> None:
    data = write_dataset(tmp_path)
    with pytest.raises(
        ValueError,
        match="contains images, but the model has no vision tower: set --vision-num-layers",
    ):
        open_sources(config_for(data, vision_num_layers=0))
    with pytest.raises(
        ValueError, match="--vision-image-size 16 --vision-patch-size 4 or rebuild the dataset"
    ):
        open_sources(config_for(data, vision_image_size=32))
    with pytest.raises(ValueError, match="--additional-vocab-size to at least 8"):
        open_sources(config_for(data, additional_vocab_size=4))


@pytest.mark.slow
def test_a_parity_check_takes_the_stored_images_and_keeps_their_patch_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path)
    pixels = {name: MODELS["tiny_vlm"][name] for name in ("vision_image_size", "vision_patch_size")}
    large = with_values(
        RunConfig(), {**pixels, "vision_num_layers": 25, "hidden_size": 2048, "num_layers": 12}
    )
    values = {
        "data_path": str(data),
        "seq_length": 512,
        "additional_vocab_size": 8,
        "context_parallel_size": 2,
    }
    values["untie_embeddings_and_output_weights"] = True
    (tmp_path / "run.yaml").write_text(to_yaml(with_values(large, values)))
    assert parity.main(["--config", str(tmp_path / "run.yaml"), "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"packs of {data}" in printed and "3 vision layers" in printed and "THE SAME" in printed
    assert "--vision-patch-size" not in printed


class SecondItemBroken(MockDecoder):
    """Raise ImageError for every second image or video of a pack."""

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
    values = {
        f"{flags[axis]}_model_parallel_size": size for axis, size in shape.items() if axis in flags
    }
    values["context_parallel_size"] = shape.get("cp", 1)
    config = with_values(RunConfig(), {**values, "on_bad_image": "skip", "global_batch_size": 4})
    return prepare(config, frozenset(values), model="tiny_vlm", mask="mixed", world_size=world)


def one_step(
    rank: int, world: int, setup: ParitySetup, shape: dict[str, int], reference: bool
) -> tuple[Any, ...]:
    """Return (replica, fingerprints, dropped documents, loss, gradient norm)."""
    config = setup.reference if reference else setup.config
    mine = grid(**shape)
    model = ParallelModel(config, mine)
    assert setup.rules.images is not None
    loading = image_loading(config, mine, model.rows, SecondItemBroken(setup.rules.images))
    read = microbatches(config, setup.rules, 1, model.rows, loading)
    replica = model.rows.data_rank.index
    batches, reasons = without_bad_images(read, mine, replica)
    agreed = agree_on_step(batches, mine, replica=replica)
    loss = model.gradients(batches, 1, agreed.denominator)
    norm = model.optimizer.step(1e-3)
    return replica, [batch.fingerprint() for batch in batches], reasons, loss, norm


@pytest.mark.parametrize(
    "shape", [{"cp": 2}, pytest.param({"dp": 2, "cp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_all_ranks_leave_out_the_same_documents_and_train_like_one_process(
    shape: dict[str, int],
) -> None:
    world = int(np.prod(list(shape.values())))
    setup = setup_of(shape, world)
    results = run_ranks(one_step, world, setup, shape, False)
    (expected,) = run_ranks(one_step, 1, setup, {}, True)
    assert expected[2] and all("cut short" in reason for reason in expected[2])
    assert all(result[2] == results[0][2] for result in results) and sorted(
        results[0][2]
    ) == sorted(expected[2])
    prints = {replica: fingerprints for replica, fingerprints, *_ in results}
    assert all(fingerprints == prints[replica] for replica, fingerprints, *_ in results)
    for _, _, _, loss, norm in results:
        assert abs(loss / expected[3] - 1) < 1e-12 and abs(norm / expected[4] - 1) < 1e-10


def test_pixels_are_narrowed_before_the_step_without_a_change_of_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert wide.plan(batches[0]).share.vision.patches.dtype == torch.float32, (
        "a float64 model gets them as they are"
    )


def test_a_step_works_out_nothing_that_the_loader_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return tiles of tokens and of patches, places of patches, levels and chunks of states."""
    monkeypatch.setitem(FUSED, (convolved_delta_rule, "cpu", torch.float64), fused_convolved)
    monkeypatch.setattr(fused_states, "flash_linear_attention", lambda: chunk_gated_delta_rule)
    setup = prepare(
        with_values(RunConfig(), {"on_bad_image": "fail"}), (), model="tiny_qwen3_5", mask="mixed"
    )
    config = with_values(setup.config, {"num_layers": 2, "linear_attention_freq": "2"})
    model = ParallelModel(config, grid())
    loading = image_loading(config, model.grid, model.rows, MockDecoder(setup.rules.images))
    (batch, *_) = microbatches(config, setup.rules, 1, model.rows, loading)
    row, refuse = model.plan(batch), mock.Mock(side_effect=AssertionError("worked out in the step"))
    places = (
        (plan, "tile_table"),
        (state_plan, "segments_of"),
        (fused_states, "chunk_places"),
        (vision, "patch_places"),
    )
    for module, name in places:
        monkeypatch.setattr(module, name, refuse)
    assert len(row.share.vision.patches) and model.gradients([row], 1, 100.0) > 0
