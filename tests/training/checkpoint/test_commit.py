"""The commit protocol in one process and on two ranks: commits, errors, and surviving checkpoints."""

from __future__ import annotations

import logging
import math
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from megacp.distributed.grid import Axis, ProcessGrid, single_axis
from megacp.engine.config.training import TrainingConfig
from megacp.engine.data_parallel.boxes import TensorBox, boxes_to_load, boxes_to_save
from megacp.engine.data_parallel.buckets import FlatBuckets
from megacp.engine.layers.table import DATA
from megacp.engine.optim.sharded import ShardedOptimizer
from megacp.training.checkpoint import commit
from megacp.training.checkpoint.commit import LoadedCheckpoint, SaveError, load_checkpoint
from megacp.training.checkpoint.directory import LATEST_FILE, MANIFEST_FILE, committed
from tests.ranks import grid, run_ranks
from tests.reference.sharded_toy import Toy, global_shapes, local_of, values
from tests.training.checkpoint.saves import save_checkpoint

WORLD = single_axis("world")


def boxes(value: float, world: Axis = WORLD, name: str = "model.w") -> list[TensorBox]:
    """Return one row per rank of a global `[size, 3]` tensor."""
    return [TensorBox(name, (world.size, 3), (world.rank, 0), torch.full((1, 3), float(value)))]


def save(root: Path, step: int, world: Axis = WORLD, keep_last: int = 0) -> Path:
    extra = {"samples": 10 * step}
    return save_checkpoint(
        root,
        step,
        boxes(step, world),
        extra=extra,
        config_yaml=f"step: {step}\n",
        world=world,
        keep_last=keep_last,
    )


def value(loaded: LoadedCheckpoint) -> float:
    target = boxes(-1.0, loaded.world)
    loaded.read(target)
    assert (target[0].tensor == target[0].tensor[0, 0]).all()
    return target[0].tensor[0, 0].item()


def test_a_saved_checkpoint_comes_back_with_everything(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    assert path == tmp_path / "step_0000100"
    assert (tmp_path / LATEST_FILE).read_text() == "step_0000100\n"
    loaded = load_checkpoint(tmp_path, WORLD)
    assert (loaded.step, loaded.extra, loaded.path, loaded.passed_over) == (
        100,
        {"samples": 1000},
        path,
        (),
    )
    assert loaded.config_yaml == "step: 100\n"
    assert value(loaded) == 100
    assert set(loaded.manifest.files) | {MANIFEST_FILE} == {p.name for p in path.iterdir()}
    assert [(n, t.tolist()) for n, t in loaded.whole_tensors()] == [("w", [[100.0] * 3])]
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST_FILE, "step_0000100"]


def test_latest_is_loaded_and_a_step_directory_can_be_asked_for(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert value(load_checkpoint(tmp_path, WORLD)) == 3
    assert value(load_checkpoint(tmp_path / "step_0000001", WORLD)) == 1
    (tmp_path / LATEST_FILE).write_text("step_0000002\n")
    assert value(load_checkpoint(tmp_path, WORLD)) == 2
    for content in ("../elsewhere", "step_0000009", ""):
        (tmp_path / LATEST_FILE).write_text(content)
        assert value(load_checkpoint(tmp_path, WORLD)) == 3


def test_the_newest_is_the_last_written_not_the_highest_step(tmp_path: Path) -> None:
    for step in (1, 3, 2):
        save(tmp_path, step)
    (tmp_path / LATEST_FILE).unlink()
    assert load_checkpoint(tmp_path, WORLD).step == 2
    assert [p.name[-1] for p in committed(tmp_path)] == ["2", "3", "1"]


def test_a_directory_is_never_written_to_twice(tmp_path: Path) -> None:
    first = save(tmp_path, 5)
    before = {p.name: p.read_bytes() for p in first.iterdir()}
    second = save(tmp_path, 5)
    assert second.name == "step_0000005.2"
    assert {p.name: p.read_bytes() for p in first.iterdir()} == before
    assert load_checkpoint(tmp_path, WORLD).path == second


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [_truncate, _flip, Path.unlink])
@pytest.mark.parametrize(
    "name", ["index.json", "rank_00000.safetensors", "config.yaml", MANIFEST_FILE]
)
def test_damage_to_any_file_is_named_and_the_previous_checkpoint_is_loaded(
    tmp_path: Path, name: str, harm: object, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    harm(newest / name)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        loaded = load_checkpoint(tmp_path, WORLD)
    assert value(loaded) == 1
    assert str(newest / name) in loaded.passed_over[0]
    assert str(newest / name) in caplog.text and "step_0000001" in caplog.text
    with pytest.raises(ValueError, match=name):
        load_checkpoint(newest, WORLD)


def test_when_nothing_is_whole_every_damage_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "rank_00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step_0000002.*step_0000001"):
        load_checkpoint(tmp_path, WORLD)


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_a_place_without_checkpoints_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no committed checkpoint"):
        load_checkpoint(tmp_path / name, WORLD)


@pytest.mark.parametrize(
    "call", ["write_boxes", "write_content", "PendingCheckpoint._complete", "place_folder"]
)
def test_a_crash_at_any_point_before_the_rename_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(tmp_path, 1)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"{commit.__name__}.{call}", killed)
        with pytest.raises(Killed):
            save(tmp_path, 2)
    assert any(".tmp-" in p.name for p in tmp_path.iterdir())
    assert value(load_checkpoint(tmp_path, WORLD)) == 1
    save(tmp_path, 2)
    assert value(load_checkpoint(tmp_path, WORLD)) == 2


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        LATEST_FILE,
        "notes",
        "step_0000010",
        "step_0000011",
    ]


def test_extra_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="JSON"):
        save_checkpoint(
            tmp_path / "new",
            1,
            boxes(1),
            extra={"rng": torch.zeros(1)},
            config_yaml="",
            world=WORLD,
        )
    assert not (tmp_path / "new").exists()


def test_tensors_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    world = [*boxes(1.0), *boxes(2.0, name="model.v"), *boxes(3.0, name="optimizer.exp_avg.w")]
    save_checkpoint(tmp_path, 1, world, extra={}, config_yaml="", world=WORLD)
    loaded = load_checkpoint(tmp_path, WORLD)
    with pytest.raises(ValueError, match=r"model\.v is in the checkpoint but not in this model"):
        loaded.read(boxes(0.0))
    loaded.read([*boxes(0.0), *boxes(0.0, name="model.v")])
    with pytest.raises(ValueError, match=r"model\.u is not in the checkpoint"):
        loaded.read([*boxes(0.0), *boxes(0.0, name="model.u")])


def _ranks_save_and_load(rank: int, world_size: int, root: str) -> tuple[float, int]:
    world = grid(dp=world_size).world
    save(Path(root), 1, world)
    save(Path(root), 2, world, keep_last=1)
    loaded = load_checkpoint(root, world)
    return value(loaded), len(loaded.manifest.files)


def test_ranks_write_one_checkpoint_together(tmp_path: Path) -> None:
    assert run_ranks(_ranks_save_and_load, 4, str(tmp_path)) == [(2.0, 6)] * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST_FILE, "step_0000002"]


def _one_disk_is_full(rank: int, world_size: int, root: str, broken: int) -> tuple[str, float]:
    world = grid(dp=world_size).world
    save(Path(root), 1, world)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == broken:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (100, limits[1])
        )  # writing beyond it fails like a full disk
    try:
        save(Path(root), 2, world)
    except SaveError as error:
        message = str(error)
    else:
        message = "saved"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return message, value(load_checkpoint(root, world))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_disk_error_on_one_rank_is_raised_on_all_and_the_previous_one_stays(
    tmp_path: Path, broken: int
) -> None:
    results = run_ranks(_one_disk_is_full, 2, str(tmp_path), broken)
    assert results[0] == results[1]
    message, loaded = results[0]
    assert f"rank {broken}: File too large" in message and "step 2" in message
    assert loaded == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST_FILE, "step_0000001"]


def _damage_is_seen_by_all(rank: int, world_size: int, root: str) -> tuple[float, str]:
    world = grid(dp=world_size).world
    save(Path(root), 1, world)
    path = save(Path(root), 2, world)
    if rank == 1:
        _flip(path / "rank_00001.safetensors")
    torch.distributed.barrier()
    loaded = load_checkpoint(root, world)
    return value(loaded), loaded.passed_over[0]


def test_all_ranks_agree_to_pass_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(_damage_is_seen_by_all, 2, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0] == 1 and "rank_00001.safetensors" in results[0][1]


def _misfit(rank: int, world_size: int, root: str) -> str:
    world = grid(dp=world_size).world
    save(Path(root), 1, world)
    wanted = (
        boxes(0.0, world)
        if rank == 0
        else [TensorBox("model.w", (9, 3), (0, 0), torch.zeros(1, 3))]
    )
    try:
        load_checkpoint(root, world).read(wanted)
    except ValueError as error:
        return str(error)
    return "read"


def test_a_misfit_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    results = run_ranks(_misfit, 2, str(tmp_path))
    assert results[0] == results[1]
    assert (
        "rank 1" in results[0]
        and "(2, 3) in the checkpoint, but torch.float32 (9, 3) in this run" in results[0]
    )


def build(place: ProcessGrid, dtype: torch.dtype) -> tuple[Toy, FlatBuckets, ShardedOptimizer]:
    model = Toy(place.tp.size, place.tp.rank, place.pp.size, place.pp.rank, dtype)
    axes = {"tp": place.tp, "embedding": place.embedding}
    buckets = FlatBuckets([model], {DATA: place.over("dp", "cp")}, axes, 150)
    return model, buckets, ShardedOptimizer(buckets, TrainingConfig(), place.world, place.device)


def _save(rank: int, world_size: int, shape: dict[str, int], root: str, dtype: torch.dtype) -> None:
    place = grid(**shape)
    model, buckets, optimizer = build(place, dtype)
    for step in range(2):
        model.loss(values((step, buckets.axes[DATA].rank), dtype)).backward()
        buckets.finish()
        optimizer.step(0.01)
    boxes = boxes_to_save(buckets.parameter_slices(), optimizer.state_slices(), buckets.counts)
    extra = {"updates": optimizer.updates}
    save_checkpoint(root, 2, boxes, extra=extra, config_yaml="", world=place.world, grid=shape)


def _check(rank: int, world_size: int, shape: dict[str, int], root: str, dtype: torch.dtype) -> int:
    """Load on another grid and compare every element, including padding, with the global tensors;
    return the number of elements.
    """
    place = grid(**shape)
    model, buckets, optimizer = build(place, dtype)
    for tensor in [p.data for p in model.parameters()] + [b.parameters for b in buckets.buckets]:
        tensor.fill_(7)
    loaded = load_checkpoint(root, place.world)
    optimizer.clear()
    loaded.read(boxes_to_load(buckets.parameters_held(), optimizer.state_slices()))
    optimizer.set_updates(loaded.extra["updates"])
    assert optimizer.updates == 2
    specs = {id(p.megacp_spec): p for p in model.parameters()}  # type: ignore[attr-defined]
    groups = {"model": buckets.parameters_held()}
    groups |= {f"optimizer.{kind}": parts for kind, parts in optimizer.state_slices().items()}
    compared = 0
    for kind, parts in groups.items():
        whole = dict(load_checkpoint(root, single_axis("world")).whole_tensors(kind))
        assert set(whole) == set(global_shapes())
        assert all(tensor.any() for tensor in whole.values())
        for part in parts:
            expected = local_of(specs[id(part.spec)], whole).flatten()[part.start :][
                : part.values.numel()
            ]
            assert torch.equal(part.values, expected), (kind, part.spec.pieces[0].name)
            compared += part.values.numel()
    return compared


SAVED = {"tp": 2, "dp": 2}
GRIDS = [
    {},
    {"tp": 4},
    {"dp": 4},
    {"tp": 2, "pp": 2},
    {"cp": 2, "pp": 2},
    {"tp": 2, "dp": 2},
    {"dp": 2},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_a_checkpoint_of_one_grid_loads_on_every_other_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    run_ranks(_save, 4, SAVED, str(tmp_path), dtype)
    for shape in GRIDS:
        ranks = math.prod(shape.values())
        compared = (
            run_ranks(_check, ranks, shape, str(tmp_path), dtype)
            if ranks > 1
            else [_check(0, 1, shape, str(tmp_path), dtype)]
        )
        assert min(compared) > 100


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"pp": 2, "dp": 2}, {"tp": 4}, {}], ids=str)
def test_every_grid_writes_files_that_one_process_reads(
    tmp_path: Path, shape: dict[str, int]
) -> None:
    ranks = math.prod(shape.values())
    if ranks > 1:
        run_ranks(_save, ranks, shape, str(tmp_path), torch.float32)
    else:
        _save(0, 1, shape, str(tmp_path), torch.float32)
    assert _check(0, 1, {}, str(tmp_path), torch.float32) > 100


def _resume(rank: int, world_size: int, shape: dict[str, int], root: str) -> bool:
    place = grid(**shape)
    results = []
    for resumed in (False, True):
        model, buckets, optimizer = build(place, torch.float32)
        for step in range(4):
            if resumed and step < 2:
                continue
            if resumed and step == 2:
                loaded = load_checkpoint(root, place.world)
                optimizer.clear()
                loaded.read(boxes_to_load(buckets.parameters_held(), optimizer.state_slices()))
                optimizer.set_updates(loaded.extra["updates"])
            model.loss(values((step, buckets.axes[DATA].rank), torch.float32)).backward()
            buckets.finish()
            optimizer.step(0.01)
        results.append([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    run_ranks(_save, 4, SAVED, str(tmp_path), torch.float32)
    assert run_ranks(_resume, 4, SAVED, str(tmp_path)) == [True] * 4


def _own_disks(rank: int, world_size: int, root: str, harmed: int) -> tuple[int, str]:
    """Load `run` on each rank below a different folder, as from the disk of its machine."""
    before = Path.cwd()
    os.chdir(Path(root, str(rank)))
    try:
        if rank == harmed:
            _flip(Path("run/step_0000002/rank_00000.safetensors"))
        loaded = load_checkpoint("run", grid(dp=world_size).world)
        return loaded.step, loaded.passed_over[0]
    finally:
        os.chdir(before)


@pytest.mark.parametrize("harmed", [0, 1])
def test_damage_in_the_copy_of_one_machine_is_seen_by_all(tmp_path: Path, harmed: int) -> None:
    for step in (1, 2):
        save(tmp_path / "0" / "run", step)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    for loaded, told in run_ranks(_own_disks, 2, str(tmp_path), harmed):
        assert loaded == 1 and told.startswith(
            f"rank {harmed}: run/step_0000002/rank_00000.safetensors is damaged"
        )
