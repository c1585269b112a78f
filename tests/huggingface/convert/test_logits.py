"""Answers of a converted model: greedy generation of transformers, with an image, token by token."""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.context_parallel.shard import LocalBatch
from megacp.huggingface.convert.logits import LogitDifference, compare, library_logits, library_model
from megacp.huggingface.convert.noise import rows_for
from megacp.huggingface.convert_command import main
from megacp.huggingface.generation.prompt import Prompt, PromptMaker, prompt_pixels, prompt_row
from megacp.huggingface.generation.sampler import Generator, Sampling
from megacp.prepare.records.parts import Media
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from tests.huggingface.convert.models import save
from tests.prepare.media.pictures import TINY, encoded, noise, video

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: hf)")

LENGTH = 12


def convert(source: str, target: str, given: Path, output: Path, *flags: str) -> None:
    assert main(["--from", source, "--to", target, "--input", str(given), "--output", str(output), *flags]) == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ours`, a checkpoint, and `theirs`, what it became; both layouts have been passed."""
    folder = tmp_path_factory.mktemp("hf_parity")
    save("molmo2 released", folder / "made")
    convert("hf", "megacp", folder / "made", folder / "ours")
    tokenizer = str(folder / "ours" / "tokenizer.json")
    convert("megacp", "hf", folder / "ours", folder / "theirs", "--tokenizer", tokenizer)
    return folder


def inputs_of(prompt: Prompt) -> dict[str, Any]:
    """A prompt as the library takes it."""
    tokens = torch.from_numpy(prompt.prefix.tokens)[None]
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if prompt.encoded:
        patches, pooling = prompt_pixels([prompt], TINY)
        inputs["mm_token_type_ids"] = torch.isin(tokens, torch.tensor(list(TINY.token_ids.values()))).long()
        inputs["pixel_values"], inputs["image_token_pooling"] = torch.from_numpy(patches), torch.from_numpy(pooling)
        inputs["image_grids"] = torch.tensor([[len(pooling), 1, 0, 0]])
    return inputs


@pytest.mark.parametrize("images", [0, 1, 2])
def test_greedy_answers_are_those_of_transformers(folders: Path, images: int) -> None:
    """With its own cache and masks: would catch a span, a position or a pooled token that is not where it was."""
    generator = Generator(folders / "ours")
    assert generator.image_rules(None) == TINY
    tokenizer = load_tokenizer(str(folders / "ours" / "tokenizer.json"), engine="reference")
    pictures = [Media("image", "bytes", encoded(noise(20 + 12 * i, 16, seed=i)), "") for i in range(images)]
    prompt = PromptMaker(tokenizer, TINY).of_texts(["what do you see?"], pictures)
    (answers,) = generator.answer([prompt], Sampling(LENGTH))
    model = library_model(folders / "theirs", "Molmo2ForConditionalGeneration")
    inputs = inputs_of(prompt)
    with torch.no_grad():
        found = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        logits = model(**inputs).logits[0].numpy()
    assert found[0, inputs["input_ids"].shape[1] :].tolist() == answers[0].tolist()
    assert len(set(answers[0].tolist())) > 2, "a model that always says one thing would pass"
    row = prompt_row([prompt], [[[]]], "example", TINY.token_ids)
    ours = generator.logits(row.batch, generator.features([prompt])).numpy()
    # fp32 through 2 layers and a tower of 3: sums in another order
    assert np.abs(ours - logits).max() <= 1e-5 * np.abs(logits).max()


@dataclass(frozen=True)
class Ours:
    """A converted model, both ways, and what makes prompts for it."""

    generator: Generator
    maker: PromptMaker
    model: Any


@pytest.fixture(scope="module")
def ours(folders: Path) -> Ours:
    generator = Generator(folders / "ours")
    tokenizer = load_tokenizer(str(folders / "ours" / "tokenizer.json"), engine="reference")
    model = library_model(folders / "theirs", "Molmo2ForConditionalGeneration")
    return Ours(generator, PromptMaker(tokenizer, generator.image_rules(None)), model)


def part(kind: str, data: bytes) -> dict[str, Any]:
    return {"type": kind, "base64": base64.b64encode(data).decode()}


TEXT = {"type": "text", "text": "and then?"}
MOVING = {"type": "video", "base64": ""}
CONTENTS: dict[str, list[dict[str, Any]]] = {
    "text": [TEXT],
    "a video": [MOVING, TEXT],
    "a video behind text": [TEXT, MOVING, TEXT],
    "several images": [part("image", encoded(noise(20 + 12 * i, 16, seed=i))) for i in range(4)] + [TEXT],
    "an image and a video": [part("image", encoded(noise(20, 16))), TEXT, MOVING, TEXT],
    "two videos and an image": [MOVING, MOVING, part("image", encoded(noise(44, 16))), TEXT],
}


def prompt_of(ours: Ours, content: list[dict[str, Any]]) -> Prompt:
    record = {"content": [part("video", video(43)) if one is MOVING else one for one in content], "branches": [" a"]}
    return dataclasses.replace(ours.maker.of_record(record), branches=())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENTS)
def test_logits_and_answers_of_videos_are_those_of_transformers(ours: Ours, name: str) -> None:
    """Would catch logits in the order in which the plan sorts the tokens of a video, read in the order of the row."""
    pytest.importorskip("av")
    prompt = prompt_of(ours, CONTENTS[name])
    inputs = inputs_of(prompt)
    with torch.no_grad():
        found = ours.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        logits = ours.model(**inputs).logits[0].numpy()
    row = prompt_row([prompt], [[[]]], "example", TINY.token_ids)
    ours_of_row = ours.generator.logits(row.batch, ours.generator.features([prompt])).numpy()
    assert np.abs(ours_of_row - logits).max() <= 1e-5 * np.abs(logits).max()
    (answers,) = ours.generator.answer([prompt], Sampling(LENGTH))
    assert found[0, inputs["input_ids"].shape[1] :].tolist() == answers[0].tolist()


def test_answers_of_prompts_that_share_a_row_with_a_video_are_those_of_transformers(ours: Ours) -> None:
    """Would catch an image whose answer is read at a place of the video beside it."""
    pytest.importorskip("av")
    prompts = [prompt_of(ours, CONTENTS[name]) for name in ("a video", "text", "several images")]
    with torch.no_grad():
        for prompt, answers in zip(prompts, ours.generator.answer(prompts, Sampling(3)), strict=True):
            inputs = inputs_of(prompt)
            found = ours.model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None)
            assert found[0, inputs["input_ids"].shape[1] :].tolist() == answers[0].tolist()


def test_the_rows_of_verify_tell_logits_in_another_order(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a verify that tries rows which no plan sorts: it agreed while answers to videos were wrong."""
    rows = rows_for(ours.generator.config, TINY)
    models = ours.generator.logits, library_logits(ours.model)
    assert all(difference.is_small for difference in compare(*models, rows))
    monkeypatch.setattr(LocalBatch, "in_row_order", lambda self, values: values)
    wrong = {difference.name for difference in compare(*models, rows) if not difference.is_small}
    assert wrong == {"random video", "random image and video"}


def test_tensors_that_the_library_misses_or_does_not_know_are_told(tmp_path: Path) -> None:
    """It would make up the one and drop the other with a line in its log."""
    from safetensors.torch import load_file, save_file

    save("llama 2", tmp_path / "made")
    path = tmp_path / "made" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.more.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: model.norm.weight; unexpected keys: model.more.weight"):
        library_model(tmp_path / "made", "LlamaForCausalLM")


def test_a_difference_is_small_only_below_its_share_of_the_largest_logit() -> None:
    assert LogitDifference("a", 10.0, 0.99e-3, 1.0, 3).is_small
    assert not LogitDifference("a", 10.0, 1.01e-3, 1.0, 3).is_small
    assert not LogitDifference("a", 10.0, float("inf"), 1.0, 3).is_small
