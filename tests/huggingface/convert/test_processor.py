"""A Molmo2's processor files: the library's processors read our rules from them and make our tokens and pixels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.data.geometry import ImageRules, image_layout, image_patches
from megacp.huggingface.convert import processor
from megacp.huggingface.convert.tokenizer import write_tokenizer
from tests.huggingface.convert.models import given
from tests.prepare.media.pictures import TINY, noise

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


@pytest.mark.parametrize("rules", [TINY, OTHER])
def test_rules_come_back_from_the_files(rules: ImageRules, tmp_path: Path) -> None:
    processor.write_processor(rules.to_dict(), tmp_path)
    assert ImageRules.from_dict(processor.read_rules(tmp_path, rules.token_ids) or {}) == rules
    (tmp_path / processor.PROCESSOR).unlink()
    older = ImageRules.from_dict(processor.read_rules(tmp_path, rules.token_ids) or {})
    assert (older.max_crops, older.video_fps) == (rules.max_crops, rules.video_fps)
    (tmp_path / processor.IMAGES).unlink()
    assert processor.read_rules(tmp_path, rules.token_ids) is None


def library_processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' Molmo2Processor of a folder; what it would ask torchvision for is done by torch."""
    pytest.importorskip("transformers")
    import transformers
    import transformers.models.molmo2.image_processing_molmo2 as images
    import transformers.models.molmo2.processing_molmo2 as texts
    import transformers.models.molmo2.video_processing_molmo2 as videos

    from tests.reference.molmo2_processor import _Backend

    for name in ("resize", "rescale_and_normalize"):
        monkeypatch.setattr(images.Molmo2ImageProcessor, name, getattr(_Backend, name))
    monkeypatch.setattr(images.Molmo2ImageProcessor, "convert_to_rgb", lambda self, image, **given: image)
    monkeypatch.setattr(texts.Molmo2Processor, "check_argument_for_proper_class", lambda *given: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = images.Molmo2ImageProcessor.from_pretrained(folder), videos.Molmo2VideoProcessor.from_pretrained(folder)
    settings = json.loads((folder / processor.PROCESSOR).read_text())
    options = {key: settings[key] for key in (*processor.TEXT, *processor.FIXED_TEXT)}
    return texts.Molmo2Processor(*parts, tokenizer, **options)


@pytest.mark.parametrize("rules", [TINY, OTHER])
def test_the_library_makes_our_tokens_and_pixels_after_a_token_of_its_own(
    rules: ImageRules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts the tokenizer's bos, or else eos, before a text; all that follows is ours."""
    processor.write_processor(rules.to_dict(), tmp_path)
    write_tokenizer(given("byte", images=True), tmp_path, 512, ())
    (tmp_path / "config.json").write_text('{"model_type": "molmo2"}')
    made = library_processor(tmp_path, monkeypatch)
    pixels = noise(40, 24)
    found = made(images=[torch.from_numpy(pixels).permute(2, 0, 1)], text="what?<|image|>this", return_tensors="pt")
    layout = image_layout(40, 24, rules)
    ids = found["input_ids"][0].tolist()
    assert ids == [made.tokenizer.eos_token_id, *b"what?", *layout.tokens.tolist(), *b"this"]
    assert found["mm_token_type_ids"][0].tolist() == [int(i >= 257) for i in ids]
    assert made.image_token_ids == [rules.token_ids[name] for name in TINY.token_ids]
    assert np.array_equal(np.asarray(found["image_token_pooling"]), layout.pooling)
    difference = np.abs(np.asarray(found["pixel_values"]).reshape(-1) - image_patches(pixels, rules).reshape(-1))
    assert difference.max() <= 1.01 / 255 / min(rules.image_std), "at most one of 255 levels"


def test_rules_that_the_library_cannot_follow_and_files_that_we_cannot_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="time_mode is 'off'"):
        processor.write_processor(dataclasses.replace(TINY, time_mode="off").to_dict(), tmp_path)
    processor.write_processor(TINY.to_dict(), tmp_path)
    whole = json.loads((tmp_path / processor.PROCESSOR).read_text())
    for part, change, message in (
        ("image_processor", {"resample": 3}, "resample is 3, megacp can only express 2"),
        ("image_processor", {"size": {"height": 16, "width": 32}}, "can only express squares"),
        ("video_processor", {"patch_size": 8}, "patch_size is 8, that of images is 4"),
        (None, {"use_frame_special_tokens": False}, "use_frame_special_tokens is False"),
    ):
        changed = {**whole, **change} if part is None else {**whole, part: {**whole[part], **change}}
        (tmp_path / processor.PROCESSOR).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            processor.read_rules(tmp_path, TINY.token_ids)
