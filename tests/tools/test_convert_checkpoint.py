"""Conversion of checkpoints: round trips bit for bit, logits of the transformers library, and
refused inputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.distributed.grid import single_axis
from megacp.engine.config.yaml_file import to_yaml
from megacp.engine.data_parallel.boxes import boxes_to_save
from megacp.engine.step.step import ParallelModel
from megacp.huggingface.convert import family, verify, words
from megacp.huggingface.convert.families import FAMILIES
from megacp.huggingface.convert.source import read_checkpoint, read_hf
from megacp.huggingface.convert.tensors import STACKS, WIDE
from megacp.huggingface.convert.verify import (
    compare_logits,
    logits_of,
    rows_for,
    tensor_differences,
)
from megacp.huggingface.convert_command import main
from megacp.train import main as train
from megacp.training.loop.state import RunState
from megacp.verify.cases import MODELS as OURS
from tests.huggingface.convert.models import MODELS, packed, save
from tests.prepare.media.pictures import TINY
from tests.ranks import grid, run_ranks
from tests.reference.training import Values, config_of
from tests.training.checkpoint.saves import save_checkpoint

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: test)"
)
safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed (extra: hf)"
)

ROOT = Path(__file__).resolve().parents[2]


def convert(source: str, target: str, given: Path, output: Path, *flags: str) -> int:
    return main(
        ["--from", source, "--to", target, "--input", str(given), "--output", str(output), *flags]
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder.

    The two tables of a released embedding may be split anywhere, so they count as one.
    """
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.load_file(path)
    tables = [
        found.pop(f"model.transformer.wte.{name}", None) for name in ("embedding", "new_embedding")
    ]
    return found if tables[0] is None else {**found, "wte": torch.cat(tables)}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def loaded(folder: Path) -> Any:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model, info = getattr(transformers, FAMILIES[kind].cls).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the model in a config.

    Layers counted from the end of three layers are the same layers.
    """
    ignored = {"transformers_version", "_name_or_path", "dtype"}
    found = {
        k: plain(v) if isinstance(v, dict) else v for k, v in config.items() if k not in ignored
    }
    if "vision_feature_layer" in found:
        found["vision_feature_layer"] = [layer % 3 for layer in found["vision_feature_layer"]]
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_model_comes_back_bit_for_bit_and_is_the_same_model_on_the_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require that logits differ by less than float32 changes our own, because sums have another
    order on each processor.
    """
    monkeypatch.setattr(verify, "_TOLERANCE", 0.0)
    model = save(name, tmp_path / "a")
    layout = ("--layout", "released") if name == "molmo2 released" else ()
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b", "--verify") == 0
    flags = ("--tokenizer", str(tmp_path / "b" / "tokenizer.json")) if "molmo2" in name else ()
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--verify", *layout, *flags) == 0
    text = capsys.readouterr().out
    rows = 6 if "molmo2" in name else 4 if "images" in name else 2
    assert text.count("verify: random text") == 2 and text.count("verify: random") == rows
    assert text.count("100.00 %") == rows
    if "stacked" not in name:  # experts are exported separately, like in released models
        assert equal(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c"))
    again = loaded(tmp_path / "c")
    assert equal(model.state_dict(), again.state_dict())
    before, after = plain(model.config.to_dict()), plain(again.config.to_dict())
    new = {"eos_token_id", "bos_token_id", "pad_token_id"} - set(
        before
    )  # a tokenizer may have more fields than its model
    assert before == {key: value for key, value in after.items() if key not in new}
    if "molmo2" in name:
        assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
            tmp_path / "c" / "tokenizer.json"
        ).read_bytes()


def test_a_correction_stays_float32_and_a_further_layer_is_left(tmp_path: Path) -> None:
    save("glm4_moe", tmp_path / "a", torch.bfloat16)
    exact, further = (
        torch.linspace(-0.1, 0.1, 8),
        {"model.layers.3.eh_proj.weight": torch.zeros(2).bfloat16()},
    )
    tensors = {
        name: exact.clone() if name.endswith(WIDE) else x
        for name, x in tensors_of(tmp_path / "a").items()
    }
    safetensors.save_file(tensors | further, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--dtype", "bfloat16") == 0
    assert equal(tensors_of(tmp_path / "c"), tensors)


@pytest.mark.slow
def test_a_folder_of_four_bits_is_the_librarys_model_and_is_written_in_bfloat16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("gpt_oss of 32", tmp_path / "a", torch.bfloat16)
    tensors, config = tensors_of(tmp_path / "a"), tmp_path / "a" / "config.json"
    for name in [name for name in tensors if name.endswith(STACKS)]:
        count, inner, outer = tensors.pop(name).shape
        tensors |= {
            f"{name}{end}": x for end, x in packed(outer, inner, seed=outer, count=count).items()
        }
    safetensors.save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    config.write_text(
        json.dumps(
            {**json.loads(config.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
        )
    )
    assert convert("hf", "hf", tmp_path / "a", tmp_path / "b", "--verify") == 0
    assert capsys.readouterr().out.count("100.00 %") == 1
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_keep_their_type_and_change_it_on_demand(dtype: str, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "a", getattr(torch, dtype))
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c") == 0
    assert equal(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c"))
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype, (
        "the second is for libraries before version 5"
    )
    assert (
        convert("megacp", "hf", tmp_path / "b", tmp_path / "d", "--dtype", "bfloat16", "--verify")
        == 0
    )
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(tmp_path / "a").items()}
    assert equal(tensors_of(tmp_path / "d"), expected)


def test_a_conversion_is_whole_when_nobody_reads_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen3", tmp_path / "a")
    (closed := io.StringIO()).close()
    for name, stream in (("b", closed), ("c", None)):
        monkeypatch.setattr(sys, "stdout", stream)
        assert convert("hf", "megacp", tmp_path / "a", tmp_path / name) == 0


@pytest.mark.slow
def test_both_layouts_of_a_molmo2_become_each_other(tmp_path: Path) -> None:
    model = save("molmo2 released", tmp_path / "a")
    assert (
        convert("hf", "hf", tmp_path / "a", tmp_path / "b", "--layout", "native", "--verify") == 0
    )
    assert (
        convert("hf", "hf", tmp_path / "b", tmp_path / "c", "--layout", "released", "--verify") == 0
    )
    assert equal(tensors_of(tmp_path / "c"), tensors_of(tmp_path / "a"))
    assert tensors_of(tmp_path / "b").keys() == model.state_dict().keys(), "the library's own names"
    raw = safetensors.load_file(tmp_path / "c" / "model.safetensors")
    assert (
        len(raw["model.transformer.wte.embedding"]) == 257
        and len(raw["model.transformer.wte.new_embedding"]) == 8
    )
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["vit_config"]["image_num_pos"] == 16 and config["adapter_config"][
        "vit_layers"
    ] == [2, 0]
    for folder in ("b", "c"):
        assert equal(loaded(tmp_path / folder).state_dict(), model.state_dict())
        assert (tmp_path / folder / "processor_config.json").is_file()


def test_rows_of_q_and_k_are_rotated_by_halves_and_another_order_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interleaved pairs have the same names and shapes as halves; only logits reveal the
    difference.
    """
    save("llama 2", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    path = tmp_path / "a" / "model.safetensors"
    tensors = safetensors.load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].view(4, 2, 6, 48).transpose(1, 2).reshape(48, 48).contiguous()
    safetensors.save_file(tensors, path, {"format": "pt"})
    ours, theirs = read_checkpoint(tmp_path / "b", single_axis("world")), read_hf(tmp_path / "a")
    agrees, words = compare_logits(
        logits_of(ours), logits_of(theirs), rows_for(ours.config, None)["random text"]
    )
    assert not agrees and float(words.partition("(")[2].split()[0]) > 1e-2
    assert len(tensor_differences(ours.source, theirs.source)) == 1


def test_a_difference_ends_verify_with_status_1_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llama 3 tied", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    write = words.rope_fields
    monkeypatch.setattr(
        words, "rope_fields", lambda values: write({**values, "rotary_base": 10_000.0})
    )

    def unchecked(self: Any, values: Any, layout: str = "native") -> dict[str, Any]:
        return {"architectures": [self.cls], "model_type": self.name, **self.to_hf(values)}

    monkeypatch.setattr(family.Family, "config", unchecked)
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--verify") == 1
    captured = capsys.readouterr()
    assert (
        "would differ from the model in --input" in captured.err
        and "--rotary-base is 500.0 in the input" in captured.out
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def saved_on_grid(
    rank: int,
    world_size: int,
    shape: dict[str, int],
    values: Values,
    folder: str,
    rules: dict[str, Any] | None,
) -> None:
    mine, config = grid(**shape), config_of({**values, "save": folder}, shape)
    model = ParallelModel(config, mine)
    boxes = boxes_to_save(
        model.parameters.parameter_slices(), model.optimizer.state_slices(), model.parameters.counts
    )
    extra = dataclasses.asdict(RunState(step=3, consumed_samples=24, image_rules=rules)) | {
        "updates": 3
    }
    save_checkpoint(
        folder, 3, boxes, extra=extra, config_yaml=to_yaml(config), world=mine.world, grid=shape
    )


GRIDS: dict[str, tuple[dict[str, int], Values]] = {
    "tp2 pp2 with virtual stages cp2": (
        {"tp": 2, "pp": 2, "cp": 2},
        {
            "num_virtual_stages_per_pipeline_rank": 2,
            "sequence_parallel": True,
            "cp_comm_type": "p2p",
        },
    ),
    "dp2 tp4": ({"dp": 2, "tp": 4}, {}),
}


def exported(folder: Path, *flags: str) -> dict[str, str]:
    assert convert("megacp", "hf", folder, folder.with_suffix(".hf"), "--verify", *flags) == 0
    files = {*folder.with_suffix(".hf").iterdir()}
    files.remove(folder.with_suffix(".hf") / "README.md")  # the model card names the grid
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


VISION: Values = {
    **OURS["tiny_vlm"],
    "vocab_size": 257,
    "num_query_groups": 4,
    "qk_layernorm": "head",
}
SAVED: dict[str, tuple[Values, dict[str, Any] | None, tuple[str, ...]]] = {
    "tied": ({"num_query_groups": 4, "untie_embeddings_and_output_weights": False}, None, ()),
    "untied": ({"num_query_groups": 4, "untie_embeddings_and_output_weights": True}, None, ()),
    "experts": ({"num_query_groups": 4, "num_experts": 8, "qk_layernorm": "head"}, None, ()),
    "vision": (VISION, TINY.to_dict(), ("--layout", "released", "--tokenizer", "byte")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVED)
def test_checkpoints_of_any_grid_become_equal_files(kind: str, tmp_path: Path) -> None:
    """53 vocabulary rows are padded to 64 by tp 4, and a tied head is on another virtual stage than
    its embedding.
    """
    values, rules, flags = SAVED[kind]
    saved_on_grid(0, 1, {}, {**values, "dtype": "float32"}, str(tmp_path / "one"), rules)
    expected = exported(tmp_path / "one", *flags)
    tensors = tensors_of(tmp_path / "one.hf")
    if kind != "vision":
        assert tensors["model.embed_tokens.weight"].shape == (53, 32)
        assert ("lm_head.weight" in tensors) == (kind == "untied")
    for number, (shape, more) in enumerate(GRIDS.values()):
        folder = tmp_path / f"grid{number}"
        if kind == "experts":
            shape, more = {**shape, "ep": 4}, {**more, "sequence_parallel": True}
        run_ranks(
            saved_on_grid, 8, shape, {**values, **more, "dtype": "float32"}, str(folder), rules
        )
        assert exported(folder, *flags) == expected


NORM, TABLE = "model.norm.weight", "model.embed_tokens.weight"
DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({NORM: None}, f"{NORM} is missing"),
    ({"model.extra": torch.zeros(2)}, "model.extra is unexpected"),
    (
        {TABLE: torch.zeros(104, 48)},
        f"{TABLE} has shape (104, 48), but the config requires (97, 48)",
    ),
    ({NORM: torch.ones(48).half()}, "final_norm.weight float16): choose one with --dtype"),
]


def test_a_folder_of_two_dtypes_takes_that_of_its_config_as_the_library_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama 2", tmp_path / "a", torch.bfloat16)
    mixed = {**tensors_of(tmp_path / "a"), NORM: torch.linspace(0.5, 1.5, 48)}
    safetensors.save_file(mixed, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_model_name_or_path": "b"}))
    assert convert("hf", "hf", tmp_path / "a", tmp_path / "b", "--verify") == 0
    library = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", dtype="auto"
    ).state_dict()
    assert torch.equal(tensors_of(tmp_path / "b")[NORM], library[NORM])
    assert (
        train(
            [
                "--load-hf",
                str(tmp_path / "a"),
                "--dry-run",
                "--train-iters",
                "1",
                "--seq-length",
                "64",
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert (
        told.count("_model_name_or_path") == told.count("converted to bfloat16") == 2
        and ", bfloat16\n" in told
    )
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "c", "--dtype", "float32") == 0
    assert "converted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "message"), DAMAGE, ids=["missing", "unexpected", "padded", "another dtype"]
)
def test_a_file_that_does_not_fit_its_config_is_refused_by_name(
    other: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama 2", tmp_path / "a")
    changed = {**tensors_of(tmp_path / "a"), **other}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    safetensors.save_file(kept, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_tied_head_may_be_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("qwen3 tied", tmp_path / "a")
    tensors = tensors_of(tmp_path / "a")
    for name, head in (("same", tensors[TABLE].clone()), ("other", -tensors[TABLE])):
        with_head = {**tensors, "lm_head.weight": head}
        safetensors.save_file(with_head, tmp_path / "a" / "model.safetensors", {"format": "pt"})
        assert convert("hf", "megacp", tmp_path / "a", tmp_path / name, "--verify") == 0
        assert ("lm_head.weight differs from" in capsys.readouterr().out) is (name == "other")


def test_a_checkpoint_is_not_exported_without_its_own_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("molmo2 released", tmp_path / "a")
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "beside") == 0, (
        "the one beside it is its own"
    )
    assert (tmp_path / "beside" / "tokenizer.json").read_bytes() == (
        tmp_path / "a" / "tokenizer.json"
    ).read_bytes()
    with (tmp_path / "b" / "tokenizer.json").open("a") as stream:
        stream.write("\n")  # differs from the run's file
    for flags, message in (
        ((), "was trained with a tokenizer: set it with --tokenizer"),
        (("--chat-template", "messages"), "--chat-template messages requires --tokenizer"),
        (("--tokenizer", "byte"), "--tokenizer byte differs from"),
    ):
        assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", *flags) == 2
        assert message in capsys.readouterr().err
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--tokenizer", "none") == 0
    assert not (tmp_path / "c" / "tokenizer.json").exists()


def test_a_folder_has_all_that_belongs_to_a_model(tmp_path: Path) -> None:
    save("llama 3 tied", tmp_path / "a", max_shard_size="20KB")
    assert convert("hf", "hf", tmp_path / "a", tmp_path / "copy") == 0, (
        "shards with an index are read"
    )
    assert convert("hf", "megacp", tmp_path / "a", tmp_path / "b") == 0
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "c", "--tokenizer", "none") == 0
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == names
    (tmp_path / "b" / "generation_config.json").unlink()
    assert convert("megacp", "hf", tmp_path / "b", tmp_path / "d", "--tokenizer", "none") == 0
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["bos_token_id"] is None and config["eos_token_id"] is None, (
        "a Llama's own defaults are 1 and 2"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("megacp", "megacp"), "any device grid can load a megacp checkpoint"),
        (("hf", "megacp", "--layout", "native"), "--layout requires --to hf"),
        (("hf", "hf", "--tokenizer", "byte"), "--tokenizer requires --from megacp"),
        (("hf", "hf", "--max-shard-size", "0"), "--max-shard-size 0: must be at least 1"),
        (("hf", "megacp", "--dtype", "float16"), "--dtype float16"),
    ],
)
def test_flags_that_contradict_are_refused(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        convert(flags[0], flags[1], tmp_path, tmp_path / "b", *flags[2:])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
