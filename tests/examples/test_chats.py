"""The parts of the chat demo, on a random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import compare_chats, logits_with_transformers, persona_to_jsonl
from tests.huggingface.convert.models import llama
from tests.prepare.templates.public import TEMPLATES, write_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Glyph")  # a random model may print any character
def test_grids_answers_and_questions_of_the_chat_demo(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "run" / "model", chat_template=TEMPLATES["qwen_25"])
    three = {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
    }
    llama(vocab_size=1000, **three).save_pretrained(tmp_path / "run" / "model")
    assert logits_with_transformers.main(tmp_path / "run" / "model", characters=200) == 0
    persona_to_jsonl.main(tmp_path)
    chats, questions = (
        compare_chats.lines(tmp_path / f"{name}.jsonl") for name in ("chats", "questions")
    )
    assert (
        len(chats) == 100
        and len(questions) == 10
        and all(question in chats for question in questions)
    )
    said = compare_chats.by_library(
        tmp_path / "run" / "model", [each["messages"][0]["content"] for each in questions]
    )
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "log.jsonl").write_text('{"kind": "train", "loss": 1.5}\n')
    answers = [json.dumps({"expected": text, "answer": text}) for text in said]
    for wrong, status in (0, 0), (2, 1):
        for name in ("before", "after"):
            other = [json.dumps({"expected": "no", "answer": text}) for text in said[:wrong]]
            (tmp_path / f"{name}.jsonl").write_text("\n".join([*other, *answers[wrong:]]))
        assert compare_chats.main(["--folder", str(tmp_path)]) == status
    assert (tmp_path / "demo_chat.png").stat().st_size > 10_000
