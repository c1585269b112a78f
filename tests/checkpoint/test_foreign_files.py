"""A directory that somebody else can write to: links through which files are overwritten, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacp.core.checkpoint import pending as module
from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import LATEST_FILE, refuse_unpointable
from megacp.core.checkpoint.lock import LOCK_FILE, DirectoryLock
from megacp.core.checkpoint.manifest import MANIFEST_FILE
from megacp.core.checkpoint.pending import SaveError
from megacp.core.checkpoint.storage import INDEX_FILE
from tests.checkpoint.test_commit import WORLD, save, value
from tests.test_files import odd_file

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside the directory of checkpoints, which is `tmp_path / "out"`."""
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("precious")
    return tmp_path / "precious"


@pytest.mark.parametrize("kind", [os.symlink, os.link])
def test_a_lock_that_is_another_file_is_refused_and_not_written(precious: Path, kind: object) -> None:
    """Would catch `host ..., process ...` written over what a planted link points to."""
    lock = precious.parent / "out" / LOCK_FILE
    kind(precious, lock)  # type: ignore[operator]
    with pytest.raises(ValueError, match=rf"{LOCK_FILE} is (a link, which is not written through|no lock of a run)"):
        DirectoryLock(precious.parent / "out")
    assert precious.read_text() == "precious"
    lock.unlink()
    first = DirectoryLock(precious.parent / "out")
    first.release()
    DirectoryLock(precious.parent / "out").release()  # what an earlier run has written is written over


def test_a_lock_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(ValueError, match=f"{LOCK_FILE} is a named pipe, no regular file"):
        DirectoryLock(tmp_path)


def test_latest_that_is_a_link_is_refused_at_the_start_and_replaced_later(precious: Path) -> None:
    out = precious.parent / "out"
    (out / LATEST_FILE).symlink_to(precious)
    with pytest.raises(ValueError, match=f"{LATEST_FILE} is a link; .*: move it away"):
        refuse_unpointable(out)
    save(out, 1)  # one that is planted while the run goes on
    assert precious.read_text() == "precious" and not (out / LATEST_FILE).is_symlink()
    os.remove(out / LATEST_FILE)
    os.mkfifo(out / LATEST_FILE)
    with pytest.raises(ValueError, match=f"{LATEST_FILE} is a named pipe"):
        refuse_unpointable(out)
    assert value(load_checkpoint(out, WORLD)) == 1


@pytest.mark.parametrize("name", ["rank_00000.safetensors", INDEX_FILE, "config.yaml", MANIFEST_FILE])
def test_no_file_of_a_checkpoint_is_written_through_a_link(
    precious: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Would catch an open that follows links; here every name of the new folder is planted before it is written."""
    out = precious.parent / "out"
    made = module.temporary

    def planted(root: Path, base: str) -> Path:
        folder = made(root, base)
        real = Path.mkdir

        def mkdir(path: Path, *rest: object, **more: object) -> None:
            real(path, *rest, **more)  # type: ignore[arg-type]
            if path == folder:
                (folder / name).symlink_to(precious)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        return folder

    monkeypatch.setattr(module, "temporary", planted)
    with pytest.raises(SaveError):
        save(out, 1)
    assert precious.read_text() == "precious"
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("kind", ["a named pipe", "a directory", "a device", "a huge file"])
@pytest.mark.parametrize("name", [INDEX_FILE, "rank_00000.safetensors", "config.yaml"])
def test_a_file_that_is_none_is_named_and_the_previous_checkpoint_is_loaded(
    tmp_path: Path, kind: str, name: str
) -> None:
    """Would catch a load that waits for a pipe, hashes a terabyte or reads /dev/zero to the end of memory."""
    out = tmp_path / "out"
    save(out, 1)
    newest = save(out, 2)
    size = (newest / name).stat().st_size
    (newest / name).unlink()
    if kind == "a huge file":
        with (tmp_path / "huge").open("wb") as stream:
            stream.truncate(1 << 40)
        (newest / name).symlink_to(tmp_path / "huge")
    else:
        odd_file(kind, newest / name)
    loaded = load_checkpoint(out, WORLD)
    assert value(loaded) == 1
    reason = f"has {1 << 40} bytes, expected {size}" if kind == "a huge file" else f"is {kind}, no regular file"
    assert loaded.passed_over == (f"{newest / name} {reason}",)


@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a huge file"])
@pytest.mark.parametrize("name", [INDEX_FILE, "rank_00000.safetensors"])
def test_a_file_that_is_replaced_after_its_hash_was_right_is_not_waited_for(
    tmp_path: Path, kind: str, name: str
) -> None:
    """Would catch a reader that opens whatever has the name by then."""
    folder = save(tmp_path, 1)
    loaded = load_checkpoint(tmp_path, WORLD)
    (folder / name).unlink()
    if kind == "a huge file":
        with (folder / name).open("wb") as stream:
            stream.truncate(1 << 40)
    else:
        odd_file(kind, folder / name)
    with pytest.raises(ValueError, match=f"{name} (has {1 << 40} bytes|is {kind})"):
        value(loaded)
    with pytest.raises(ValueError, match=f"{name} (has {1 << 40} bytes|is {kind})"):
        list(loaded.whole_tensors())
