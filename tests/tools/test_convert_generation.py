"""Converting what surrounds the weights: how a model generates, its special ids, its checkpoint's state, old files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.distributed.grid import single_axis
from megacp.train import main as train
from tests.huggingface.convert.models import save
from tests.prepare.media.pictures import TINY
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


def test_settings_beside_the_tokenizer_go_with_a_checkpoint_of_any_run(tmp_path: Path) -> None:
    """Would catch settings that are lost once the model was trained: a run's own folder has none."""
    save("molmo2 released", tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(GENERATION))
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    (tmp_path / "b" / "generation_config.json").unlink()
    flags = ("--tokenizer", str(tmp_path / "a" / "tokenizer.json"))
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", *flags) == 0
    assert read(tmp_path / "c" / "generation_config.json") == GENERATION
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "d", *flags, "--eod-token", "<im_low>") == 0
    end = TINY.token_ids["image_low_res"]
    assert read(tmp_path / "d" / "generation_config.json") == {**GENERATION, "eos_token_id": end}


@pytest.mark.slow
def test_forgetting_finetune_on_a_converted_model_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch the reason of another dataset or seed for weights that no run has trained."""
    save("llama 2", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    loaded = load_checkpoint(tmp_path / "b", single_axis("world"))
    assert loaded.extra == {"tokenizer_sha256": "", "image_rules": None}
    config = ["--config", str(loaded.path / "config.yaml"), "--global-batch-size", "2", "--train-iters", "1"]
    flags = [*config, "--lr", "0.001", "--seq-length", "32", "--seed", "3", "--load", str(tmp_path / "b")]
    flags = [*flags, "--log-file", str(tmp_path / "log.jsonl")]
    capsys.readouterr()
    assert train(flags) == 2
    error = capsys.readouterr().err
    assert "holds weights without the state of a run: start from them by --finetune" in error
    assert "--seed" not in error and "dataset" not in error
    assert train([*flags, "--finetune"]) == 0
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c") == 0
    assert "| samples seen | unknown |" in (tmp_path / "c" / "README.md").read_text()


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
