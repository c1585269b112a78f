"""What --keep-last removes, what it counts, and what happens to what cannot be removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megacp.core.checkpoint.commit import load_checkpoint, save_checkpoint
from megacp.core.checkpoint.directory import LATEST_FILE, point_and_prune, refuse_unpointable, remove_leftovers
from megacp.core.checkpoint.pending import SaveError
from tests.checkpoint.test_commit import WORLD, _flip, _truncate, boxes, save, value
from tests.training.runs import TINY, run


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in folder.glob("step_*"))


@pytest.mark.slow
def test_a_run_that_passed_over_a_damaged_checkpoint_does_not_count_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch the sound checkpoint removed and the damaged one kept, in this run or in the one after it."""
    flags = [*TINY, "--save", str(tmp_path), "--save-interval", "2", "--keep-last", "2"]
    run(1, flags)
    _flip(next((tmp_path / "step_0000004").glob("*.safetensors")))
    run(1, [*flags, "--load", str(tmp_path), "--train-iters", "3"])
    assert f"removed {tmp_path / 'step_0000004'}, which was damaged when this run started" in capsys.readouterr().out
    assert steps(tmp_path) == [2, 3]
    shutil.rmtree(tmp_path / "step_0000003")
    assert load_checkpoint(tmp_path, WORLD).step == 2


@pytest.mark.parametrize("harm", [_truncate, Path.unlink])
def test_a_checkpoint_with_a_file_of_another_size_does_not_count(tmp_path: Path, harm: object) -> None:
    """Would catch the last sound one removed; the damaged one goes when enough sound ones are newer."""
    for step in (1, 2):
        path = save(tmp_path, step)
    harm(path / "rank_00000.safetensors")  # type: ignore[operator]
    save(tmp_path, 3, keep_last=2)
    assert steps(tmp_path) == [1, 2, 3]
    save(tmp_path, 4, keep_last=2)
    assert steps(tmp_path) == [3, 4]


def test_distrusted_ones_stay_where_nothing_is_removed_and_elsewhere(tmp_path: Path) -> None:
    """Would catch a run that clears another directory than its own, or clears although nobody asked for it."""
    other, first, second, third = save(tmp_path / "other", 1), *(save(tmp_path / "own", step) for step in (1, 2, 3))
    assert point_and_prune(third, 0, (first, other)) == []
    assert steps(tmp_path / "own") == [1, 2, 3]
    assert [note.split(",")[0] for note in point_and_prune(third, 2, (first, other))] == [f"removed {first}"]
    assert steps(tmp_path / "own") == [2, 3] and other.is_dir() and second.is_dir()


def test_a_linked_checkpoint_is_unlinked_and_what_it_points_to_stays(tmp_path: Path) -> None:
    """Would catch `Cannot call rmtree on a symbolic link` after a good save, and at every later start."""
    moved = save(tmp_path / "archive", 1)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "step_0000001").symlink_to(moved)
    (tmp_path / "own" / "step_0000000.tmp-0123abcd").symlink_to(moved)
    save(tmp_path / "own", 2, keep_last=1)
    assert steps(tmp_path / "archive") == [1] and (moved / "manifest.json").is_file()
    assert remove_leftovers(tmp_path / "own") == [
        f"removed {tmp_path / 'own' / 'step_0000000.tmp-0123abcd'}, left by a crash"
    ]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [LATEST_FILE, "step_0000002"]
    assert value(load_checkpoint(tmp_path / "archive", WORLD)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("call", ["rmtree", "replace"])
def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    """Would catch a run that dies after a good save, and one that cannot start because of what is left."""
    real = os.replace

    def refuse(path: Path, *rest: object) -> object:
        if call == "replace" and path != tmp_path / "step_0000002":
            return real(path, *rest)  # type: ignore[arg-type]
        raise PermissionError(13, "Permission denied", str(path))

    flags = [*TINY, "--save", str(tmp_path), "--save-interval", "2", "--keep-last", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(*((shutil, "rmtree") if call == "rmtree" else (os, "replace")), refuse)
        run(1, flags)
        assert "could not be removed: Permission denied" in capsys.readouterr().out
        assert remove_leftovers(tmp_path) == [] or call == "rmtree"
    assert load_checkpoint(tmp_path, WORLD).step == 4
    remove_leftovers(tmp_path)
    assert steps(tmp_path) == ([4] if call == "rmtree" else [2, 4])


def test_a_directory_named_latest_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a run that trains until its first save and then dies with EISDIR."""
    from megacp.train import main

    (tmp_path / LATEST_FILE).mkdir()
    assert main([*TINY, "--save", str(tmp_path)]) == 2
    assert f"{tmp_path / LATEST_FILE} is a directory" in capsys.readouterr().err
    with pytest.raises(SaveError, match="Is a directory"):
        save_checkpoint(tmp_path, 1, boxes(1), extra={}, config_yaml="", world=WORLD)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST_FILE, "step_0000001"]
    refuse_unpointable(tmp_path / "nowhere")
