"""Settings of a model folder about images, adapters and training: used from build to export,
refused, or reported.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from megacp.engine.config.cli import given_names, parse
from megacp.huggingface.convert.source import read_hf
from megacp.huggingface.convert.start import open_start
from megacp.huggingface.convert_command import main as convert
from megacp.prepare.media.processor_files import IMAGES, PROCESSOR, VIDEOS, read_processor
from megacp.train import main as train
from megacp.train import plan_of
from megacp.training.data.reader import PackedDataset
from megacp.training.start import launch
from tests.huggingface.convert.models import qwen3, qwen3_5, save
from tests.huggingface.convert.test_start import q_adapter
from tests.prepare.media.test_processor_files import by_library
from tests.tools.in_process import preprocessed

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
]
TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PATCHES = {
    "patch_size": 4,
    "merge_size": 2,
    "image_mean": [0.25, 0.5, 0.75],
    "image_std": [0.5] * 3,
}
IMAGE = {**PATCHES, "size": {"shortest_edge": 64, "longest_edge": 1536}}
VIDEO = {
    **PATCHES,
    "size": {"shortest_edge": 128, "longest_edge": 4096},
    "fps": 4,
    "max_frames": 32,
}


def with_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes and Qwen's chat markers, with the ids of image tokens in
    config.json.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    fields = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {
        field: tokenizer.token_to_id(mark) for field, mark in zip(fields, MARKS[2:], strict=True)
    }
    changed(folder / "config.json", **ids)


def changed(path: Path, **values: Any) -> None:
    """Rewrite a JSON file with other values; None removes a field."""
    content = {**(json.loads(path.read_text()) if path.is_file() else {}), **values}
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None})
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Qwen3.5 whose processor files differ from their defaults."""
    place = tmp_path_factory.mktemp("model") / "qwen"
    torch.manual_seed(0)
    qwen3_5(vocab_size=264).save_pretrained(place)
    (place / IMAGES).write_text(json.dumps(IMAGE))
    (place / VIDEOS).write_text(json.dumps(VIDEO))
    with_tokenizer(place)
    return place


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return eight conversations about an image of 96 x 64, and eight without an image."""
    place = tmp_path_factory.mktemp("records")
    Image.new("RGB", (96, 64), (9, 99, 199)).save(place / "a.png")
    ask: list[Any] = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "?"}]
    for name, content in (("images", ask), ("text", "?")):
        talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "Four."}]
        (place / f"{name}.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    return place


def built(
    records: Path, output: Path, tokenizer: Path, *flags: object, kind: str = "images"
) -> str:
    """Build packs; return the output."""
    basic = [
        "build",
        "--input",
        records / f"{kind}.jsonl",
        "--output",
        output,
        "--tokenizer",
        tokenizer,
        "--overwrite",
    ]
    basic += ["--seq-length", 128, "--workers", 1] + (
        ["--image-root", records] if kind == "images" else []
    )
    done = preprocessed(*basic, *flags)
    assert done.returncode == 0, done.stderr
    return done.stderr


def rules_of(dataset: Path) -> dict[str, Any]:
    rules = PackedDataset(dataset).manifest.image_rules
    assert rules is not None
    return rules


def refusal(*flags: object) -> str:
    with pytest.raises(ValueError) as refused:
        plan_of([*map(str, flags), "--log-file", "/dev/null"], launch.World())
    return str(refused.value)


def test_a_build_takes_the_rules_of_the_folder_and_says_from_which_files(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    for tokenizer in (folder, folder / "tokenizer.json"):
        told = built(records, tmp_path / "d", tokenizer)
        assert (
            f"image rules: read from {IMAGES}, {VIDEOS} in {folder}" in told
            and "the flag is used" not in told
        )
        rules, expected = rules_of(tmp_path / "d"), by_library(folder, "qwen3_5")
        assert {name: rules[name] for name in expected} == expected
        tokens, ids = PackedDataset(tmp_path / "d").pack(0).tokens, rules["token_ids"]
        # 1536 pixels at most: 48 x 32, which are 6 x 4 windows of 8 x 8
        assert (tokens == ids["image_patch"]).sum() == 24 * (tokens == ids["vision_end"]).sum() > 0


def test_a_flag_counts_before_the_folder_and_the_line_has_both_numbers(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    told = built(records, tmp_path / "d", folder, "--video-fps", 2, "--max-frames", 32)
    assert (
        f"--video-fps is 2.0, {VIDEOS} fps says 4.0: the flag is used, and --load-hf {folder} "
        "refuses" in told
    )
    assert "--max-frames" not in told, "the same number is no news"
    assert rules_of(tmp_path / "d")["video_fps"] == 2.0


def test_a_folder_with_experts_is_of_the_same_family(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    experts = tmp_path / "experts"
    shutil.copytree(folder, experts, ignore=shutil.ignore_patterns("*.safetensors"))
    changed(experts / "config.json", model_type="qwen3_5_moe")
    assert "--vision-family qwen3_5: taken from" in built(records, tmp_path / "d", experts)
    assert rules_of(tmp_path / "d")["resize_pixels"] == [64, 1536]


def test_files_of_another_family_are_refused_or_reported(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    """With a flag, the family may differ from the folder's if its config.json names no known
    family.
    """
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.safetensors"))
    changed(other / IMAGES, image_processor_type="CLIPImageProcessor")
    basic = [
        "build",
        "--input",
        records / "images.jsonl",
        "--output",
        tmp_path / "d",
        "--tokenizer",
        other,
    ]
    basic += ["--seq-length", 512, "--image-root", records]
    done = preprocessed(*basic)
    assert (
        done.returncode == 2
        and "image_processor_type is 'CLIPImageProcessor', expected Qwen2VL" in done.stderr
    )
    changed(other / "config.json", model_type="llava")
    done = preprocessed(*basic, "--vision-family", "qwen3_5")
    assert done.returncode == 0 and f"image rules: files not used: {other}: {IMAGES}" in done.stderr


def test_a_processor_that_contradicts_the_tower_is_refused_at_the_build(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for name in (IMAGES, VIDEOS):
        changed(other / name, patch_size=8)
    basic = [
        "build",
        "--input",
        records / "images.jsonl",
        "--output",
        tmp_path / "d",
        "--tokenizer",
        other,
    ]
    done = preprocessed(*basic, "--seq-length", 512, "--image-root", records)
    assert (
        done.returncode == 2
        and "patch_size is 8, vision_config.patch_size of config.json is 4" in done.stderr
    )
    assert "its processor has patches of 8 pixels" in refusal("--load-hf", other)


def test_packs_by_other_rules_than_the_folder_are_refused_with_all_numbers(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    data = tmp_path / "d"
    built(
        records,
        data,
        folder,
        "--video-fps",
        2,
        "--image-mean",
        "0.5,0.5,0.5",
        "--resize-pixels",
        "64,4096",
    )
    told = refusal("--load-hf", folder, "--data-path", data)
    assert (
        f"--data-path {data} was built with different image rules from --load-hf {folder}" in told
    )
    assert f"--resize-pixels is 64,4096, {IMAGES} size says 64,1536" in told
    assert f"--image-mean is 0.5,0.5,0.5, {IMAGES} image_mean says 0.25,0.5,0.75" in told
    assert f"--video-fps is 2.0, {VIDEOS} fps says 4.0" in told and "Rebuild it" in told
    built(records, data, folder)
    assert plan_of(
        ["--load-hf", str(folder), "--data-path", str(data), "--log-file", "/dev/null"],
        launch.World(),
    )
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    changed(own / VIDEOS, max_frames=31)
    assert f"--max-frames is 32, {VIDEOS} max_frames says 31" in refusal(
        "--load-hf", own, "--data-path", data
    )


def test_packs_with_other_ids_of_image_tokens_are_refused(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    ids = {
        name: number
        for number, name in enumerate(("image_patch", "video_patch", "vision_start"), 200)
    }
    flag = ",".join(f"{name}={number}" for name, number in ids.items())
    built(records, tmp_path / "d", folder, "--image-token-ids", flag)
    assert "the id of image_patch is 200, but the folder's is 258" in refusal(
        *("--load-hf", folder, "--data-path", tmp_path / "d")
    )


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_export_writes_the_rules_of_the_folder(
    kind: str, folder: Path, records: Path, tmp_path: Path
) -> None:
    """The folder's rules are stored with the weights even if the packs have no images."""
    built(records, tmp_path / "d", folder, kind=kind)
    flags = [
        "--load-hf",
        str(folder),
        "--data-path",
        str(tmp_path / "d"),
        "--save",
        str(tmp_path / "run"),
    ]
    assert train([*flags, "--train-iters", "1", "--global-batch-size", "1"]) == 0
    export = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "run"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert convert(export) == 0
    assert by_library(tmp_path / "out", "qwen3_5") == by_library(folder, "qwen3_5")
    before, after = (read_processor(place, "qwen3_5") for place in (folder, tmp_path / "out"))
    assert before is not None and after is not None and before.values == after.values


def test_a_conversion_and_a_finetuning_without_images_keep_the_rules(
    folder: Path, records: Path, tmp_path: Path
) -> None:
    start = [
        "--from",
        "hf",
        "--to",
        "megacp",
        "--input",
        str(folder),
        "--output",
        str(tmp_path / "start"),
    ]
    assert convert(start) == 0
    built(records, tmp_path / "d", folder, kind="text")
    flags = ["--load", str(tmp_path / "start"), "--finetune", "--data-path", str(tmp_path / "d")]
    assert (
        train(
            [
                *flags,
                "--save",
                str(tmp_path / "run"),
                "--train-iters",
                "1",
                "--global-batch-size",
                "1",
            ]
        )
        == 0
    )
    export = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "run"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert convert(export) == 0
    assert by_library(tmp_path / "out", "qwen3_5") == by_library(folder, "qwen3_5")


def test_packs_for_a_tower_from_another_folder_follow_its_rules(
    tmp_path: Path, records: Path
) -> None:
    text, tower = tmp_path / "text", tmp_path / "tower"
    torch.manual_seed(0)
    qwen3(vocab_size=264).save_pretrained(text)
    with_tokenizer(text)
    save("molmo2 native", tower)
    sizes = [
        "--vision-family",
        "molmo2",
        "--image-size",
        16,
        "--patch-size",
        4,
        "--overlap-margins",
        "1,1",
    ]
    more = ["--max-crops", 6, "--max-frames", 12, "--video-fps", 4]
    data = ["--load-hf", text, "--vision-from-hf", tower, "--data-path", tmp_path / "d"]
    built(records, tmp_path / "d", text, *sizes, *more, "--chat-template", "ignore")
    assert plan_of([*map(str, data), "--log-file", "/dev/null"], launch.World()) is not None
    built(
        records,
        tmp_path / "d",
        text,
        *sizes,
        "--max-crops",
        2,
        *more[2:],
        "--chat-template",
        "ignore",
    )
    told = refusal(*data)
    assert (
        f"from --vision-from-hf {tower}: --max-crops is 2, {PROCESSOR}: image_processor "
        "max_crops says 6" in told
    )


def started(path: Path, *flags: str) -> str:
    """Return the messages of --load-hf for a folder."""
    arguments = ["--load-hf", str(path), *flags]
    return open_start(parse(arguments), given_names(arguments))[2]


def test_a_folder_with_a_model_and_an_adapter_is_refused_where_it_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library applies the adapter, so its logits differ from the logits of the weights."""
    import transformers

    place, adapter = tmp_path / "model", tmp_path / "adapter"
    torch.manual_seed(0)
    qwen3().save_pretrained(place)
    ids = torch.arange(9)[None]
    plain = transformers.AutoModelForCausalLM.from_pretrained(place)(ids).logits
    q_adapter(place, adapter)
    for path in adapter.iterdir():
        shutil.copyfile(path, place / path.name)
    pytest.importorskip("peft")
    assert not torch.allclose(
        transformers.AutoModelForCausalLM.from_pretrained(place)(ids).logits, plain
    )
    told = "the folder has a model and an adapter (adapter_config.json)"
    with pytest.raises(ValueError, match=re.escape(told)):
        started(place)
    with pytest.raises(ValueError, match=re.escape(told)):
        started(place, "--load-adapter", str(adapter))
    for target in ("megacp", "hf"):
        flags = [
            "--from",
            "hf",
            "--to",
            target,
            "--input",
            str(place),
            "--output",
            str(tmp_path / "out"),
        ]
        assert convert(flags) == 2 and told in capsys.readouterr().err
    assert "model flags from" in started(place, "--load-adapter", str(place)), "both are taken"
    with pytest.raises(ValueError, match="this is an adapter: use --load-hf"):
        read_hf(adapter)


UNUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a loss of routers": (
        "qwen3_moe",
        {"router_aux_loss_coef": 0.5, "output_router_logits": True},
        ["output_router_logits True, router_aux_loss_coef 0.5: --moe-aux-loss-coeff sets"],
    ),
    "generation": (
        "llama 2",
        {"temperature": 0.5, "do_sample": True, "top_p": None},
        ["config.json: ignoring temperature 0.5, do_sample True: set generation options with"],
    ),
    "further tokens": (
        "glm4_moe",
        {"num_nextn_predict_layers": 2, "num_mtp_layers": None},
        ["num_nextn_predict_lay"],
    ),
    "a dtype of states": (
        "qwen3_5_text",
        {"mamba_ssm_dtype": "bfloat16"},
        ["ignoring mamba_ssm_dtype 'bfloat16'"],
    ),
    "another dtype": (
        "llama 2",
        {"dtype": "bfloat16"},
        ["config.json: ignoring dtype bfloat16: the weights are fl"],
    ),
    "what every folder has": (
        "qwen3",
        {"use_cache": True, "initializer_range": 0.02, "temperature": None},
        [],
    ),
}


@pytest.mark.parametrize("name", UNUSED)
def test_fields_that_are_not_used_are_one_line_with_their_values(name: str, tmp_path: Path) -> None:
    model, change, lines = UNUSED[name]
    save(model, tmp_path / "a")
    changed(tmp_path / "a" / "config.json", **{"router_aux_loss_coef": None, **change})
    told = read_hf(tmp_path / "a").notes(False)
    assert len(told) == len(lines) and all(
        line in one for line, one in zip(lines, told, strict=True)
    ), told


def test_settings_of_generation_are_kept_and_told(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "a")
    changed(
        tmp_path / "a" / "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_k=20,
        repetition_penalty=1.0,
    )
    (told,) = read_hf(tmp_path / "a").notes(False)
    assert told.startswith(
        "generation_config.json: ignoring do_sample True, temperature 0.6, top_k 20: "
    )


FURTHER: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a module of their own": (
        "qwen3_5_text",
        {},
        ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
    ),
    "inside the model": ("llama 2", {}, ["model.mtp.0.norm.weight"]),
    "two layers after the last": (
        *("glm4_moe", {"num_nextn_predict_layers": 2}),
        ["model.layers.3.eh_proj.weight", "model.layers.4.enorm.weight"],
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_tensors_that_predict_further_tokens_are_left_out_and_told(
    name: str, tmp_path: Path
) -> None:
    model, change, tensors = FURTHER[name]
    save(model, tmp_path / "a")
    changed(tmp_path / "a" / "config.json", **change)
    file = tmp_path / "a" / "model.safetensors"
    further = {tensor: torch.zeros(2) for tensor in tensors}
    safetensors.torch.save_file(safetensors.torch.load_file(file) | further, file, {"format": "pt"})
    told = "\n".join(read_hf(tmp_path / "a").notes(False))
    assert (
        f"ignoring multi-token-prediction tensors, as in transformers: {', '.join(tensors)}" in told
    )
    # A layer that the config does not count is not such a tensor.
    stray = {"model.layers.7.eh_proj.weight": torch.zeros(2)}
    safetensors.torch.save_file(safetensors.torch.load_file(file) | stray, file, {"format": "pt"})
    with pytest.raises(ValueError, match="model.layers.7.eh_proj.weight is unexpected"):
        read_hf(tmp_path / "a")


def test_fields_of_the_text_outside_its_section_are_refused(folder: Path, tmp_path: Path) -> None:
    """The library reads these fields only inside the section."""
    copy = tmp_path / "a"
    shutil.copytree(folder, copy)
    changed(copy / "config.json", rms_norm_eps=1e-3)
    with pytest.raises(
        ValueError, match="rms_norm_eps is 0.001 outside text_config, but .* where it is 1e-06"
    ):
        read_hf(copy)
    changed(copy / "config.json", rms_norm_eps=1e-6)
    assert read_hf(copy).config.model.norm_epsilon == 1e-6


def test_files_of_a_processor_without_a_tower_are_reported(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "a")
    (tmp_path / "a" / IMAGES).write_text("{}")
    assert f"{IMAGES}: ignored, because the model in config.json has no vision tower" in read_hf(
        tmp_path / "a"
    ).notes(False)


def test_rules_without_all_ids_are_compared_and_reported(tmp_path: Path) -> None:
    """Only the tokenizer of a Molmo2 has the ids of column tokens."""
    save("molmo2 native", tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").unlink()
    loaded = read_hf(tmp_path / "a")
    assert (
        loaded.rules is None
        and loaded.processor is not None
        and loaded.processor.values["max_crops"] == 6
    )
    assert any("not kept for the export" in note for note in loaded.notes(False))
