"""What the converter refuses: one line that names the flag and the path; nothing is left behind."""

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

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`theirs`, a Hugging Face folder, `ours`, what it became, `cut`, a checkpoint without its end, and others."""
    folder = tmp_path_factory.mktemp("refusals")
    save("llama 2", folder / "theirs")
    assert convert("hf", "megacp", folder / "theirs", folder / "ours") == 0
    saved_on_grid(0, 1, {}, {"dtype": "float32"}, str(folder / "cut"), None)
    payload = next((folder / "cut").glob("step_*/*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1])
    (folder / "empty").mkdir()
    (folder / "others").mkdir()
    (folder / "others" / "notes.txt").write_text("x")
    (folder / "file").write_text("x")
    (folder / "link").symlink_to(folder / "nowhere")
    return folder


def refusal(capsys: Capture, *arguments: Any) -> str:
    """The one line of a refused conversion."""
    capsys.readouterr()
    assert convert(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "--load" not in error, error
    return error


@pytest.mark.parametrize(
    ("source", "path", "hint"),
    [
        *(("hf", name, "") for name in ("nowhere", "empty", "others")),
        *(("megacp", name, "") for name in ("nowhere", "empty", "others", "cut")),
        ("hf", "theirs/model.safetensors", ""),
        ("megacp", "theirs/model.safetensors", ""),
        ("hf", "ours", "--from megacp"),
        ("hf", "ours/step_*", "--from megacp"),
        ("megacp", "theirs", "--from hf"),
    ],
)
def test_an_input_of_another_kind_is_named_with_its_flag(
    source: str, path: str, hint: str, folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    given = next(folders.glob(path), folders / path)
    error = refusal(capsys, source, "hf", given, tmp_path / "x")
    assert error.startswith(f"error: --input {given}: ") and hint in error and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [("--layout", "released"), ("--architecture", "qwen3")])
def test_flags_that_do_not_fit_the_input_are_refused(
    flags: Any, folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert flags[0] in refusal(capsys, "hf", "hf", folders / "theirs", tmp_path / "x", *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["theirs", "file", "link", "file/x", "file/y/x", "/proc/nowhere/x", "x" * 300])
def test_an_output_that_cannot_be_is_named_with_its_flag(output: str, folders: Path, capsys: Capture) -> None:
    before = sorted(path.name for path in folders.iterdir())
    error = refusal(capsys, "hf", "hf", folders / "theirs", folders / output)
    assert error.startswith(f"error: --output {folders / output} ")
    assert sorted(path.name for path in folders.iterdir()) == before


HOSTILE: dict[str, Any] = {
    "num_hidden_layers": 10**9,
    "rope_theta": "a",
    "rms_norm_eps": None,
    "vocab_size": "97",
    "model_type": ["llama"],
    "num_attention_heads": 5,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_config_that_lies_is_refused_by_its_field(kind: str, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    content = json.loads((folders / "theirs" / "config.json").read_text())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps({**content, "rope_parameters": None, kind: HOSTILE[kind]}))
    os.link(folders / "theirs" / "model.safetensors", tmp_path / "a" / "model.safetensors")
    error = refusal(capsys, "hf", "megacp", tmp_path / "a", tmp_path / "x")
    assert error.startswith(f"error: --input {tmp_path / 'a'}: ") and kind in error
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
