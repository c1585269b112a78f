"""Tokenizers produce the ids of their reference with every engine, and refuse unreadable files
clearly.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.prepare.packs.settings import BuildSettings, tokenizer_problem
from megacp.prepare.tokenize.tokenizer import PROBE, Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")

KINDS = ("byte", "sentencepiece", "huggingface", "gpt2")
SOURCES = [Path(json.__file__), Path(np.__file__)]
CORPUS = [path.read_text(encoding="utf-8") for path in SOURCES]
AWKWARD = [
    *PROBE,
    "<s> <unk> </s> <0x41>",
    "<|endoftext|>x<|endoftext|>",
    "\U000323b0 x",
    "\U00011de0a1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator([*CORPUS, *PROBE], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    bpe.model.save(str(folder))
    exact = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    train_sentencepiece(folder / "sp.model", byte_fallback=True, **exact)
    return folder


def train_sentencepiece(path: Path, **options: object) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_prefix=str(path.with_suffix("")),
        vocab_size=500,
        model_type="bpe",
        minloglevel=2,
        **options,
    )


def load(kind: str, folder: Path, engine: str = "auto") -> Tokenizer:
    names = {
        "byte": "byte",
        "sentencepiece": f"{folder}/sp.model",
        "huggingface": f"{folder}/tokenizer.json",
        "gpt2": f"{folder}/vocab.json,{folder}/merges.txt",
    }
    return load_tokenizer(names[kind], engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_of_the_fast_engine_are_those_of_the_reference(folder: Path, kind: str) -> None:
    fast, reference = load(kind, folder), load(kind, folder, "reference")
    assert fast.kind == kind and reference.engine == "reference"
    texts = [*AWKWARD, *CORPUS, "\n".join(AWKWARD)]
    for text, a, b in zip(texts, fast.encode(texts), reference.encode(texts), strict=True):
        assert a.tolist() == b.tolist(), text
        assert a.ndim == 1 and a.dtype.kind in "iu"
        assert len(a) == 0 or 0 <= a.min() <= a.max() < fast.vocab_size
    assert fast.info() == reference.info()


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "gpt2"])
def test_the_fast_engine_is_used_where_it_is_installed(folder: Path, kind: str) -> None:
    pytest.importorskip("gigatoken")
    assert load(kind, folder).engine == "gigatoken"


def differ(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """Return the texts whose ids differ from the reference."""
    found = zip(texts, tokenizer.encode(texts), strict=True)
    return [
        text for text, ids in found if not np.array_equal(ids, tokenizer.encode_reference(text))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "gpt2"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40))
def test_any_text_has_the_same_ids_in_both_engines(folder: Path, kind: str, text: str) -> None:
    tokenizer = _LOADED.setdefault(kind, load(kind, folder))
    assert differ(tokenizer, [text]) == []


_LOADED: dict[str, Tokenizer] = {}


@pytest.mark.parametrize("kind", ["huggingface", "gpt2"])
def test_many_texts_at_once_have_the_ids_of_each_alone(folder: Path, kind: str) -> None:
    tokenizer = load(kind, folder, "reference")
    texts = [
        f"{number} {text}" if number % 7 else text for number, text in enumerate([*PROBE] * 12)
    ]
    assert len(texts) > 128
    found = tokenizer.encode(texts)
    assert len(found) == len(texts) and {ids.dtype for ids in found} == {np.dtype(np.int32)}
    for text, ids in zip(texts, found, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode_reference(text), err_msg=repr(text))
    assert tokenizer.encode([]) == []


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["byte", "gpt2", "huggingface"])
def test_a_lone_surrogate_is_no_text_of_any_kind(folder: Path, kind: str, engine: str) -> None:
    with pytest.raises(ValueError):
        load(kind, folder, engine).encode(["\ud800"])


@pytest.mark.parametrize("kind", ["byte", "gpt2", "sentencepiece"])
def test_decoding_gives_the_text_back(folder: Path, kind: str) -> None:
    tokenizer = load(kind, folder)
    for text in [*PROBE, *CORPUS]:
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_gpt2_ids_are_those_of_the_tokenizers_package(folder: Path) -> None:
    ours = load("gpt2", folder, "reference")
    theirs = tokenizers.ByteLevelBPETokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt")
    for text in [*PROBE, *CORPUS]:
        assert ours.encode([text])[0].tolist() == theirs.encode(text).ids


def test_a_character_newer_than_some_engine_has_the_ids_of_the_reference(tmp_path: Path) -> None:
    """U+11DE0 became a digit in Unicode 17, so only newer tables merge "1" with its first byte."""
    first = byte_characters()["\U00011de0".encode()[0]]
    ids = {token: i for i, token in enumerate([*byte_characters(), f"1{first}"])}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text(f"1 {first}\n")
    names, text = f"{tmp_path}/vocab.json,{tmp_path}/merges.txt", "1\U00011de0"
    tokenizer = load_tokenizer(names)
    assert np.array_equal(tokenizer.encode([text])[0], tokenizer.encode_reference(text))


def byte_characters() -> list[str]:
    """Return the printable character of each byte in GPT-2's files.

    A byte is written as itself in printable Latin-1, otherwise as a character from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    moved = itertools.count(256)
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def test_an_engine_that_disagrees_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gigatoken = pytest.importorskip("gigatoken")
    right = gigatoken.Tokenizer.from_json

    class Wrong:
        vocab_size = 10

        def encode(self, text: str) -> np.ndarray:
            return np.zeros(len(text), np.uint32)

    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: type("T", (), {"backend": Wrong()})()
    )
    assert load("huggingface", folder).engine == "reference"
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", right)
    assert load("huggingface", folder).engine == "gigatoken"


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_symbols_and_added_tokens_have_the_ids_of_the_reference(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "sentencepiece":
        path = tmp_path / "sp.model"
        train_sentencepiece(path, byte_fallback=True, user_defined_symbols=["<|user|>", "##"])
    else:
        path = tmp_path / "tokenizer.json"
        bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        greedy = tokenizers.AddedToken("##", lstrip=True, rstrip=True, normalized=False)
        bpe.add_tokens([greedy, tokenizers.AddedToken("<|user|>", single_word=True)])
        bpe.save(str(path))
    tokenizer = load_tokenizer(str(path))
    texts = [
        "<|user|>\nwhat ## is\n<|user|>x",
        "a<|user|>b",
        " ##  ## ",
        "###",
        "nothing of the kind",
    ]
    assert differ(tokenizer, texts) == []


def test_special_ids_are_found(folder: Path) -> None:
    assert (load("byte", folder).vocab_size, load("byte", folder).eos_id) == (257, 256)
    assert load("huggingface", folder).eos_id == 0 == load("gpt2", folder).eos_id
    assert (load("sentencepiece", folder).eos_id, load("sentencepiece", folder).bos_id) == (2, 1)
    assert load("sentencepiece", folder).pad_id is None


def test_tokenizer_config_and_eod_token_name_the_end_of_document(
    folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "tokenizer.json").read_text())
    config["added_tokens"][0]["content"] = "<stop>"
    vocabulary = config["model"]["vocab"]
    vocabulary["<stop>"] = vocabulary.pop("<|endoftext|>")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(config))
    assert load_tokenizer(str(path)).eos_id is None
    assert load_tokenizer(str(path), eod_token="<stop>").eos_id == 0
    with pytest.raises(ValueError, match="--eod-token '<none>' is not in the vocabulary"):
        load_tokenizer(str(path), eod_token="<none>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(str(path)).eos_id == 0


def spelled(folder: Path, merged: bool, **added: bool) -> Path:
    """Write both kinds of files with `</s>`, `<s>` and `<pad>` in the vocabulary, as merges or not.

    `added` says which of them (`eos`, `bos`, `pad`) tokenizer.json lists as added tokens, and
    whether these are special.
    """
    names = {"eos": "</s>", "bos": "<s>", "pad": "<pad>"}
    pieces, merges = list(byte_characters()), list[tuple[str, str]]()
    for name in names.values():
        parts = [name[: i + 1] for i in range(1, len(name))]
        pieces += [part for part in parts if merged and part not in pieces] or [name]
        merges += [
            (part[:-1], part[-1])
            for part in parts
            if merged and (part[:-1], part[-1]) not in merges
        ]
    ids = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, special in added.items():
        made.add_tokens([tokenizers.AddedToken(names[name], special=special)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges))
    return folder / "tokenizer.json"


def special_ids(path: Path) -> tuple[int | None, int | None, int | None]:
    tokenizer = load_tokenizer(str(path))
    return tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id


@pytest.mark.parametrize("merged", [False, True])
def test_a_word_of_the_vocabulary_is_no_special_token_by_its_spelling(
    merged: bool, tmp_path: Path
) -> None:
    """The vocabulary of Qwen2 has `<s>` as an ordinary word."""
    assert special_ids(spelled(tmp_path, merged)) == (None, None, None)
    with pytest.raises(ValueError, match="--prepend-bos: --tokenizer .*tokenizer.json .*BOS"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), prepend_bos=True)
    path = spelled(tmp_path, merged, eos=True, bos=False, pad=True)
    ids = json.loads((tmp_path / "vocab.json").read_text())
    assert special_ids(path) == (ids["</s>"], None, ids["<pad>"]), (
        "an added token that is not special is none"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert special_ids(path) == (ids["</s>"], ids["<s>"], ids["<pad>"]), (
        "a name in the settings counts as it is"
    )


def test_a_null_in_the_settings_says_that_there_is_none(tmp_path: Path) -> None:
    path = spelled(tmp_path, False, eos=True, bos=True, pad=True)
    assert None not in special_ids(path)
    for name in ("eos", "bos", "pad"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({f"{name}_token": None}))
        assert [i is None for i in special_ids(path)] == [
            name == other for other in ("eos", "bos", "pad")
        ]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    settings = BuildSettings(input=("a",), output="b", tokenizer=str(path), seq_length=8)
    assert "name it with --eod-token, or use" in str(
        tokenizer_problem(settings, load_tokenizer(str(path)))
    )
    assert tokenizer_problem(settings, load_tokenizer(str(path), eod_token="</s>")) is None


def test_gpt2_files_end_documents_with_a_token_that_no_merge_makes(tmp_path: Path) -> None:
    names = f"{tmp_path}/vocab.json,{tmp_path}/merges.txt"
    spelled(tmp_path, True)
    assert load_tokenizer(names).eos_id is None
    spelled(tmp_path, False)
    assert load_tokenizer(names).eos_id == 256
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert (
        load_tokenizer(names).eos_id is None
        and load_tokenizer(names, eod_token="</s>").eos_id == 256
    )


def test_a_sentencepiece_model_names_its_special_tokens_itself(tmp_path: Path) -> None:
    """A piece that is spelled like a special token is not special."""
    train_sentencepiece(
        tmp_path / "sp.model", bos_id=-1, eos_id=-1, user_defined_symbols=["<s>", "</s>", "<pad>"]
    )
    assert special_ids(tmp_path / "sp.model") == (None, None, None)


@pytest.mark.parametrize(
    ("specification", "engine", "named"),
    [
        ("gpt-4", "auto", "--tokenizer is 'gpt-4'"),
        ("openai/gpt2", "auto", "hf download openai/gpt2 --local-dir gpt2"),
        ("none/tokenizer.json", "auto", "none/tokenizer.json"),
        ("none/vocab.json,none/merges.txt", "auto", "none/vocab.json, none/merges.txt"),
        ("{folder}/a.model", "auto", "a.model"),
        ("{folder}/a.json", "auto", "a.json"),
        ("{folder}/vocab.json,{folder}/merges.txt", "auto", "vocab.json.*ab"),
        ("{folder}/vocab.json,{folder}/three.txt", "auto", "three.txt"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_name(
    tmp_path: Path, specification: str, engine: str, named: str
) -> None:
    (tmp_path / "vocab.json").write_text(
        json.dumps({c: i for i, c in enumerate(byte_characters())})
    )
    files = {
        "a.model": "{}",
        "a.json": "{}",
        "merges.txt": "#version: 0.2\na b\n",
        "three.txt": "a b c\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=named):
        load_tokenizer(specification.format(folder=tmp_path), engine)
