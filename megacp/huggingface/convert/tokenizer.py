"""Tokenizer files of a Hugging Face folder, from each kind of tokenizer that a run can have been
trained with.

A `tokenizer.json` is copied where no image token has to be added; the other kinds become one. Files
that give other ids on a text of a probe are refused. They name `PreTrainedTokenizerFast`, as the
library rebuilds other classes.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.huggingface.convert.hf_files import write_json
from megacp.huggingface.convert.source import copy_companions
from megacp.prepare.tokenize.beside import OLDER_NAME, read_object, settings_of, token_text
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.storage.files import read_regular

CLASS = "PreTrainedTokenizerFast"
BYTE_EOS = "<|endoftext|>"
LARGEST = 512 << 20
"""Bytes of a tokenizer's file."""
_KEPT = {"chat_template", "padding_side", "truncation_side", "model_input_names"}
"""Settings of a tokenizer_config.json that mean the same beside CLASS."""
_NAMING = ("_token", "_special_tokens")
"""How further ones end, which name special tokens or say where one is added."""
_SPACE = "\u2581"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of pieces in a SentencePiece model."""


@dataclass(frozen=True)
class Given:
    """The tokenizer of a run, and the tokens that an export adds to it."""

    tokenizer: Tokenizer
    special: Mapping[str, int] = field(default_factory=dict)
    """Further tokens that are found in a text, by text: those of images."""
    templated: bool = False
    """Whether a chat template wrote the run's messages: words that the settings name were special
    tokens to it.
    """

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
        return frozenset(
            token["content"] for token in read_object(self.file, LARGEST).get("added_tokens", [])
        )


def _byte_level() -> Any:
    """Bytes as ids 0..255: those that show are their own character, the others the characters from
    256 on.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = [ord(character) for character in characters if ord(character) < 256]
    order = [*shown, *sorted(set(range(256)).difference(shown))]
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip(characters, order, strict=True)), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def spm_model(path: Path) -> Any:
    """A SentencePiece model file by the library's classes. ValueError."""
    try:
        from transformers.convert_slow_tokenizer import import_protobuf

        model = import_protobuf().ModelProto()
    except ImportError as error:
        raise ValueError(
            "a SentencePiece model is read with protobuf: pip install protobuf"
        ) from error
    try:
        model.ParseFromString(read_regular(path, LARGEST))
    except Exception as error:  # protobuf's own error, which is no ValueError
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    return model


def _from_sentencepiece(path: Path) -> Any:
    """The fast tokenizer of a SentencePiece model; the probe says whether its ids are the same."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )
    from transformers.convert_slow_tokenizer import generate_merges

    proto = spm_model(path)
    trainer, spec, pieces = proto.trainer_spec, proto.normalizer_spec, proto.pieces
    symbols = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    model: Any
    if trainer.model_type == 2:
        vocabulary = {piece.piece: i for i, piece in enumerate(pieces)}
        apart = {piece.piece for piece in pieces if piece.type != _NORMAL}
        merges = generate_merges(vocabulary, {piece.piece: piece.score for piece in pieces}, apart)
        options = {
            "unk_token": trainer.unk_piece,
            "fuse_unk": True,
            "byte_fallback": trainer.byte_fallback,
        }
        model = models.BPE(vocabulary, merges, ignore_merges=bool(symbols), **options)
    elif trainer.model_type == 1:
        least = min(piece.score for piece in pieces if piece.type == _NORMAL)
        # a symbol is alone in its text, where 0 beats any cut; others are worse than the characters
        # of their names
        scores = [
            least * len(piece.piece) - 1 if piece.type != _NORMAL else piece.score
            for piece in pieces
        ]
        scores = [
            0.0 if piece.type == _USER_DEFINED else s
            for piece, s in zip(pieces, scores, strict=True)
        ]
        texts = [piece.piece for piece in pieces]
        model = models.Unigram(
            list(zip(texts, scores, strict=True)), trainer.unk_id, trainer.byte_fallback
        )
    else:
        raise ValueError(
            f"{path}: model_type is {trainer.model_type}, expressible are Unigram and BPE"
        )
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        table = normalizers.Precompiled(spec.precompiled_charsmap)
        both = "".join(
            table.normalize_str(end) for end in "\r\n"
        )  # as one cluster it would be looked up as one
        steps = [normalizers.Replace("\r\n", both), table] if both != "\r\n" else [table]
    if spec.remove_extra_whitespaces:
        ends = Regex(rf"\A +|[ {_SPACE}]+\z")
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(ends, "")]
    steps += [normalizers.Prepend(_SPACE)] if spec.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if symbols:
        longest = "|".join(
            re.escape(symbol) for symbol in sorted(symbols, key=lambda s: (-len(s), s))
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest), "isolated")
    shown: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*shown, *[decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix]
    )
    controls = [piece.piece for piece in pieces if piece.type == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in controls]
    )
    return tokenizer


def _content(given: Given) -> tuple[dict[str, Any], dict[str, int]]:
    kind = given.tokenizer.kind
    if kind == "byte":
        return json.loads(_byte_level().to_str()), {BYTE_EOS: 256}
    if kind == "huggingface":
        return read_object(given.file, LARGEST), {}
    made = given.tokenizer.model if kind == "gpt2" else _from_sentencepiece(given.file)
    return json.loads(made.to_str()), {}


def _add(content: dict[str, Any], special: Mapping[str, int]) -> bool:
    """Give each text of `special` its id, gaps allowed; whether anything changed. ValueError on a
    conflict.
    """
    vocabulary = content["model"]["vocab"]
    ordered = isinstance(vocabulary, list)  # Unigram: the index is the id
    known = {entry[0]: i for i, entry in enumerate(vocabulary)} if ordered else dict(vocabulary)
    own = set(known)
    added = content.setdefault("added_tokens", [])
    known |= {token["content"]: token["id"] for token in added}
    taken = {i: text for text, i in known.items()}
    for text, i in special.items():
        if known.get(text, i) != i or taken.get(i, text) != text:
            raise ValueError(
                f"the tokenizer has {text!r} as {known.get(text)} and {taken.get(i)!r} as {i}"
            )
    missing = {
        text: i for text, i in special.items() if all(token["content"] != text for token in added)
    }
    if not missing:
        return False
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added += [{"id": i, "content": text, **plain, "special": True} for text, i in missing.items()]
    added.sort(key=lambda token: token["id"])
    for (
        token
    ) in added:  # those that were there before, too: their numbers would follow the new ones
        text, i = token["content"], token["id"]
        if text in own:
            continue
        if not ordered:
            vocabulary[text] = i
            continue
        least = min(
            score for _, score in vocabulary
        )  # a lower one would become that of unknown characters
        vocabulary += [[f"\x00unused {n}", least] for n in range(len(vocabulary), i)]
        vocabulary += [[text, least]] if i == len(vocabulary) else []
    return True


def _text_of(tokenizer: Any, i: int | None, what: str) -> str | None:
    text = None if i is None else tokenizer.id_to_token(i)
    if i is not None and text is None:
        raise ValueError(f"the {what} token {i} of --tokenizer is not in its vocabulary")
    return text


def _beginning(text: str | None, i: int) -> dict[str, Any]:
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    one, two = ([token, {"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    special = {text: {"id": text, "ids": [i], "tokens": [text]}}
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": [*one, *two],
        "special_tokens": special,
    }


def _settings(given: Given) -> dict[str, Any]:
    """Settings beside a tokenizer.json. A named word that is no added token stays where a template
    wrote it so.
    """

    def stays(token: Any) -> bool:
        return given.templated or token_text(token) is None or token_text(token) in given.added

    kept: dict[str, Any] = {}
    for key, value in settings_of(given.file.parent).items():
        if key in _KEPT:
            kept[key] = value
        elif key.endswith(_NAMING) and isinstance(value, list):
            kept[key] = [token_text(each) or each for each in value if stays(each)]
        elif key.endswith(_NAMING) and isinstance(value, dict) and "content" not in value:
            kept[key] = {
                name: token_text(each) or each for name, each in value.items() if stays(each)
            }
        elif key.endswith(_NAMING) and stays(value):
            kept[key] = token_text(value) or value
    return kept


def write_tokenizer(
    given: Given, folder: Path, max_length: int, probe: Sequence[str]
) -> dict[str, int | None]:
    """Write tokenizer.json, its settings and companions; ids of eos, bos and pad by name.

    A tokenizer.json of the run keeps its post-processor, another begins texts as training did.
    ValueError when the original cannot be expressed, or a text of `probe` gets other ids.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content, own = _content(given)
    run, special, copied = (
        given.tokenizer,
        {**own, **given.special},
        given.tokenizer.kind == "huggingface",
    )
    names = {"eos": run.eos_id, "bos": run.bos_id, "pad": run.pad_id}
    path = folder / "tokenizer.json"
    if _add(content, special) or not copied:
        tokenizer = Tokenizer.from_str(json.dumps(content))
        if run.begins_with is not None and not copied:
            content["post_processor"] = _beginning(
                _text_of(tokenizer, run.begins_with, "first"), run.begins_with
            )
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    else:
        shutil.copyfile(given.file, path)
    tokenizer = Tokenizer.from_file(str(path))
    wrong = {text: i for text, i in special.items() if tokenizer.token_to_id(text) != i}
    assert not wrong, f"tokens did not get their ids: {wrong}"
    config: dict[str, Any] = {"tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": max_length, "model_input_names": ["input_ids", "attention_mask"]}
    config |= dict.fromkeys(("eos_token", "bos_token", "pad_token"))
    if copied:
        config |= _settings(given)
        copy_companions(given.file.parent, folder, without=(OLDER_NAME,))
    named = {f"{name}_token": _text_of(tokenizer, i, name) for name, i in names.items()}
    config |= {
        name: text for name, text in named.items() if text is not None or name == "eos_token"
    }
    write_json(folder / "tokenizer_config.json", config)
    refuse_difference(
        given, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, probe
    )
    try:
        library = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, model_max_length=1 << 30
        )
    except Exception as error:  # settings of a foreign folder may fail anywhere in it
        raise ValueError(
            f"the transformers library does not read the exported tokenizer: {error}"
        ) from error
    refuse_difference(given, lambda text: library.encode(text, add_special_tokens=False), ())
    return names


def refuse_difference(
    given: Given, encode: Callable[[str], Sequence[int]], probe: Sequence[str]
) -> None:
    """ValueError with the first text of `probe` that `encode` gives other ids than the original.

    A Unigram model may cut a run like `-----` in several ways of the same score. Such a tie is no
    difference.
    """
    model = spm_model(given.file) if given.tokenizer.kind == "sentencepiece" else None
    symbols, plain = (
        sorted(given.added),
        list[str](),
    )  # texts around these, and pieces that look like one
    if model is not None:
        controls = {piece.piece for piece in model.pieces if piece.type == _CONTROL}
        symbols = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED][:200]
        plain = [
            "<unk>",
            "<0x41>",
            "a <0x0A> b",
            _SPACE,
            f" {_SPACE}{_SPACE} a{_SPACE}",
            f"a {_SPACE}",
        ]
        plain = [text for text in plain if text not in controls]
    around = (text for x in symbols for text in (x, f"a{x}b", f" {x} {x}{x}  word {x}"))
    for text in [*probe, *plain, *around]:
        expected, found = given.encode(text), list(map(int, encode(text)))
        if expected == found or (model is not None and are_tied(model, expected, found)):
            continue
        pairs = enumerate(zip(expected, found, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
        raise ValueError(
            f"the exported tokenizer does not encode as the original: {text[:200]!r} gives "
            f"{found[first : first + 8]} "
            f"instead of {expected[first : first + 8]} from token {first} on"
        )


def are_tied(model: Any, first: list[int], second: list[int]) -> bool:
    """Whether two ways of cutting a text have the same score to a Unigram model, as far as float32
    can tell.
    """
    if model.trainer_spec.model_type != 1 or max(first + second) >= len(model.pieces):
        return False
    normal = [[i for i in ids if model.pieces[i].type == _NORMAL] for ids in (first, second)]
    others = [sorted(i for i in ids if model.pieces[i].type != _NORMAL) for ids in (first, second)]
    sums = [math.fsum(model.pieces[i].score for i in ids) for ids in normal]
    rounding = (
        2.0**-24 * max(len(first), len(second)) * max(map(abs, sums))
    )  # n additions, each 2^-24 of the sum
    return others[0] == others[1] and abs(sums[0] - sums[1]) <= rounding
