"""Files next to a tokenizer, such as chat templates and special tokens, converted in both
directions.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacp.huggingface.convert import chat
from megacp.huggingface.convert.tokenizer import Given, write_tokenizer
from megacp.prepare.records.chat_template import templates_of
from megacp.training.loop.state import RunState
from tests.huggingface.convert.models import given, save
from tests.tools.test_convert_checkpoint import convert

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: test)"
)
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ("</s>", "<unk>", "<mask>", "<sep>", "<cls>", "<image>", "<a>", "<b>")
NAMED = {
    **{"eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>", "sep_token": "<sep>"},
    **{"cls_token": "<cls>", "image_token": "<image>", "additional_special_tokens": ["<a>", "<b>"]},
}
TEMPLATES = {"default": "{{ 'plain' }}", "tool_use": "{{ 'tools' }}", "rag": "{{ 'found' }}"}


def write(folder: Path, **settings: Any) -> Path:
    """Write a tokenizer.json of letters, the word `<s>` and `SPECIAL`, at most 97 ids, with its
    settings.
    """
    folder.mkdir(exist_ok=True)
    letters = [
        chr(code)
        for code in range(ord(" "), ord("~") + 1)
        if chr(code) not in "{}|~`^\\\"'@$%;WXYZ"
    ]
    pieces = [*letters, "<s", "<s>", "><"]
    merges = [(">", "<"), ("<", "s"), ("<s", ">")]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges)
    )
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL])
    assert made.get_vocab_size() <= 97
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def original_of(folder: Path, **settings: Any) -> Given:
    """Return the tokenizer of `write` and an empty folder for its export."""
    (folder / "out").mkdir()
    return given(str(write(folder / "t", **{**NAMED, **settings}) / "tokenizer.json"))


def write_templates(folder: Path) -> None:
    """Write TEMPLATES as the library does: named templates in their folder, one of them as a
    link.
    """
    more = folder / "additional_chat_templates"
    more.mkdir()
    (folder / "chat_template.jinja").write_text(TEMPLATES["default"])
    (more / "tool_use.jinja").write_text(TEMPLATES["tool_use"])
    (folder.parent / "blob").write_text(TEMPLATES["rag"])
    (more / "rag.jinja").symlink_to(folder.parent / "blob")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with a model of 97 rows and the tokenizer of `write`."""
    save("llama 2", tmp_path / "model")
    return write(tmp_path / "model", **NAMED)


def test_templates_and_named_tokens_survive_the_way_there_and_back(
    model: Path, tmp_path: Path
) -> None:
    write_templates(model)
    before = transformers.AutoTokenizer.from_pretrained(model)
    assert convert("hf", "hf", model, tmp_path / "copy") == 0
    assert convert("hf", "megacp", model, tmp_path / "run") == 0
    assert convert("megacp", "hf", tmp_path / "run", tmp_path / "back", "--verify") == 0
    for name in ("copy", "run", "back"):
        assert templates_of(tmp_path / name) == TEMPLATES, name
        assert not (tmp_path / name / "additional_chat_templates" / "rag.jinja").is_symlink()
    for name in ("copy", "back"):
        after = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert (
            after.special_tokens_map == before.special_tokens_map
            and after.chat_template == TEMPLATES
        )
        assert after.all_special_ids == before.all_special_ids and after.image_token == "<image>"
    assert convert("hf", "hf", tmp_path / "back", tmp_path / "again") == 0, (
        "its sums list the folder"
    )


@pytest.mark.parametrize("more", [{}, {"bos_token": None}])
def test_a_named_word_that_is_no_added_token_is_left_out(
    more: dict[str, Any], tmp_path: Path
) -> None:
    original = original_of(tmp_path, unk_token="?", extra_special_tokens=["<s>", "<a>"], **more)
    write_tokenizer(original, tmp_path / "out", 512, ())
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "unk_token" not in settings and settings["extra_special_tokens"] == ["<a>"]
    assert settings["mask_token"] == "<mask>" and settings["bos_token"] is None
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "is it <i><s>so</s>?"
    assert (
        library.encode(text, add_special_tokens=False) == original.encode(text)
        and library.bos_token is None
    )


def test_words_that_a_chat_template_wrote_as_special_tokens_stay_special(tmp_path: Path) -> None:
    original = original_of(tmp_path, unk_token="?", extra_special_tokens={"begin": "<s>"})
    templated = Given(original.tokenizer, templated=True)
    write_tokenizer(templated, tmp_path / "out", 512, ())
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    first = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    text = "is it <i><s>so</s>?"
    assert library.encode(text) == first.encode(text) != original.encode(text)


def test_a_template_of_training_leaves_none_of_the_tokenizer_to_be_chosen_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "t", **NAMED)
    write_templates(source)
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    original = given(str(source / "tokenizer.json"))
    (tmp_path / "out").mkdir()
    write_tokenizer(original, tmp_path / "out", 512, ())
    monkeypatch.setattr(chat, "stored_state", lambda _: RunState(chat_template={"default": "ours"}))
    loaded: Any = SimpleNamespace(checkpoint=SimpleNamespace(extra={}), rules=None)
    chat.write_chat_template(loaded, tmp_path / "out", original.tokenizer, "auto")
    assert templates_of(tmp_path / "out") == {"default": "ours", "rag": TEMPLATES["rag"]}
    assert not (tmp_path / "out" / "chat_template.json").exists(), "a processor prefers it"
