"""Tokenizer files: the same ids as the original, by the tokenizers package and by the transformers
library.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megacp.huggingface.convert.source import copy_tokenizer
from megacp.huggingface.convert.tokenizer import are_tied, spm_model, write_tokenizer
from megacp.prepare.tokenize.tokenizer import PROBE, load_tokenizer
from megacp.storage import cache
from tests.huggingface.convert.models import given

sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    Path(json.__file__).read_text(encoding="utf-8"),
    Path(np.__file__).read_text(encoding="utf-8"),
]
LINES = [line for text in CORPUS for line in text.splitlines() if line] + [
    text for text in PROBE if text.strip()
]
PLAIN = {
    "normalization_rule_name": "identity",
    "byte_fallback": True,
    "remove_extra_whitespaces": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "of train_tokenizer": PLAIN,
    "no dummy prefix": {**PLAIN, "add_dummy_prefix": False},
    "nmt_nfkc": {**PLAIN, "normalization_rule_name": "nmt_nfkc"},
    "symbols and squeezing": {"user_defined_symbols": ["<|user|>", "ab"]},
    "pieces across words": {**PLAIN, "split_by_whitespace": False},
    "control symbols and padding": {**PLAIN, "control_symbols": ["<ctl>", "<b>"], "pad_id": 3},
}


def train(folder: Path, kind: str, **options: Any) -> str:
    """Train a small SentencePiece model and return its file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type=kind,
        vocab_size=700,
        hard_vocab_limit=False,
        minloglevel=3,
        num_threads=1,
        **options,
    )
    path = folder / f"{kind}.model"
    path.write_bytes(model.getvalue())
    return str(path)


def theirs(folder: Path) -> Any:
    """Return the transformers library's tokenizer of a folder, with any model in it."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return transformers.AutoTokenizer.from_pretrained(folder, model_max_length=1 << 30)


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in list(OPTIONS)[1:]]


@pytest.mark.parametrize("name", ["of train_tokenizer", *SLOWER])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_fast_tokenizer_gives_the_ids_of_sentencepiece(
    kind: str, name: str, tmp_path: Path
) -> None:
    original = given(train(tmp_path, kind, **OPTIONS[name]))
    (tmp_path / "out").mkdir()
    write_tokenizer(original, tmp_path / "out", 512, [*PROBE, *CORPUS])
    library, model = theirs(tmp_path / "out"), spm_model(original.file)
    for text in [*PROBE, *LINES, "a<|user|>b <|user|>  c", "  <|user|><|user|>"]:
        expected, found = list(original.encode(text)), library.encode(text)
        assert found == expected or are_tied(model, found, expected), text
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (library.eos_token_id, library.bos_token_id) == (
        original.tokenizer.eos_id,
        original.tokenizer.bos_id,
    )
    assert library.pad_token_id == original.tokenizer.pad_id
    processor = sentencepiece.SentencePieceProcessor(model_file=str(original.file))
    for text in LINES:
        ids = processor.encode(text)
        if processor.unk_id() not in ids:
            assert library.decode(ids) == processor.decode(ids)


def test_a_tokenizer_that_gives_other_ids_is_refused_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unigram = given(train(tmp_path, "unigram", **PLAIN))
    bpe = given(train(tmp_path, "bpe", **PLAIN))
    monkeypatch.setattr(bpe.tokenizer, "encode_reference", unigram.tokenizer.encode_reference)
    with pytest.raises(
        ValueError,
        match=r"differs from the original: starting at token 0, '.*' gives \[\d.*\] instead of \[\d",
    ):
        write_tokenizer(bpe, tmp_path, 512, PROBE)
    with pytest.raises(ValueError, match="with id 65"):
        write_tokenizer(
            dataclasses.replace(given("byte"), special={"<im_patch>": 65}), tmp_path, 512, ()
        )


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte"])
def test_a_tokenizer_that_is_written_begins_texts_as_training_did(
    kind: str, tmp_path: Path
) -> None:
    original = given("byte" if kind == "byte" else train(tmp_path, kind, **PLAIN))
    first = original.tokenizer.bos_id if kind != "byte" else 256
    for begins_with, before in ((None, []), (first, [first])):
        original.tokenizer.begins_with = begins_with
        folder = tmp_path / str(begins_with)
        folder.mkdir()
        write_tokenizer(original, folder, 512, ["a b", "x"])
        library = theirs(folder)
        assert library.encode("a b") == [*before, *original.encode("a b")]
        assert library.encode("a b", "x") == [
            *before,
            *original.encode("a b"),
            *before,
            *original.encode("x"),
        ]


def byte_level(folder: Path) -> tuple[str, str]:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        CORPUS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    made.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in ("<|user|>", "<|assistant|>")]
    )
    made.save(str(folder / "tokenizer.json"))
    made.model.save(str(folder))
    return str(folder / "tokenizer.json"), f"{folder}/vocab.json,{folder}/merges.txt"


LISTED = {
    "<|im_end|>": {"special": True, "lstrip": True},
    "<tool>": {"special": False, "normalized": True, "rstrip": True},
    "word": {"special": False, "single_word": True},
}


@pytest.mark.parametrize(
    ("kind", "settings", "older"),
    [
        ("bpe", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, False),
        ("unigram", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}, True),
        ("gpt2", {"tokenizer_class": "Qwen2Tokenizer"}, False),
    ],
)
def test_tokens_beside_a_vocabulary_have_the_ids_of_the_library(
    kind: str,
    settings: dict[str, Any],
    older: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    if kind == "gpt2":
        byte_level(folder)
        (folder / "tokenizer.json").unlink()
    else:
        Path(train(folder, kind, **PLAIN)).rename(folder / "tokenizer.model")
    plain = load_tokenizer(str(folder), "reference")
    config: dict[str, Any] = {
        **settings,
        "eos_token": "<|endoftext|>" if kind == "gpt2" else "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(folder), "reference").sha256 == plain.sha256, (
        "its own tokens alone are named"
    )
    ids = {text: plain.vocab_size + i for i, text in enumerate(LISTED)}
    if older:
        (folder / "added_tokens.json").write_text(json.dumps(ids))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    else:
        listed = {str(ids[text]): {"content": text, **flags} for text, flags in LISTED.items()}
        config |= {"added_tokens_decoder": listed, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(str(folder))
    library = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert (found.vocab_size, found.eos_id) == (len(library), library.eos_token_id)
    parts, draw = [*LISTED, *LINES[:40], " ", "  ", "\n", "swords word", "\u00e9"], random.Random(0)
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 8))) for _ in range(200)]
    for text, mine in zip(texts, found.encode(texts), strict=True):
        assert mine.tolist() == library.encode(text, add_special_tokens=False), text
    assert (
        found.sha256 != plain.sha256 and load_tokenizer(str(found.files[0])).sha256 == found.sha256
    )
    (tmp_path / "run").mkdir()
    model = SimpleNamespace(
        folder=folder, config=SimpleNamespace(model=SimpleNamespace(embedding_rows=1 << 20))
    )
    assert (
        copy_tokenizer(model, tmp_path / "run")
        == found.sha256
        == load_tokenizer(str(tmp_path / "run")).sha256
    )
    assert (tmp_path / "run" / "tokenizer.json").is_file(), (
        "what it is read from depends on a config.json too"
    )


@pytest.mark.parametrize("kind", ["byte", "huggingface", "gpt2"])
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.slow
def test_other_kinds_give_their_ids_too_and_image_tokens_theirs(
    kind: str, images: bool, tmp_path: Path
) -> None:
    names = dict(zip(("huggingface", "gpt2"), byte_level(tmp_path), strict=True)) | {"byte": "byte"}
    original = given(names[kind])
    if images:  # a gap of 5 ids, as between a tokenizer and the rows of its model
        special = {f"<im_{i}>": original.tokenizer.vocab_size + 5 + i for i in range(3)}
        original = dataclasses.replace(original, special=special)
    (tmp_path / "out").mkdir()
    ids = write_tokenizer(original, tmp_path / "out", 512, [*PROBE, *CORPUS])
    library = theirs(tmp_path / "out")
    for text in (*PROBE, *CORPUS, "a<|user|>b<|assistant|>c"):
        assert library.encode(text) == list(original.encode(text)), (
            "symbols behind the vocabulary keep their ids"
        )
        assert library.decode(library.encode(text)) == text
    assert (
        ids == {"eos": original.tokenizer.eos_id, "bos": None, "pad": None}
        and library.eos_token_id == original.tokenizer.eos_id
    )
    for text, i in original.special.items():
        assert library.encode(f"a{text}b") == [*original.encode("a"), i, *original.encode("b")]
    if kind == "huggingface" and not images:
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path(names[kind]).read_bytes()


def test_what_lies_beside_a_tokenizer_goes_with_it(tmp_path: Path) -> None:
    name, _ = byte_level(tmp_path)
    settings = {
        "eos_token": "<|endoftext|>",
        "chat_template": "{{ x }}",
        "tokenizer_class": "LlamaTokenizer",
    }
    kept = {
        "padding_side": "left",
        "truncation_side": "left",
        "add_bos_token": False,
        "add_eos_token": True,
    }
    settings |= {**kept, "model_input_names": ["input_ids"], "unk_token": "?"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    (tmp_path / "out").mkdir()
    write_tokenizer(given(name), tmp_path / "out", 512, PROBE)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (
        config["chat_template"] == "{{ x }}"
        and config["tokenizer_class"] == "PreTrainedTokenizerFast"
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ y }}"
    assert {key: config[key] for key in kept} == kept and config["model_input_names"] == [
        "input_ids"
    ]
    library = theirs(tmp_path / "out")
    assert (library.padding_side, library.truncation_side) == ("left", "left")
    assert library.model_input_names == ["input_ids"] and library.encode("x y") == list(
        given(name).encode("x y")
    )
    (tmp_path / "tokenizer_config.json").unlink()
    write_tokenizer(given(name), tmp_path / "out", 512, PROBE)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["model_input_names"] == ["input_ids", "attention_mask"]


def test_no_flipped_bit_of_a_converted_tokenizer_gives_other_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(cache, "CACHE", str(tmp_path / "cache"))
    folder, drawn = tmp_path / "model", random.Random(0)
    folder.mkdir()
    byte_level(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 602}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    texts = [line + "<|im_end|>" for line in LINES[:20]]
    expected = [ids.tolist() for ids in load_tokenizer(str(folder), "reference").encode(texts)]
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in kept}
    for _ in range(5):
        path = drawn.choice(kept)
        content = bytearray(path.read_bytes())
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
        found = load_tokenizer(str(folder), "reference").encode(texts)
        assert [ids.tolist() for ids in found] == expected
