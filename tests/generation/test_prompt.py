"""Prompts: what is given beside a text has the tokens and the pixels that a record of the same has."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from megacp.data.records.parts import Media
from megacp.data.tokenize.tokenizer import load_tokenizer
from megacp.generation.prompt import Prompt, PromptMaker, prompt_pixels
from tests.data.media.pictures import TINY, encoded, noise, video

pytest.importorskip("av")
PICTURE, MOVING = encoded(noise(30, 20)), video(43)
GIVEN = {"image": PICTURE, "video": MOVING}


def of_texts(*kinds: str) -> Prompt:
    media = [Media(kind, "bytes", GIVEN[kind], f"--{kind}") for kind in kinds]
    return PromptMaker(load_tokenizer("byte"), TINY).of_texts(["what?"], media)


def of_record(*kinds: str) -> Prompt:
    parts = [{"type": kind, "base64": base64.b64encode(GIVEN[kind]).decode()} for kind in kinds]
    record = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]}
    return PromptMaker(load_tokenizer("byte"), TINY).of_record(record)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("video",), ("image", "video"), ("video", "image"), ("video", "video")])
def test_given_media_have_the_tokens_and_pixels_of_a_record(kinds: tuple[str, ...]) -> None:
    """Would catch frames that are sampled by another rule, and two videos of one file taken for one."""
    given, record = of_texts(*kinds), of_record(*kinds)
    assert [*b"<|user|>\n", *given.prefix.tokens.tolist()] == record.prefix.tokens.tolist()
    assert len(given.prefix.units) == sum(1 if kind == "image" else 12 for kind in kinds)
    for found, expected in zip(prompt_pixels([given], TINY), prompt_pixels([record], TINY), strict=True):
        assert np.array_equal(found, expected)
    crops = sum(unit.num_crops for unit in given.prefix.units)
    assert len(prompt_pixels([given], TINY)[0]) == crops
