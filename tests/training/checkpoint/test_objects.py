"""Checkpoints at URLs: commits without a rename, partial uploads, pruning, and failing stores."""

from __future__ import annotations

import pytest
import torch

from megacp.engine.data_parallel.boxes import TensorBox
from megacp.storage.url import UnreachableError, Url
from megacp.training.checkpoint.commit import (
    Contents,
    PendingCheckpoint,
    SaveError,
    load_checkpoint,
    peek,
)
from megacp.training.checkpoint.directory import (
    LATEST_FILE,
    MANIFEST_FILE,
    committed,
    holds_checkpoints,
    read_manifest,
)
from tests.storage.stores import FlakyStore, flaky, memory, under_flaky
from tests.training.checkpoint.saves import save_checkpoint
from tests.training.checkpoint.test_commit import WORLD, boxes, value


def save(root: Url, step: int, keep_last: int = 0) -> Url:
    final = save_checkpoint(
        root,
        step,
        boxes(step),
        extra={"samples": step},
        config_yaml="a: 1\n",
        world=WORLD,
        keep_last=keep_last,
    )
    assert isinstance(final, Url)
    return final


def names(folder: Url) -> list[str]:
    return [child.name for child in folder.children()]


def test_a_saved_checkpoint_comes_back_with_everything() -> None:
    root = memory()
    path = save(root, 100)
    assert path == root / "step_0000100" and names(root) == [LATEST_FILE, "step_0000100"]
    loaded = load_checkpoint(root, WORLD)
    assert (loaded.step, loaded.path, loaded.extra, loaded.config_yaml) == (
        100,
        path,
        {"samples": 100},
        "a: 1\n",
    )
    assert value(loaded) == 100
    assert set(loaded.manifest.files) | {MANIFEST_FILE} == set(names(path))
    assert [(name, tensor.tolist()) for name, tensor in loaded.whole_tensors()] == [
        ("w", [[100.0] * 3])
    ]


def test_the_manifest_is_written_last_and_latest_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for name in ("write", "stream"):
        original = getattr(Url, name)

        def noted(self: Url, what: object, original=original) -> object:
            written.append(self.name)
            return original(self, what)

        monkeypatch.setattr(Url, name, noted)
    save(memory(), 1)
    assert written == [
        "rank_00000.safetensors",
        "index.json",
        "config.yaml",
        MANIFEST_FILE,
        LATEST_FILE,
    ]


def test_half_a_checkpoint_is_refused_by_name_and_passed_over() -> None:
    root = memory()
    save(root, 1)
    half = save(root, 2)
    (half / MANIFEST_FILE).unlink()
    with pytest.raises(ValueError, match=MANIFEST_FILE):
        load_checkpoint(half, WORLD)
    loaded = load_checkpoint(root, WORLD)
    assert loaded.step == 1 and f"step_0000002/{MANIFEST_FILE}" in loaded.passed_over[0]


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped"])
def test_a_damaged_file_is_named_and_the_one_before_is_loaded(harm: str) -> None:
    root = memory()
    save(root, 1)
    file = save(root, 2) / "rank_00000.safetensors"
    data = file.content(1 << 20)
    if harm == "missing":
        file.unlink()
    else:
        file.write(data[:-1] if harm == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    loaded = load_checkpoint(root, WORLD)
    assert loaded.step == 1 and value(loaded) == 1 and str(file) in loaded.passed_over[0]


def test_the_first_save_that_failed_leaves_no_trace_of_a_run() -> None:
    root = memory()
    path = save(root, 1)
    (path / MANIFEST_FILE).unlink()
    (root / LATEST_FILE).unlink()
    assert not holds_checkpoints(root) and peek(root) is None
    assert save(root, 1) == root / "step_0000001.2"
    assert holds_checkpoints(root)


def test_older_checkpoints_are_removed_manifest_first() -> None:
    root = memory()
    for step in (1, 2, 3):
        save(root, step, keep_last=2)
    assert names(root) == [LATEST_FILE, "step_0000002", "step_0000003"]
    assert [folder.name for folder in committed(root)] == ["step_0000003", "step_0000002"]


def test_a_save_in_the_background_is_committed_by_all() -> None:
    root = memory()
    tensor = torch.full((1, 3), 5.0)
    box = TensorBox("model.w", (1, 3), (0, 0), tensor)
    pending = PendingCheckpoint(root, [box], Contents(7, {}, ""), WORLD, background=True)
    tensor.zero_()
    assert pending.commit() == root / "step_0000007"
    assert value(load_checkpoint(root, WORLD)) == 5


def test_a_store_that_fails_one_request_in_five_gets_whole_checkpoints() -> None:
    root = memory()
    with flaky(0.2) as store:
        for step in (1, 2, 3):
            save(under_flaky(root), step, keep_last=2)
        loaded = load_checkpoint(under_flaky(root), WORLD)
        assert loaded.step == 3 and value(loaded) == 3 and loaded.passed_over == ()
    assert sum(store.failed.values()) > 5
    assert [folder.name for folder in committed(root)] == ["step_0000003", "step_0000002"]


def test_a_store_that_is_gone_ends_the_save_and_keeps_what_is_there() -> None:
    root = memory()
    save(root, 1)
    with (
        flaky(1.0),
        pytest.raises(
            SaveError, match=r"checkpoint of step 2 in flaky://.* was not written: .*tried 6"
        ),
    ):
        save_checkpoint(under_flaky(root), 2, boxes(2), extra={}, config_yaml="", world=WORLD)
    assert load_checkpoint(root, WORLD).step == 1


def test_an_unreached_store_is_no_reason_to_load_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = memory()
    save(root, 1)
    save(root, 2)
    original = FlakyStore.cat_file

    def down_for_the_newest(self, path: str, *args, **kwargs) -> bytes:
        if "step_0000002" in path:
            raise ConnectionResetError("down")
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(FlakyStore, "cat_file", down_for_the_newest)
    place = under_flaky(root)
    with flaky(0.0):
        with pytest.raises(UnreachableError):
            read_manifest(place / "step_0000002")
        with pytest.raises(ValueError, match=r"step_0000002/.*down"):
            load_checkpoint(place, WORLD)
        with pytest.raises(UnreachableError):
            peek(place)
        with pytest.raises(UnreachableError):  # the next serial number follows all existing ones
            committed(place)
