"""--verify detects one flipped bit, files next to the weights survive, and a refused conversion
leaves no files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.distributed.grid import single_axis
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.source import read_checkpoint
from megacp.huggingface.convert.tensors import Source, whole
from tests.huggingface.convert.models import save
from tests.tools.test_convert_checkpoint import convert, saved_on_grid

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: hf)")


FLIPPED = {
    "llama 2": ("embed_tokens.weight", 96, "embedding.weight has different values"),
    "qwen3": (
        "2.self_attn.q_norm.weight",
        3,
        "layers.2.attention.q_norm.weight has different values",
    ),
    "molmo2 native": (
        "positional_embedding",
        15,
        "vision.position_embedding.weight has different values",
    ),
}


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("name", FLIPPED)
def test_verify_sees_one_flipped_bit_and_keeps_no_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of only a few random tokens detects none of these."""
    tensor, row, message = FLIPPED[name]

    def faulty(source: Source, key: str) -> torch.Tensor:
        found = whole(source, key)
        if key.endswith(tensor):
            found = found.clone()
            found.view(torch.int32).view(len(found), -1)[row, 0] ^= 1
        return found

    save(name, tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b", "--verify") == 0
    flags = ("--tokenizer", "none") if "molmo2" in name else ()
    monkeypatch.setattr(hf_files, "whole", faulty)
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--verify", *flags) == 1
    assert message in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_an_export_keeps_the_length_that_the_model_is_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The length is not that of the tuning rows, unless no other length is known."""
    from megacp.train import main as train

    save("llama 2", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    base = read_checkpoint(tmp_path / "b", single_axis("world"))
    assert base.config.model.max_position_embeddings == 256
    given, config = (
        ["--config", str(base.folder / "config.yaml")],
        (base.folder / "config.yaml").read_text(),
    )
    flags = [
        "--global-batch-size",
        "1",
        "--train-iters",
        "1",
        "--seq-length",
        "32",
        "--load",
        str(tmp_path / "b"),
    ]
    flags += ["--lr", "0.001", "--finetune"]
    assert train([*given, *flags, "--save", str(tmp_path / "run")]) == 0
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "c", "--verify") == 0
    assert read(tmp_path / "c" / "config.json")["max_position_embeddings"] == 256
    given[1] = str(tmp_path / "without.yaml")
    Path(given[1]).write_text(
        config.replace("max_position_embeddings: 256", "max_position_embeddings: null")
    )
    assert train([*given, *flags, "--save", str(tmp_path / "lost")]) == 2
    assert "--max-position-embeddings" in capsys.readouterr().err
    saved_on_grid(0, 1, {}, {"dtype": "float32", "seq_length": 96}, str(tmp_path / "rows"), None)
    assert convert("megacp", "hf", tmp_path / "rows", tmp_path / "d", "--verify") == 0
    assert read(tmp_path / "d" / "config.json")["max_position_embeddings"] == 96


GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "temperature": 0.6,
    "top_p": 0.9,
    "do_sample": True,
}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama 2", "qwen3", "molmo2 released"])
@pytest.mark.parametrize("there", [True, False])
def test_generation_settings_and_special_ids_come_back(
    name: str, there: bool, tmp_path: Path
) -> None:
    model = save(name, tmp_path / "a")
    config = read(tmp_path / "a" / "config.json")
    if "molmo2" not in name:
        config |= {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 5}
        (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    given = tmp_path / "a" / "generation_config.json"
    given.write_text(json.dumps({**GENERATION, "pad_token_id": 5}))
    if not there:
        given.unlink()
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    flags = ("--tokenizer", str(tmp_path / "b" / "tokenizer.json") if "molmo2" in name else "none")
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", *flags) == 0
    known = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    assert {key: read(tmp_path / "c" / "config.json")[key] for key in known} == known
    generation = read(tmp_path / "c" / "generation_config.json")
    assert (
        generation == {**GENERATION, "pad_token_id": 5}
        if there
        else known.items() <= generation.items()
    )
    loaded = type(model).from_pretrained(tmp_path / "c")
    assert not there or loaded.generation_config.eos_token_id == [1, 2]


def test_stale_weights_of_other_formats_are_not_copied(tmp_path: Path) -> None:
    """A library may load the old model's weights instead of the written ones."""
    save("llama 2", tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").unlink()
    for name in (
        "tf_model.h5",
        "model.onnx",
        "last.ckpt",
        "other.safetensors.index.json",
        "LICENSE",
    ):
        (tmp_path / "a" / name).write_text("")
    assert convert("hf", "hf", tmp_path / "a", tmp_path / "b") == 0
    names = {"LICENSE", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names


Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: `theirs` (Hugging Face), `ours` (its conversion), `cut` (a checkpoint without its
    end), and more.
    """
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
    """Return the single error line of a refused conversion."""
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
    assert (
        error.startswith(f"error: --input {given}: ")
        and hint in error
        and list(tmp_path.iterdir()) == []
    )


@pytest.mark.parametrize("flags", [("--layout", "released")])
def test_flags_that_do_not_fit_the_input_are_refused(
    flags: Any, folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert flags[0] in refusal(capsys, "hf", "hf", folders / "theirs", tmp_path / "x", *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "output", ["theirs", "file", "link", "file/x", "file/y/x", "/proc/nowhere/x", "x" * 300]
)
def test_an_output_that_cannot_be_is_named_with_its_flag(
    output: str, folders: Path, capsys: Capture
) -> None:
    before = sorted(path.name for path in folders.iterdir())
    error = refusal(capsys, "hf", "hf", folders / "theirs", folders / output)
    assert error.startswith(f"error: --output {folders / output} ")
    assert sorted(path.name for path in folders.iterdir()) == before
