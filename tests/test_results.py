"""Every command writes its file only to a free path, and otherwise prints a message."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megacp.huggingface import generate_command
from megacp.plan import calibrate
from megacp.plan import command as plan_command
from megacp.prepare import command as preprocess
from megacp.storage.files import require_free, write_result
from megacp.training.monitor import trace
from megacp.verify import plot
from tests.prepare.packs import builds

TOOLS = Path(__file__).resolve().parents[1] / "tools"
PLAN = ["--world-size", "1", "--num-layers", "2", "--vocab-size", "512", "--seq-length", "64"]


def tool(name: str) -> Callable[[Sequence[str]], int]:
    """Return the `main` of a file in tools/."""
    return runpy.run_path(str(TOOLS / f"{name}.py"))["main"]  # type: ignore[no-any-return]


def plan(folder: Path, flag: str, path: Path, more: list[str]) -> int:
    return plan_command.main([*PLAN, flag, str(path), *more])


def drawn_loss(folder: Path, flag: str, path: Path, more: list[str]) -> int:
    (folder / "log.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 1.0}) + "\n")
    return plot.main(["--log", str(folder / "log.jsonl"), flag, str(path), *more])


def inspected(folder: Path, flag: str, path: Path, more: list[str]) -> int:
    builds.write_records(folder / "a.jsonl", 3)
    builds.run([folder / "a.jsonl"], folder / "d")
    return preprocess.main(["inspect", str(folder / "d"), flag, str(path), *more])


def tokenizer(folder: Path, flag: str, path: Path, more: list[str]) -> int:
    (folder / "a.txt").write_text("seven and two " * 20)
    return tool("train_tokenizer")(
        ["--input", str(folder / "a.txt"), flag, str(path), "--vocab-size", "270", *more]
    )


def measured(folder: Path, flag: str, path: Path, more: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "measured", lambda device: {"base": 0.1})
        patch.setattr(calibrate, "calibrated", lambda *of: calibrate.known_before("cpu", "h100"))
        return plan_command.main(["calibrate", "--device", "cpu", flag, str(path), *more])


COMMANDS: dict[str, tuple[Callable[[Path, str, Path, list[str]], int], str, str]] = {
    "plan": (plan, "--output", "best.yaml"),
    "page of a plan": (plan, "--html", "best.html"),
    "loss": (drawn_loss, "--output", "loss.png"),
    "page of a pack": (inspected, "--html", "pack.html"),
    "tokenizer": (tokenizer, "--output", "tokenizer.json"),
    "sheet": (measured, "--output", "here.yaml"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_is_written_where_nothing_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check a new file in a new folder; then that it is not overwritten, even through a link."""
    run, flag, file = COMMANDS[name]
    path = tmp_path / "new" / "folder" / file
    assert run(tmp_path, flag, path, []) == 0
    first = path.read_bytes()
    assert first
    path.write_bytes(b"mine")
    capsys.readouterr()
    assert run(tmp_path, flag, path, []) == 2
    assert (
        f"error: {flag} {path} exists; nothing was overwritten; use --overwrite"
        in capsys.readouterr().err
    )
    assert path.read_bytes() == b"mine"
    assert run(tmp_path, flag, path, ["--overwrite"]) == 0
    assert path.read_bytes()[:4] == first[:4]


@pytest.mark.parametrize("target", ["file", "nothing", "device", "folder"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_is_never_written_through_a_link(
    name: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, flag, file = COMMANDS[name]
    path, other = tmp_path / file, tmp_path / "other"
    if target == "file":
        other.write_bytes(b"mine")
    if target == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/full" if target == "device" else other)
    for more in ([], ["--overwrite"]):
        assert run(tmp_path, flag, path, more) == 2
        assert (
            f"error: {flag} {path} is a {'directory' if target == 'folder' else 'symbolic link'}"
            in capsys.readouterr().err
        )
    assert other.exists() == (target == "file")
    assert target != "file" or other.read_bytes() == b"mine"


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_answers_go_where_nothing_is(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.jsonl").write_text("{}\n")
    (tmp_path / "kept.jsonl").write_text("mine")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "kept.jsonl")
    flags = [
        "--checkpoint",
        str(tmp_path / "none"),
        "--input",
        str(tmp_path / "asked.jsonl"),
        *more,
    ]
    with pytest.raises(SystemExit):
        generate_command.main([*flags, "--output", str(tmp_path / "link.jsonl")])
    assert "link.jsonl is a symbolic link, and links are not followed" in capsys.readouterr().err
    if not more:
        with pytest.raises(SystemExit):
            generate_command.main([*flags, "--output", str(tmp_path / "kept.jsonl")])
        assert "kept.jsonl exists; nothing was overwritten" in capsys.readouterr().err
    assert (tmp_path / "kept.jsonl").read_text() == "mine"


def test_a_report_of_a_gpu_goes_where_none_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.md").write_text("mine")
    assert tool("check_gpu")(["--device", "cpu", "--output", str(tmp_path), "--minutes", "0"]) == 2
    assert "report.md exists; nothing was overwritten" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text() == "mine"


def test_a_trace_does_not_replace_one_and_follows_no_link(tmp_path: Path) -> None:
    assert trace._free_path(tmp_path, "a").name == "a.json"
    (tmp_path / "a.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "a.2.json").touch()
    assert trace._free_path(tmp_path, "a").name == "a.3.json"


def test_a_file_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appears(flag: str, path: Any, overwrite: bool = False) -> None:
        require_free(flag, path, overwrite)
        Path(path).write_bytes(b"mine")

    monkeypatch.setattr("megacp.storage.files.require_free", appears)
    with pytest.raises(FileExistsError):
        write_result("--output", tmp_path / "a", b"ours")
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_a_log_is_a_regular_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["--log", "/dev/zero", "--output", str(tmp_path / "loss.png")]) == 2
    assert "/dev/zero is a device" in capsys.readouterr().err
    assert plot.main(["--log", "/dev/zero", "--output", str(tmp_path / "loss.png")]) == 2
