"""Tokenizer files of a Hugging Face folder, from each kind of tokenizer that a run can have been trained with.

The files are refused unless they give the ids of the original on every text of a probe, also by the library if it is
there. They name the class `PreTrainedTokenizerFast`, which runs `tokenizer.json` as it is: the library rebuilds
other classes from parts, and a Unigram model named a Llama tokenizer silently gets other ids.

Original files are copied byte for byte where nothing has to be added: a tokenizer keeps its hash on a round trip.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.core.storage.files import read_regular, write_atomically
from megacp.huggingface.convert.hf_files import read_json, write_json
from megacp.huggingface.convert.sentencepiece import CONTROL, USER_DEFINED, Model, are_tied, fast_tokenizer, parse
from megacp.prepare.tokenize.beside import OLDER_NAME, TEMPLATE_FOLDER, TEMPLATE_NAMES, settings_of, text_of
from megacp.prepare.tokenize.tokenizer import BOS_NAMES, EOS_NAMES, PAD_NAMES, Tokenizer

CLASS = "PreTrainedTokenizerFast"
BYTE_EOS = "<|endoftext|>"
_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_COMPANIONS = (*TEMPLATE_NAMES, OLDER_NAME, "added_tokens.json")
"""Files that may lie beside a tokenizer and go with it."""
LARGEST = 512 << 20
"""Bytes of a tokenizer's file."""
_KEPT = {"chat_template", "padding_side", "truncation_side", "model_input_names"}
"""Settings of a tokenizer_config.json that mean the same beside CLASS."""
_NAMING = ("_token", "_special_tokens")
"""How further ones end, which name special tokens or say where one is added."""
_RESOLVED = ("eos_token", "bos_token", "pad_token")
"""Those that are named by their ids in the run."""
_NAMES = ("<unk>", "[UNK]", "<mask>", "[MASK]", "[CLS]", "[SEP]", *EOS_NAMES, *BOS_NAMES, *PAD_NAMES)
"""Texts that are special tokens to one tokenizer and words to another."""


@dataclass(frozen=True)
class Given:
    """The tokenizer of a run, and the tokens that an export adds to it."""

    tokenizer: Tokenizer
    special: Mapping[str, int] = field(default_factory=dict)
    """Further tokens that are found in a text, by text: those of images."""
    accept_ties: bool = False
    """Whether a text may get other tokens that are as likely to the model (see `refuse_difference`)."""
    templated: bool = False
    """Whether a chat template wrote the run's messages: words that the settings name were special tokens to it."""
    end_known: bool = False
    """Whether the run says with which token its documents end, or that they have none: settings do not decide then."""

    @property
    def file(self) -> Path:
        """The file it was read from, or the first of two."""
        return self.tokenizer.files[0]

    def encode(self, text: str) -> list[int]:
        """The ids of the run."""
        return self.tokenizer.encode_reference(text).tolist()

    @functools.cached_property
    def added(self) -> frozenset[str]:
        """Texts of the added tokens of a tokenizer.json; none for other kinds."""
        if self.tokenizer.kind != "huggingface":
            return frozenset()
        return frozenset(token["content"] for token in read_json(self.file, LARGEST).get("added_tokens", []))

    def sentencepiece(self) -> Model | None:
        """The SentencePiece model; None for other kinds."""
        return parse(read_regular(self.file, LARGEST)) if self.tokenizer.kind == "sentencepiece" else None


def _byte_level() -> Any:
    """Bytes as ids 0..255, by the characters that byte-level tokenizers write for bytes.

    A byte below 256 that shows is its own character; the hidden ones are the characters from 256 on, in order.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = [ord(character) for character in characters if ord(character) < 256]
    order = [*shown, *sorted(set(range(256)).difference(shown))]
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip(characters, order, strict=True)), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    lines = read_regular(merges, LARGEST).decode().split("\n")
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    tokenizer = Tokenizer(
        models.BPE(vocab=read_json(vocabulary, LARGEST), merges=[(left, right) for left, right in pairs])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _content(given: Given) -> tuple[dict[str, Any], dict[str, int]]:
    """The tokenizer.json before anything is added to it, and special tokens to add."""
    kind = given.tokenizer.kind
    if kind == "byte":
        return json.loads(_byte_level().to_str()), {BYTE_EOS: 256}
    if kind == "gpt2":
        return json.loads(_gpt2(*given.tokenizer.files).to_str()), {}
    if kind == "huggingface":
        return read_json(given.file, LARGEST), {}
    try:
        model = given.sentencepiece()
        assert model is not None, kind
        return json.loads(fast_tokenizer(model).to_str()), {}
    except ValueError as error:
        raise ValueError(f"{given.file}: {error}") from error


def _add(content: dict[str, Any], special: Mapping[str, int]) -> bool:
    """Give each text of `special` its id, as a special token; whether anything was changed. ValueError on a conflict.

    Ids go into the model's own vocabulary, where they may leave gaps: added tokens are otherwise numbered in order.
    """
    vocabulary = content["model"]["vocab"]
    ordered = isinstance(vocabulary, list)  # Unigram: the place is the id
    known = {entry[0]: i for i, entry in enumerate(vocabulary)} if ordered else dict(vocabulary)
    own = set(known)
    added = content.setdefault("added_tokens", [])
    known |= {token["content"]: token["id"] for token in added}
    taken = {i: text for text, i in known.items()}
    missing: dict[str, int] = {}
    for text, i in special.items():
        if known.get(text, i) != i or taken.get(i, text) != text:
            raise ValueError(f"the tokenizer has {text!r} as {known.get(text)} and {taken.get(i)!r} as {i}")
        if all(token["content"] != text for token in added):
            missing[text] = i
    if not missing:
        return False
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added += [{"id": i, "content": text, **plain, "special": True} for text, i in missing.items()]
    added.sort(key=lambda token: token["id"])
    for token in added:  # those that were there before, too: their numbers would follow the new ones
        if token["content"] not in own:
            _place(vocabulary, token["content"], token["id"])
    return True


def _place(vocabulary: Any, text: str, i: int) -> None:
    """Give `text` the id i in a model's vocabulary: an object, or the list of a Unigram model, indexed by id."""
    if isinstance(vocabulary, dict):
        vocabulary[text] = i
        return
    least = min(score for _, score in vocabulary)  # a lower one would become that of unknown characters
    vocabulary += [[f"\x00unused {n}", least] for n in range(len(vocabulary), i)]
    if i == len(vocabulary):
        vocabulary.append([text, least])


def _text_of(tokenizer: Any, i: int | None, what: str) -> str | None:
    text = None if i is None else tokenizer.id_to_token(i)
    if i is not None and text is None:
        raise ValueError(f"the {what} token {i} of --tokenizer is not in its vocabulary")
    return text


def _beginning(text: str | None, i: int) -> dict[str, Any]:
    """A post-processor that puts the token `i` before every text."""
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    one, two = ([token, {"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    special = {text: {"id": text, "ids": [i], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": one, "pair": [*one, *two], "special_tokens": special}


def _texts(value: Any) -> list[str]:
    """Texts of the tokens that a setting names: one, a list, or an object of names."""
    one = not isinstance(value, list | dict) or "content" in value
    found = [value] if one else value.values() if isinstance(value, dict) else value
    return [text for text in map(text_of, found) if text is not None]


def _named(given: Given) -> dict[str, Any]:
    """The settings beside the original that name special tokens; none for a tokenizer without files."""
    settings = settings_of(given.file.parent) if given.tokenizer.files else {}
    return {key: value for key, value in settings.items() if key.endswith(_NAMING)}


def _words(given: Given) -> dict[str, list[str]]:
    """Tokens that settings name and that are no added tokens, by setting: plain text to a run without a template."""
    found = {key: [text for text in _texts(value) if text not in given.added] for key, value in _named(given).items()}
    return {key: words for key, words in found.items() if words}


def _settings(given: Given) -> dict[str, Any]:
    """The settings that go with a tokenizer.json; tokens are named by their texts, for the file has their flags."""
    words = {} if given.templated else _words(given)
    kept = {k: v for k, v in settings_of(given.file.parent).items() if k in _KEPT}
    for key, value in _named(given).items():
        left = words.get(key, ())
        if key == "eos_token" and given.end_known and not given.templated:
            continue
        if isinstance(value, list):
            kept[key] = [text_of(each) or each for each in value if text_of(each) not in left]
        elif isinstance(value, dict) and "content" not in value:
            kept[key] = {name: text_of(each) or each for name, each in value.items() if text_of(each) not in left}
        elif not left:
            kept[key] = text_of(value) or value
    return kept


def token_notes(given: Given, folder: Path) -> dict[str, str]:
    """Notes for the card: named tokens that an export in `folder` leaves out, and plain words that it names."""
    if given.tokenizer.kind != "huggingface" or given.templated:
        return {}
    written = read_json(folder / "tokenizer_config.json")
    own = {key: written[key] for key in _RESOLVED if written[key] is not None}
    named = [f"{key} {text!r}" for key, text in own.items() if text not in given.added]
    left = [f"{key} {text!r}" for key, texts in _words(given).items() if key not in own for text in texts]
    notes = {}
    if left:
        notes["special tokens left out"] = f"{', '.join(left)}: plain text to tokenizer.json, not to the library"
    if named:
        notes["special tokens in a text"] = f"{', '.join(named)}: plain text in training, special to the library"
    return notes


def copy_companions(source: Path, folder: Path, without: Sequence[str] = ()) -> None:
    """Copy what lies beside a tokenizer, but for the files named in `without`."""
    for name in _COMPANIONS:
        if name not in without and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    copy_templates(source, folder)


def copy_templates(source: Path, folder: Path) -> None:
    """Copy the folder of further chat templates, and print what in it is none. ValueError for a huge one."""
    entries = sorted((source / TEMPLATE_FOLDER).iterdir()) if (source / TEMPLATE_FOLDER).is_dir() else []
    for path in entries:
        if path.suffix != ".jinja" or not path.is_file():
            print(f"{path} is left out: it is no template, a regular file *.jinja")
            continue
        (folder / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        write_atomically(folder / TEMPLATE_FOLDER / path.name, read_regular(path))


def write_tokenizer(given: Given, folder: Path, max_length: int, probe: Sequence[str]) -> dict[str, int | None]:
    """Write tokenizer.json, tokenizer_config.json and the companions of the original; ids of eos, bos and pad by name.

    A tokenizer.json of the run keeps its post-processor, and so its hash; one that is made here begins texts as
    documents of training began. An older list of special tokens becomes settings.

    ValueError when the original cannot be expressed, or a text of `probe` gets other ids.
    """
    from tokenizers import Tokenizer

    content, own = _content(given)
    run, special = given.tokenizer, {**own, **given.special}
    names = {"eos": run.eos_id, "bos": run.bos_id, "pad": run.pad_id}
    path = folder / "tokenizer.json"
    copied = run.kind == "huggingface"
    if _add(content, special) or not copied:
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    else:
        shutil.copyfile(given.file, path)
    tokenizer = Tokenizer.from_file(str(path))
    if run.begins_with is not None and not copied:
        content["post_processor"] = _beginning(_text_of(tokenizer, run.begins_with, "first"), run.begins_with)
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    wrong = {text: i for text, i in special.items() if tokenizer.token_to_id(text) != i}
    assert not wrong, f"tokens did not get their ids: {wrong}"
    config: dict[str, Any] = {"tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": max_length, "model_input_names": ["input_ids", "attention_mask"]}
    config |= dict.fromkeys(_RESOLVED)
    if copied:
        config |= _settings(given)
        copy_companions(given.file.parent, folder, without=(OLDER_NAME,))
    config |= {f"{name}_token": _text_of(tokenizer, i, name) for name, i in names.items() if i is not None}
    write_json(folder / "tokenizer_config.json", config)
    refuse_difference(given, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, probe)
    if importlib.util.find_spec("transformers") is not None:
        refuse_difference(given, _library_encoder(folder), ())
    return names


def _library_encoder(folder: Path) -> Callable[[str], Sequence[int]]:
    """How CLASS encodes a text, reading a folder; nothing is added to it. ValueError when it cannot read it."""
    from transformers import PreTrainedTokenizerFast

    try:
        library = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, model_max_length=1 << 30)
    except Exception as error:  # settings of a foreign folder may fail anywhere in it
        raise ValueError(f"the transformers library does not read the exported tokenizer: {error}") from error
    return lambda text: library.encode(text, add_special_tokens=False)


def refuse_difference(given: Given, encode: Callable[[str], Sequence[int]], probe: Sequence[str]) -> None:
    """ValueError with the first text of `probe` that `encode` gives other ids than the original.

    A Unigram model may cut a run like `-----` in several ways of the same score: SentencePiece takes what rounding in
    float32 prefers, the fast tokenizer, which adds in float64, the first. That is a difference too, unless
    `accept_ties`.
    """
    model = given.sentencepiece()
    for text in [*probe, *symbol_texts(given, model)]:
        expected, found = given.encode(text), list(map(int, encode(text)))
        if expected == found:
            continue
        tied = model is not None and max(expected + found) < len(model.pieces) and are_tied(model, expected, found)
        if not (tied and given.accept_ties):
            place = next(
                (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
                min(len(expected), len(found)),
            )
            also = "; to the model both are as likely: --accept-ties exports it all the same" if tied else ""
            raise ValueError(
                f"the exported tokenizer does not encode as the original: {text[:200]!r} gives "
                f"{found[place : place + 8]} instead of {expected[place : place + 8]} from token {place} on{also}"
            )


def symbol_texts(given: Given, model: Model | None) -> list[str]:
    """Texts around each symbol that a text may spell, and around names that look like one."""
    apart = _special_to_the_library(given, model)
    around = (f"a{name}b {name}{name} <b>{name}1</b>" for name in _NAMES)
    names = [text for text in around if not any(word in text for word in apart)]
    if model is None:
        return names + [f"a{text}b {text} {text}{text}" for text in sorted(given.added)]
    found = [
        text
        for symbol in model.of_kind(USER_DEFINED)[:200]
        for text in (symbol, f"a{symbol}b", f" {symbol} {symbol}{symbol}  word {symbol}")
    ]
    spelled = ["<unk>", "<0x41>", "a <0x0A> b", "\u2581", " \u2581\u2581 a\u2581", "a \u2581"]
    return [*found, *names, *(text for text in spelled if text not in apart)]


def _special_to_the_library(given: Given, model: Model | None) -> set[str]:
    """Texts that are plain to the run, and special to the library because files or flags say that they are."""
    if model is not None:
        return set(model.of_kind(CONTROL))
    run = given.tokenizer
    if not run.files:
        return {BYTE_EOS}
    words = {text for key, texts in _words(given).items() if given.templated or key in _RESOLVED for text in texts}
    ends = {name for name in {*_NAMES} - given.added if run.eos_id is not None and run.token_id(name) == run.eos_id}
    return {text for text in words | ends if text}


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that are a folder's tokenizer; none where it has none."""
    return next((names for names in _FILES if all((folder / name).is_file() for name in names)), ())
