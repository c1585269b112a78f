"""--verify: faults that a conversion could have, one by one, and how each is seen; the length that a model is for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.core.config.yaml_file import to_yaml
from megacp.core.distributed.grid import single_axis
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.source import read_checkpoint
from megacp.huggingface.convert.tables import fields
from megacp.huggingface.convert.tables.mapping import Source, whole
from tests.huggingface.convert.models import save
from tests.tools.test_convert_checkpoint import convert, saved_on_grid

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: hf)")

Fault = Callable[[pytest.MonkeyPatch], None]


def one_row_of(tensor: str, row: int) -> Fault:
    """A writer that changes one element of one tensor by its last bit."""

    def faulty(source: Source, name: str) -> torch.Tensor:
        found = whole(source, name)
        if not name.endswith(tensor):
            return found
        found = found.clone()
        found.view(torch.int32).view(len(found), -1)[row, 0] ^= 1
        return found

    return lambda patch: patch.setattr(hf_files, "whole", faulty)


def another_number(field: str, value: float) -> Fault:
    """A writer that puts another number into config.json."""
    write = fields.Same.write

    def faulty(self: Any, values: Any, content: Any, reasons: Any) -> None:
        write(self, values, content, reasons)
        if self.theirs.endswith(field):
            content[self.theirs] = value

    return lambda patch: patch.setattr(fields.Same, "write", faulty)


def another_key(field: str, key: str) -> Fault:
    """A table that is wrong in both directions: the number comes back, but the library never sees it."""
    write, read = fields.Same.write, fields.Same.read

    def faulty_write(self: Any, values: Any, content: Any, reasons: Any) -> None:
        write(self, values, content, reasons)
        if self.theirs.endswith(field):
            content[self.theirs.removesuffix(field) + key] = content.pop(self.theirs)

    def faulty_read(self: Any, theirs: Any, values: Any, reasons: Any) -> None:
        read(self, theirs, values, reasons)
        found = theirs.get(self.theirs.removesuffix(field) + key) if self.theirs.endswith(field) else None
        if found is not None:
            values[self.ours] = found

    def patch(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fields.Same, "write", faulty_write)
        patch.setattr(fields.Same, "read", faulty_read)

    return patch


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "a row of the embedding": ("llama 2", one_row_of("embed_tokens.weight", 96), "embedding.weight differs in 1 row"),
    "a row of the head": ("llama 2", one_row_of("lm_head.weight", 40), "head.weight differs in 1 row, first 40"),
    "a norm": ("qwen3", one_row_of("2.self_attn.q_norm.weight", 3), "layers.2.attention.q_norm.weight differs"),
    "a position of the tower": (
        "molmo2 native",
        one_row_of("positional_embedding", 15),
        "vision.position_embedding.weight differs in 1 row, first 15",
    ),
    "an epsilon": ("llama 2", another_number("rms_norm_eps", 1e-6), "--norm-epsilon is 1e-05 in what was read"),
    "positions": ("llama 2", another_number("max_position_embeddings", 64), "--max-position-embeddings is 256 in"),
    "an epsilon that the library does not see": ("llama 2", another_key("rms_norm_eps", "norm_eps"), "quiet text"),
    "an epsilon of the tower that it does not see": (
        "molmo2 native",
        another_key("layer_norm_eps", "eps"),
        "quiet image",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_verify_sees_each_fault_and_keeps_no_folder(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a comparison of a few random tokens alone, which sees none of these."""
    name, inject, message = FAULTS[kind]
    save(name, tmp_path / "a")
    if name == "molmo2 native":
        path = tmp_path / "a" / "config.json"
        content = json.loads(path.read_text())
        content["vision_config"]["layer_norm_eps"] = 1e-5
        path.write_text(json.dumps(content))
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b", "--verify") == 0
    flags = ("--tokenizer", "none") if "molmo2" in name else ()
    inject(monkeypatch)
    capsys.readouterr()
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--verify", *flags) == 1
    captured = capsys.readouterr()
    assert "would be another model" in captured.err
    assert message in captured.out
    if message.startswith("quiet"):
        (share,) = re.findall(rf"{message}: .*\((\S+) of it\)", captured.out)
        assert float(share) > 0.1, "the probe shows an epsilon as a part of the logits, not as rounding"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_verify_counts_the_tensors_that_it_compared_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama 3 tied", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b", "--verify") == 0
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--verify", "--dtype", "bfloat16") == 0
    text = capsys.readouterr().out
    assert text.count("verify: all 29 tensors are those of what was read, bit for bit") == 2
    assert text.count("verify: the transformers library holds the same 29 tensors") == 2


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
    capsys.readouterr()
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "c", "--tokenizer", "byte") == 2
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "c", "--verify") == 0
    assert "max_position_embeddings is 256, as the model's config says" in capsys.readouterr().out
    assert json.loads((tmp_path / "c" / "config.json").read_text())["max_position_embeddings"] == 256
    lost = [*flags, "--no-finetune", "--finetune", "--save", str(tmp_path / "lost")]
    text = to_yaml(base.config).replace("max_position_embeddings: 256", "max_position_embeddings: null")
    (tmp_path / "without.yaml").write_text(text)
    lost[1] = str(tmp_path / "without.yaml")
    assert train(lost) == 2
    assert "has --max-position-embeddings 256, this run None" in capsys.readouterr().err
    assert train([*lost, "--max-position-embeddings", "512"]) == 0, "another number that was asked for"


def test_a_checkpoint_that_does_not_say_is_exported_with_a_line_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of older versions have no such key; a model from scratch is for its --seq-length."""
    saved_on_grid(0, 1, {}, {"dtype": "float32", "seq_length": 96}, str(tmp_path / "run"), None)
    path = next((tmp_path / "run").glob("step_*")) / "config.yaml"
    assert "max_position_embeddings: null\n" in path.read_text()
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "a", "--verify", "--tokenizer", "byte") == 2
    capsys.readouterr()
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "a", "--verify") == 0
    line = "max_position_embeddings is 96, the run's --seq-length: its config names no length"
    assert line in capsys.readouterr().out
    flags = ("--max-position-embeddings", "4096", "--verify")
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "b", *flags) == 0
    found = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert [content["max_position_embeddings"] for content in found] == [96, 4096]
