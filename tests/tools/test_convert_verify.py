"""--verify: faults that a conversion could have and how each is seen; the length that a model is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megacp.core.config.yaml_file import to_yaml
from megacp.core.distributed.grid import single_axis
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.source import read_checkpoint
from megacp.huggingface.convert.tensors import Source, whole
from tests.huggingface.convert.models import save
from tests.tools.test_convert_checkpoint import convert, saved_on_grid

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: hf)")

FLIPPED = {
    "llama 2": ("embed_tokens.weight", 96, "embedding.weight differs in 1 row"),
    "qwen3": ("2.self_attn.q_norm.weight", 3, "layers.2.attention.q_norm.weight differs"),
    "molmo2 native": ("positional_embedding", 15, "vision.position_embedding.weight differs in 1 row, first 15"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLIPPED)
def test_verify_sees_one_flipped_bit_and_keeps_no_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a comparison of a few random tokens alone, which sees none of these."""
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
    captured = capsys.readouterr()
    assert "would be another model" in captured.err and message in captured.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_an_export_keeps_the_length_that_the_model_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a 256-position model capped at the 32 tokens of the rows that it was tuned on."""
    from megacp.train import main as train

    save("llama 2", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    base = read_checkpoint(tmp_path / "b", single_axis("world"))
    assert base.config.model.max_position_embeddings == 256
    flags = ["--config", str(base.folder / "config.yaml"), "--global-batch-size", "1", "--train-iters", "1"]
    flags += ["--lr", "0.001", "--seq-length", "32", "--load", str(tmp_path / "b"), "--finetune"]
    assert train([*flags, "--save", str(tmp_path / "run")]) == 0
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "c", "--verify") == 0
    assert json.loads((tmp_path / "c" / "config.json").read_text())["max_position_embeddings"] == 256
    text = to_yaml(base.config).replace("max_position_embeddings: 256", "max_position_embeddings: null")
    (tmp_path / "without.yaml").write_text(text)
    assert train(["--config", str(tmp_path / "without.yaml"), *flags[2:], "--save", str(tmp_path / "lost")]) == 2
    assert "--max-position-embeddings" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_its_length_is_for_its_rows(tmp_path: Path) -> None:
    saved_on_grid(0, 1, {}, {"dtype": "float32", "seq_length": 96}, str(tmp_path / "run"), None)
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "a", "--verify") == 0
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "b", "--max-position-embeddings", "4096") == 0
    found = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert [content["max_position_embeddings"] for content in found] == [96, 4096]
