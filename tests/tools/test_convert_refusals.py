"""What the converter refuses: one line that names the flag, the path and what to do; nothing is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.convert.models import save
from tests.tools.test_convert_checkpoint import convert, saved_on_grid

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: hf)")

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`theirs`, a Hugging Face folder, and `ours`, what it became."""
    folder = tmp_path_factory.mktemp("refusals")
    save("llama 2", folder / "theirs")
    assert convert("hf", "megacp", folder / "theirs", folder / "ours") == 0
    return folder


def refusal(capsys: Capture, *arguments: Any) -> str:
    """The one line of a refused conversion."""
    capsys.readouterr()
    assert convert(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_an_input_of_another_kind_is_named_with_its_flag(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch `--load`, a flag of another program, and a missing file where the whole folder is missing."""
    theirs, ours, file = folders / "theirs", folders / "ours", folders / "theirs" / "model.safetensors"
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("x")
    before = sorted(path.name for path in tmp_path.iterdir())
    for source, path, message in (
        ("hf", tmp_path / "nowhere", "there is no such folder"),
        ("megacp", tmp_path / "nowhere", "there is no such folder"),
        ("hf", tmp_path / "empty", "the folder is empty"),
        ("megacp", tmp_path / "empty", "the folder is empty"),
        ("hf", file, f"it is a file, expected a folder: its folder is {theirs}"),
        ("hf", tmp_path / "others", "the folder has no config.json"),
        ("hf", ours, "the folder has no config.json, it is a checkpoint of megacp: --from megacp"),
        ("hf", next(ours.glob("step_*")), "it is a checkpoint of megacp: --from megacp"),
        ("megacp", theirs, "it is a Hugging Face folder with a config.json: --from hf"),
        ("megacp", tmp_path / "others", "there is no committed checkpoint"),
        ("megacp", file, "it is a file, expected a folder"),
    ):
        error = refusal(capsys, source, "hf", path, tmp_path / "x")
        assert error.startswith(f"error: --input {path}: ") and message in error, error
        assert "--load" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_damaged_checkpoint_is_named_with_the_flag_of_this_command(tmp_path: Path, capsys: Capture) -> None:
    saved_on_grid(0, 1, {}, {"dtype": "float32"}, str(tmp_path / "run"), None)
    payload = next((tmp_path / "run").glob("step_*/*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1])
    error = refusal(capsys, "megacp", "hf", tmp_path / "run", tmp_path / "x")
    assert error.startswith(f"error: --input {tmp_path / 'run'}: no checkpoint is whole: ") and "--load" not in error


def test_flags_that_do_not_fit_the_input_are_refused(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    theirs = folders / "theirs"
    flags = ("--layout", "released")
    assert "llama has one layout" in refusal(capsys, "hf", "hf", theirs, tmp_path / "x", *flags)
    flags = ("--architecture", "qwen3")
    assert "config.json has model_type llama" in refusal(capsys, "hf", "hf", theirs, tmp_path / "x", *flags)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_is_named_with_its_flag(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    theirs = folders / "theirs"
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output, message in (
        (theirs, "exists; nothing is ever written over"),
        (tmp_path / "file", "exists; nothing is ever written over"),
        (tmp_path / "link", "exists; nothing is ever written over"),
        (tmp_path / "file" / "x", f"cannot be written: {tmp_path / 'file'} is no directory"),
        (tmp_path / "file" / "y" / "x", f"cannot be written: {tmp_path / 'file'} is no directory"),
        (Path("/proc/nowhere/x"), "cannot be written: "),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        error = refusal(capsys, "hf", "hf", theirs, output)
        assert error.startswith(f"error: --output {output} ") and message in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


HOSTILE: dict[str, Any] = {
    "num_hidden_layers": 10**9,
    "rope_theta": "a",
    "rms_norm_eps": None,
    "architectures": [{}],
    "vocab_size": "97",
    "model_type": ["llama"],
    "num_attention_heads": 5,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_config_that_lies_is_refused_by_its_field(kind: str, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a conversion that hangs, ends in a traceback, or takes a default for what stands there."""
    content = json.loads((folders / "theirs" / "config.json").read_text())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps({**content, "rope_parameters": None, kind: HOSTILE[kind]}))
    os.link(folders / "theirs" / "model.safetensors", tmp_path / "a" / "model.safetensors")
    error = refusal(capsys, "hf", "megacp", tmp_path / "a", tmp_path / "x")
    assert error.startswith(f"error: --input {tmp_path / 'a'}: ") and kind in error
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
