"""Converting what surrounds the weights: how a model generates, its special ids, its checkpoint's state, old files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.convert.models import save
from tests.tools.test_convert_checkpoint import convert

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

GENERATION = {"bos_token_id": 0, "eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize("name", ["llama 2", "qwen3", "molmo2 released"])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.slow
def test_generation_settings_and_special_ids_come_back(name: str, there: bool, tmp_path: Path) -> None:
    """Would catch all but one end token lost, sampling settings lost, and ids that become null."""
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
    after = read(tmp_path / "c" / "config.json")
    known = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    assert {key: after[key] for key in known} == known
    generation = read(tmp_path / "c" / "generation_config.json")
    if there:
        assert generation == {**GENERATION, "pad_token_id": 5}
    else:
        assert {key: generation[key] for key in known} == known
    loaded = type(model).from_pretrained(tmp_path / "c")
    if there:
        assert loaded.generation_config.eos_token_id == [1, 2] and loaded.generation_config.temperature == 0.6


def test_stale_weights_of_other_formats_are_not_copied(tmp_path: Path) -> None:
    """Would catch weights of the model before, which a library may prefer to those that were written."""
    save("llama 2", tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").unlink()
    stale = ("tf_model.h5", "flax_model.msgpack", "model.onnx", "last.ckpt", "other.safetensors.index.json")
    for name in (*stale, "LICENSE"):
        (tmp_path / "a" / name).write_text("")
    content = {**read(tmp_path / "a" / "config.json"), "pretraining_tp": 1}
    (tmp_path / "a" / "config.json").write_text(json.dumps(content))
    assert convert("hf", "hf", tmp_path / "a", tmp_path / "b") == 0
    names = {"LICENSE", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names
    assert read(tmp_path / "b" / "generation_config.json").keys() <= set(SPECIAL)
