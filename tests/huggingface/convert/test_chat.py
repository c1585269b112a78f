"""Chat templates of exported models: the transformers library gives messages the same ids as a
build.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.huggingface.convert import chat, processor
from megacp.huggingface.convert.processor import write_processor
from megacp.huggingface.convert.tokenizer import Given, write_tokenizer
from megacp.huggingface.generation.prompt import PromptMaker
from megacp.prepare.media.processor_files import (
    IMAGES,
    PROCESSOR,
    PROCESSOR_FILES,
    VIDEOS,
    read_processor,
)
from megacp.prepare.media.reader import MediaReader
from megacp.prepare.records.documents import DocumentMaker
from megacp.prepare.records.record import RecordRules
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import Tokenizer, load_tokenizer
from megacp.training.data.vision.molmo2 import Molmo2Rules, image_layout, image_patches
from megacp.training.data.vision.qwen3_5 import Qwen35Rules
from megacp.training.data.vision.rules import VisionRules
from tests.huggingface.convert.models import given
from tests.huggingface.convert.test_tokenizer import LINES, OPTIONS, theirs, train
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.tools.test_convert_checkpoint import convert

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: test)"
)
tokenizers = pytest.importorskip("tokenizers")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
)
LLAMA3 += r"\s+(?!\S)|\s+"


def bpe(folder: Path, before: Any, roles: bool = False) -> str:
    """Return a tokenizer.json of byte-level BPE with merges across every border that its pattern
    allows.
    """
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = before
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False
    )
    text = ["?\n", ".\n", "|>\n\n", "|>\n  x", ";\n\n<|", "\n\n", "  two", " \n"]
    made.train_from_iterator([*LINES, *text * 200], trainer)
    made.add_special_tokens(["<|endoftext|>", *(["<|user|>", "<|assistant|>"] if roles else [])])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return str(folder / "tokenizer.json")


def split(pattern: str) -> Any:
    pre = tokenizers.pre_tokenizers
    cut = pre.Split(tokenizers.Regex(pattern), "isolated")
    return pre.Sequence([cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


# A tokenizer, and whether its merges stay inside headers and contents.
KINDS: dict[str, tuple[Callable[[Path], str], bool]] = {
    "bytes": (lambda folder: "byte", True),
    "roles as special tokens": (lambda folder: bpe(folder, split(LLAMA3), roles=True), False),
    "SentencePiece": (lambda folder: train(folder, "bpe", **OPTIONS["of train_tokenizer"]), False),
    "SentencePiece to which newlines are spaces": (lambda folder: train(folder, "bpe"), True),
}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "Which animal is it?"},
    {"role": "assistant", "content": "  A cat;\n\n"},
    {
        "role": "user",
        "content": [{"type": "text", "text": " and"}, {"type": "text", "text": " now?"}],
    },
    {"role": "assistant", "content": ""},
]


def exported(tokenizer: Tokenizer, folder: Path, images: bool) -> None:
    ids = (
        {text: TINY.token_ids[name] for name, text in Molmo2Rules.token_texts.items()}
        if images
        else {}
    )
    write_tokenizer(Given(tokenizer, ids), folder, 512, ())
    probe = chat.probe(
        tokenizer, [TINY.token_ids[name] for name in TINY.placeholder] if images else []
    )
    chat.write_template(folder, tokenizer, probe, "<im_start><im_end>" if images else "")


def build_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    maker = DocumentMaker(tokenizer, tokenizer.eos_id is not None, {})
    sample = parse_record({"messages": messages})
    return next(maker.encode([[sample.prefix]])).tokens.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_makes_the_ids_of_a_build_or_there_is_no_template(
    kind: str, tmp_path: Path
) -> None:
    make, fits = KINDS[kind]
    tokenizer = load_tokenizer(make(tmp_path), engine="reference")
    (tmp_path / "out").mkdir()
    if not fits:
        with pytest.raises(ValueError, match="gets different token ids than in a dataset build"):
            exported(tokenizer, tmp_path / "out", images=False)
        assert not (tmp_path / "out" / chat.TEMPLATE_FILE).exists()
        return
    exported(tokenizer, tmp_path / "out", images=False)
    library = theirs(tmp_path / "out")
    for count in range(1, len(TURNS) + 1):
        messages = TURNS[:count]
        assert library.apply_chat_template(messages, return_dict=False) == build_ids(
            tokenizer, messages
        ), count
        (asked,) = PromptMaker(tokenizer).of_record(
            {"messages": [*messages, {"role": "assistant", "content": "x"}]}
        )
        found = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert found == asked.tokens.tolist(), count


@pytest.mark.parametrize("images", [1, 2])
def test_the_processor_makes_the_ids_of_a_build_after_a_token_of_its_own(
    images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer("byte", engine="reference")
    write_processor(TINY, tmp_path)
    exported(tokenizer, tmp_path, images=True)
    (tmp_path / "config.json").write_text('{"model_type": "molmo2"}')
    pixels = [noise(40, 24), noise(16, 32)][:images]
    for number, picture in enumerate(pixels):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture))
    says = {"type": "text", "text": "which animal?"}
    first = {"role": "user", "content": [{"type": "image", "path": "0.png"}, says]}
    second = {
        "role": "user",
        "content": [says, *([{"type": "image", "path": "1.png"}] if images > 1 else [])],
    }
    messages = [
        first,
        {"role": "assistant", "content": "A cat."},
        second,
        {"role": "assistant", "content": "Two"},
    ]
    made = library_processor(tmp_path, monkeypatch)
    made.chat_template = (tmp_path / chat.TEMPLATE_FILE).read_text()
    reader = MediaReader(TINY, str(tmp_path))
    parts = reader.expand(
        parse_record({"messages": messages}, RecordRules(media=True)).prefix, {}, []
    )
    maker = DocumentMaker(tokenizer, True, dict(TINY.token_ids))
    expected = next(maker.encode([[parts]])).tokens.tolist()
    (asked,) = PromptMaker(tokenizer, TINY, str(tmp_path)).of_record({"messages": messages})
    for turns, prompt, ids in (
        (messages, False, expected),
        (messages[:3], True, asked.tokens.tolist()),
    ):
        text = made.apply_chat_template(turns, add_generation_prompt=prompt)
        given = [torch.from_numpy(picture).permute(2, 0, 1) for picture in pixels]
        found = made(images=given, text=text, return_tensors="pt")["input_ids"][0].tolist()
        assert found == [256, *ids]


def trained(folder: Path, text: bool = False) -> Path:
    """Write a checkpoint of a vision model as a run saves it."""
    from megacp.verify.cases import MODELS
    from tests.tools.test_convert_checkpoint import saved_on_grid

    values: dict[str, Any] = {
        **({} if text else MODELS["tiny_vlm"]),
        "vocab_size": 950 if text else 257,
    }
    values["dtype"] = "float32"
    if not text:
        values["qk_layernorm"] = "head"
    saved_on_grid(0, 1, {}, values, str(folder), None if text else TINY.to_dict())
    return folder


@pytest.mark.slow
def test_an_exported_vision_model_has_the_template_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        convert(
            "megacp",
            "hf",
            trained(tmp_path / "run"),
            tmp_path / "a",
            "--tokenizer",
            "byte",
            "--verify",
        )
        == 0
    )
    assert (
        "chat template: megacp's format for `messages` records, with the same token ids as a dataset build\n"
        in capsys.readouterr().out
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    tokens = load_tokenizer("byte", engine="reference")
    assert tokenizer.apply_chat_template(TURNS, return_dict=False) == build_ids(tokens, TURNS)
    flags = ("--tokenizer", "byte", "--chat-template", "none")
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "b", *flags) == 0
    assert not (tmp_path / "b" / chat.TEMPLATE_FILE).exists()


@pytest.mark.slow
def test_a_text_model_gets_the_template_on_demand_and_keeps_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", text=True)
    assert convert("megacp", "hf", run, tmp_path / "a", "--tokenizer", "byte") == 0
    assert (
        "chat template: none; --chat-template messages exports megacp's format for `messages` records"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "a" / chat.TEMPLATE_FILE).exists()
    flags = ("--chat-template", "messages")
    assert convert("megacp", "hf", run, tmp_path / "b", "--tokenizer", "byte", *flags) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    asked = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True, tokenize=False)
    assert asked == "<|system|>\nBe brief.\n\n<|user|>\nWhich animal is it?\n<|assistant|>\n"
    own = bpe(tmp_path, split(LLAMA3))
    (tmp_path / chat.TEMPLATE_FILE).write_text("{{ 'mine' }}")
    assert convert("megacp", "hf", run, tmp_path / "c", "--tokenizer", own) == 0
    assert (
        "chat template: from the tokenizer; --chat-template messages exports"
        in capsys.readouterr().out
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "c")
    assert tokenizer.apply_chat_template(TURNS[:1], tokenize=False) == "mine"
    assert (tmp_path / "c" / "tokenizer.json").read_bytes() == Path(own).read_bytes()
    assert convert("megacp", "hf", run, tmp_path / "d", "--tokenizer", own, *flags) == 2
    assert "--chat-template messages" in capsys.readouterr().err


OTHER = dataclasses.replace(
    TINY,
    max_crops=3,
    image_pooling=(2, 1),
    video_pooling=(4, 4),
    video_fps=0.5,
    use_column_tokens=True,
    low_res_column_tokens=False,
    video_column_tokens=True,
    image_mean=(0.25, 0.5, 0.75),
)


def read_rules(folder: Path, token_ids: dict[str, int], family: str) -> VisionRules | None:
    found = read_processor(folder, family)
    return None if found is None else found.with_ids(token_ids)


@pytest.mark.parametrize("rules", [TINY, OTHER])
def test_rules_come_back_from_the_files(rules: Molmo2Rules, tmp_path: Path) -> None:
    processor.write_processor(rules, tmp_path)
    assert read_rules(tmp_path, rules.token_ids, "molmo2") == rules
    (tmp_path / PROCESSOR).unlink()
    older: Any = read_rules(tmp_path, rules.token_ids, "molmo2")
    assert (older.max_crops, older.video_fps) == (rules.max_crops, rules.video_fps)
    (tmp_path / IMAGES).unlink()
    with pytest.raises(ValueError, match=f"has {VIDEOS} but no {IMAGES}"):
        read_rules(tmp_path, rules.token_ids, "molmo2")
    (tmp_path / VIDEOS).unlink()
    assert read_rules(tmp_path, rules.token_ids, "molmo2") is None


def library_processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return transformers' Molmo2Processor of a folder, with torch in place of torchvision."""
    pytest.importorskip("transformers")
    import transformers
    import transformers.models.molmo2.image_processing_molmo2 as images
    import transformers.models.molmo2.processing_molmo2 as texts
    import transformers.models.molmo2.video_processing_molmo2 as videos

    from tests.reference.molmo2_processor import _Backend

    for name in ("resize", "rescale_and_normalize"):
        monkeypatch.setattr(images.Molmo2ImageProcessor, name, getattr(_Backend, name))
    monkeypatch.setattr(
        images.Molmo2ImageProcessor, "convert_to_rgb", lambda self, image, **given: image
    )
    monkeypatch.setattr(
        texts.Molmo2Processor, "check_argument_for_proper_class", lambda *given: None
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = (
        images.Molmo2ImageProcessor.from_pretrained(folder),
        videos.Molmo2VideoProcessor.from_pretrained(folder),
    )
    settings = json.loads((folder / PROCESSOR).read_text())
    options = {
        key: settings[key]
        for key in (*PROCESSOR_FILES["molmo2"].switches, *PROCESSOR_FILES["molmo2"].only)
    }
    return texts.Molmo2Processor(*parts, tokenizer, **options)


@pytest.mark.parametrize("rules", [TINY, OTHER])
def test_the_library_makes_our_tokens_and_pixels_after_a_token_of_its_own(
    rules: Molmo2Rules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library adds bos, or else eos, before a text; all following tokens are ours."""
    processor.write_processor(rules, tmp_path)
    write_tokenizer(given("byte", images=True), tmp_path, 512, ())
    (tmp_path / "config.json").write_text('{"model_type": "molmo2"}')
    made = library_processor(tmp_path, monkeypatch)
    pixels = noise(40, 24)
    found = made(
        images=[torch.from_numpy(pixels).permute(2, 0, 1)],
        text="what?<|image|>this",
        return_tensors="pt",
    )
    layout = image_layout(40, 24, rules)
    ids = found["input_ids"][0].tolist()
    assert ids == [made.tokenizer.eos_token_id, *b"what?", *layout.tokens.tolist(), *b"this"]
    assert found["mm_token_type_ids"][0].tolist() == [int(i >= 257) for i in ids]
    assert made.image_token_ids == [rules.token_ids[name] for name in TINY.token_ids]
    assert np.array_equal(np.asarray(found["image_token_pooling"]), layout.pooling)
    difference = np.abs(
        np.asarray(found["pixel_values"]).reshape(-1) - image_patches(pixels, rules).reshape(-1)
    )
    assert difference.max() <= 1.01 / 255 / min(rules.image_std), "at most one of 255 levels"


def test_rules_that_the_library_cannot_follow_and_files_that_we_cannot_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="time_mode is 'off'"):
        processor.write_processor(dataclasses.replace(TINY, time_mode="off"), tmp_path)
    processor.write_processor(TINY, tmp_path)
    whole = json.loads((tmp_path / PROCESSOR).read_text())
    for part, change, message in (
        ("image_processor", {"resample": 3}, "resample is 3, megacp can only express 2"),
        ("image_processor", {"size": {"height": 16, "width": 32}}, "can only express squares"),
        (
            "video_processor",
            {"patch_size": 8},
            "video_processor patch_size is 8, .*image_processor patch_size is 4",
        ),
        (None, {"use_frame_special_tokens": False}, "use_frame_special_tokens is False"),
    ):
        changed = (
            {**whole, **change} if part is None else {**whole, part: {**whole[part], **change}}
        )
        (tmp_path / PROCESSOR).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            read_rules(tmp_path, TINY.token_ids, "molmo2")


def test_windows_by_files_of_any_version_and_what_a_video_may_not_say(tmp_path: Path) -> None:
    """Older files have the pixel limits next to `size`, and the settings of images also apply to
    videos.
    """
    rules = Qwen35Rules(
        token_ids={name: n for n, name in enumerate(Qwen35Rules.token_texts)},
        resize_pixels=(1024, 4096),
        video_resize_pixels=(2048, 8192),
    )
    processor.write_processor(rules, tmp_path)

    def read(name: str, **change: Any) -> Any:
        path, text = tmp_path / name, (tmp_path / name).read_text()
        path.write_text(json.dumps({**json.loads(text), **change}))
        try:
            return read_rules(tmp_path, rules.token_ids, "qwen3_5")
        finally:
            path.write_text(text)

    assert read(IMAGES) == rules
    older = read(IMAGES, size=None, min_pixels=1024, max_pixels=4096)
    assert older == rules
    for name, change, message in (
        (IMAGES, {"resample": 2}, "resample is 2, megacp can only express 3"),
        (VIDEOS, {"merge_size": 4}, "merge_size is 4, preprocessor_config.json merge_size is 2"),
        (VIDEOS, {"num_frames": 16}, "num_frames is 16"),
    ):
        with pytest.raises(ValueError, match=message):
            read(name, **change)
