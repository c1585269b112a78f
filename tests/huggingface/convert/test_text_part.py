"""The text model of a folder with an unsupported vision tower.

Its logits equal the library's, and it is exported as a text folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.huggingface.convert.source import read_hf
from megacp.huggingface.convert.text_part import TEXT_PARTS
from megacp.huggingface.convert.verify import our_logits, rows_for
from megacp.huggingface.convert_command import main
from megacp.train import main as train
from tests.huggingface.convert.models import NO_IDS
from tests.huggingface.convert.text_parts import GEMMA, IMAGE, INDEX, MADE, VIDEO, made, saved
from tests.reference.precision import float32_is_float64

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: test)"
)
safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed (extra: hf)"
)

TOKENS = torch.arange(1, 60)[None]


def converted(target: str, given: Path, output: Path) -> int:
    return main(["--from", "hf", "--to", target, "--input", str(given), "--output", str(output)])


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS).logits[0]


def test_every_row_of_the_table_is_tested() -> None:
    assert MADE.keys() == TEXT_PARTS.keys()


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_the_text_part_has_the_logits_of_the_whole_model(
    name: str,
    original: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with float32_is_float64(monkeypatch):
        model = made(name)
        model.save_pretrained(tmp_path / "a", save_original_format=original)
        assert converted("hf", tmp_path / "a", tmp_path / "b") == 0
        told = capsys.readouterr().out
        assert f"{name}: only the text model is used, without the vision tower" in told
        loaded = read_hf(tmp_path / "a")
        row = rows_for(loaded.config, None)["random text"]
        ids = torch.from_numpy(row.tokens)[None]
        text, info = getattr(transformers, loaded.family.cls).from_pretrained(
            tmp_path / "b", dtype=torch.float64, output_loading_info=True
        )
        assert not any(
            info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0]
            exported = text.eval()(input_ids=ids).logits[0]
        ours = our_logits(loaded.config, loaded.source, "float64")(row)
    largest = float(expected.abs().max())
    assert float((exported - expected).abs().max()) <= 1e-13 * largest
    assert float((ours - expected).abs().max()) <= 1e-12 * largest


def published_gemma3(content: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the config as first published.

    Fields at their defaults are missing, and rope_scaling applies to full layers.
    """
    text = {name: content["text_config"][name] for name in GEMMA if name not in NO_IDS}
    del text["intermediate_size"]
    text |= {"intermediate_size": 80, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outside = {
        "boi_token_index": 91,
        "eoi_token_index": 92,
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
    }
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": content["vision_config"],
        **INDEX,
        **outside,
    }


def published_qwen2_5_vl(content: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the config with the text model's fields at the top."""
    text = {
        name: value
        for name, value in content["text_config"].items()
        if name not in ("rope_parameters", "dtype")
    }
    text |= {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    text |= {
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 70,
        "layer_types": None,
    }
    return {
        **text,
        "vision_config": content["vision_config"],
        "model_type": "qwen2_5_vl",
        **IMAGE,
        **VIDEO,
    }


@pytest.mark.parametrize(
    ("name", "older"), [("gemma3", published_gemma3), ("qwen2_5_vl", published_qwen2_5_vl)]
)
def test_configs_of_older_versions_are_read_as_the_library_reads_them(
    name: str, older: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "a")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(older(content)))
    assert converted("hf", folder, tmp_path / "b") == 0
    loaded = read_hf(folder)
    cls = getattr(transformers, TEXT_PARTS[name].cls)
    expected = logits_of(cls.from_pretrained(folder, dtype=torch.float64).eval())
    text = (
        getattr(transformers, loaded.family.cls)
        .from_pretrained(tmp_path / "b", dtype=torch.float64)
        .eval()
    )
    assert float((logits_of(text) - expected).abs().max()) <= 1e-13 * float(expected.abs().max())
    if name == "gemma3":
        assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == [1, 106]


def test_a_run_from_the_folder_is_exported_as_a_text_model(tmp_path: Path) -> None:
    folder, run, out = saved("gemma3", tmp_path / "a"), tmp_path / "run", tmp_path / "out"
    (folder / "preprocessor_config.json").write_text("{}")
    flags = ["--load-hf", str(folder), "--seq-length", "32", "--train-iters", "1", "--lr", "1e-30"]
    assert train([*flags, "--save", str(run), "--log-file", "/dev/null"]) == 0
    flags = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--tokenizer",
        "none",
        "--input",
        str(run),
        "--output",
        str(out),
    ]
    assert main(flags) == 0
    content = json.loads((out / "config.json").read_text())
    assert content["model_type"] == "gemma3_text" and content["architectures"] == [
        "Gemma3ForCausalLM"
    ]
    assert converted("hf", folder, tmp_path / "b") == 0
    assert not (tmp_path / "b" / "preprocessor_config.json").exists()
    first, second = (
        safetensors.load_file(place / "model.safetensors") for place in (out, tmp_path / "b")
    )
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = safetensors.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_whatever_a_tower_holds_is_left_out_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("gemma3", tmp_path / "a", save_original_format=True)
    numbers = {
        "vision_tower.embeddings.position_ids": torch.arange(4),
        "vision_tower.x": torch.tensor([torch.nan]),
    }
    _tensors(folder, lambda tensors: tensors.update(numbers))
    assert converted("megacp", folder, tmp_path / "b") == 0
    _tensors(folder, lambda tensors: tensors.update({"audio_tower.x": torch.ones(2)}))
    capsys.readouterr()
    assert converted("megacp", folder, tmp_path / "c") == 2
    assert "audio_tower.x is unexpected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text_config": None}, "text_config is null, expected an object"),
        ({"text_config": [1]}, "text_config is [1], expected an object"),
        ({"text_config": {"model_type": "gemma2"}}, "model_type 'gemma2' is not supported"),
        ({"text_config": {"model_type": 5}}, "model_type 5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is unknown"),
    ],
)
def test_a_config_without_a_text_model_of_ours_is_refused(
    change: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("gemma3", tmp_path / "a")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **change}))
    assert converted("megacp", folder, tmp_path / "b") == 2
    assert expected in capsys.readouterr().err
