"""Writes the tokenizer files of a Hugging Face folder, for each kind of tokenizer of a run.

A `tokenizer.json` is copied if no image tokens must be added. Other kinds are converted to one.
The result is refused if it changes the ids of a test text. Its class is `PreTrainedTokenizerFast`,
because the library rebuilds tokenizers of other classes.
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
# Maximum size of a tokenizer file, in bytes.
LARGEST = 512 << 20
# Fields of a tokenizer_config.json with the same meaning for CLASS.
_KEPT = {"chat_template", "padding_side", "truncation_side", "model_input_names"}
# Suffixes of other fields, which name special tokens or control which tokens a text gets.
_NAMING = ("_token", "_special_tokens")
# SentencePiece's character for a space.
_SPACE = "\u2581"
# Kinds of pieces in a SentencePiece model.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


@dataclass(frozen=True)
class Given:
    """The tokenizer of a run, and the tokens that an export adds to it."""

    tokenizer: Tokenizer
    special: Mapping[str, int] = field(default_factory=dict)
    """Additional tokens to be recognised in texts, such as those of images: text -> id."""
    templated: bool = False
    """Whether the run's messages were formatted with a chat template. In such a run, the words that
    the settings name are special tokens.
    """

    @property
    def file(self) -> Path:
        """The tokenizer's file, or the first of two."""
        return self.tokenizer.files[0]

    def encode(self, text: str) -> list[int]:
        """Return the ids that a text has in training."""
        return self.tokenizer.encode_reference(text).tolist()

    @functools.cached_property
    def added(self) -> frozenset[str]:
        """Texts of the added tokens of a tokenizer.json; empty for other kinds."""
        if self.tokenizer.kind != "huggingface":
            return frozenset()
        tokens = read_object(self.file, LARGEST).get("added_tokens", [])
        return frozenset(token["content"] for token in tokens)


def _byte_level() -> Any:
    """Return a fast tokenizer whose ids 0..255 are the bytes.

    As in GPT-2, a printable byte is written as its character, and any other byte as a character
    with a code point of at least 256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # In sorted order, printable bytes come first, each as its own character.
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = [ord(character) for character in characters if ord(character) < 256]
    order = [*shown, *sorted(set(range(256)).difference(shown))]
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip(characters, order, strict=True)), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def spm_model(path: Path) -> Any:
    """Return a SentencePiece model file as an object of the library. Raise ValueError if it is
    invalid.
    """
    try:
        from transformers.convert_slow_tokenizer import import_protobuf

        model = import_protobuf().ModelProto()
    except ImportError as error:
        raise ValueError(
            "reading a SentencePiece model requires protobuf: pip install protobuf"
        ) from error
    try:
        model.ParseFromString(read_regular(path, LARGEST))
    except Exception as error:  # a protobuf error, which is not a ValueError
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    return model


def _from_sentencepiece(path: Path) -> Any:
    """Return the fast tokenizer of a SentencePiece model; the caller compares its ids."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        normalizers,
        pre_tokenizers,
    )

    proto = spm_model(path)
    spec = proto.normalizer_spec
    pieces = proto.pieces
    symbols = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    tokenizer = Tokenizer(_model_of_pieces(proto, path, has_symbols=bool(symbols)))
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        table = normalizers.Precompiled(spec.precompiled_charsmap)
        # The table would look up "\r\n" as one cluster, but SentencePiece replaces each of the two.
        both = "".join(table.normalize_str(end) for end in "\r\n")
        if both != "\r\n":
            steps.append(normalizers.Replace("\r\n", both))
        steps.append(table)
    if spec.remove_extra_whitespaces:
        ends = Regex(rf"\A +|[ {_SPACE}]+\z")
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(ends, "")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if symbols:
        # The longest symbol wins, as in SentencePiece.
        ordered = sorted(symbols, key=lambda s: (-len(s), s))
        longest = "|".join(re.escape(symbol) for symbol in ordered)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest), "isolated")
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    controls = [piece.piece for piece in pieces if piece.type == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in controls]
    )
    return tokenizer


def _model_of_pieces(proto: Any, path: Path, has_symbols: bool) -> Any:
    """Return the BPE or Unigram model of a SentencePiece model.

    `has_symbols`: whether it has user-defined symbols. Raise ValueError for other model types.
    """
    from tokenizers import models
    from transformers.convert_slow_tokenizer import generate_merges

    trainer = proto.trainer_spec
    pieces = proto.pieces
    # BPE: the merges follow from the scores of the pieces.
    if trainer.model_type == 2:
        vocabulary = {piece.piece: i for i, piece in enumerate(pieces)}
        scores_of_pieces = {piece.piece: piece.score for piece in pieces}
        apart = {piece.piece for piece in pieces if piece.type != _NORMAL}
        merges = generate_merges(vocabulary, scores_of_pieces, apart)
        return models.BPE(
            vocabulary,
            merges,
            ignore_merges=has_symbols,
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    if trainer.model_type != 1:
        raise ValueError(
            f"{path}: model_type is {trainer.model_type}, supported are Unigram (1) and BPE (2)"
        )
    least = min(piece.score for piece in pieces if piece.type == _NORMAL)
    scored: list[tuple[str, float]] = []
    for piece in pieces:
        score = piece.score
        if piece.type == _USER_DEFINED:
            # The text is split at symbols, so each is a text by itself: 0 is the best score there.
            score = 0.0
        elif piece.type != _NORMAL:
            # Worse than the characters of its name, so it is never found in a text.
            score = least * len(piece.piece) - 1
        scored.append((piece.piece, score))
    return models.Unigram(scored, trainer.unk_id, trainer.byte_fallback)


def _content(given: Given) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the content of a tokenizer.json, and the tokens that are not in it."""
    kind = given.tokenizer.kind
    if kind == "byte":
        return json.loads(_byte_level().to_str()), {BYTE_EOS: 256}
    if kind == "huggingface":
        return read_object(given.file, LARGEST), {}
    made = given.tokenizer.model if kind == "gpt2" else _from_sentencepiece(given.file)
    return json.loads(made.to_str()), {}


def _add(content: dict[str, Any], special: Mapping[str, int]) -> bool:
    """Add the tokens `special` with their ids, which may leave gaps; return whether any was new.

    Raise ValueError if a text or an id is already used differently.
    """
    vocabulary = content["model"]["vocab"]
    ordered = isinstance(vocabulary, list)  # Unigram: the index is the id
    if ordered:
        known = {entry[0]: i for i, entry in enumerate(vocabulary)}
    else:
        known = dict(vocabulary)
    own = set(known)
    added = content.setdefault("added_tokens", [])
    known |= {token["content"]: token["id"] for token in added}
    # Neither a text nor an id may have two meanings.
    taken = {i: text for text, i in known.items()}
    for text, i in special.items():
        if known.get(text, i) != i or taken.get(i, text) != text:
            raise ValueError(
                f"cannot add {text!r} with id {i}: the tokenizer has {text!r} with id "
                f"{known.get(text)} and {taken.get(i)!r} with id {i}"
            )
    present = {token["content"] for token in added}
    missing = {text: i for text, i in special.items() if text not in present}
    if not missing:
        return False
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added += [{"id": i, "content": text, **plain, "special": True} for text, i in missing.items()]
    added.sort(key=lambda token: token["id"])
    # Earlier added tokens, too, go into the vocabulary: otherwise the library would number them
    # after the new ones.
    for token in added:
        text = token["content"]
        i = token["id"]
        if text in own:
            continue
        if not ordered:
            vocabulary[text] = i
            continue
        # A lower score than that of all pieces would change the score of unknown characters.
        least = min(score for _, score in vocabulary)
        vocabulary += [[f"\x00unused {n}", least] for n in range(len(vocabulary), i)]
        if i == len(vocabulary):
            vocabulary.append([text, least])
    return True


def _text_of(tokenizer: Any, i: int | None, kind: str) -> str | None:
    """Return the text of a special token. Raise ValueError for an id outside the vocabulary."""
    if i is None:
        return None
    text = tokenizer.id_to_token(i)
    if text is None:
        raise ValueError(f"the {kind} token {i} of --tokenizer is not in its vocabulary")
    return text


def _beginning(text: str | None, i: int) -> dict[str, Any]:
    """Return a post-processor that adds a token at the beginning of a text."""
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
    """Return the settings to export from the files next to a tokenizer.json.

    The library turns the words that they name into special tokens. A word that is not an added
    token is left out, because it was ordinary text in training; this does not apply to messages
    that were formatted with a chat template.
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
    """Write tokenizer.json, its settings and companion files; return the ids of eos, bos and pad.

    A tokenizer.json of the run keeps its post-processor. Other kinds get one that begins texts as
    in training. Raise ValueError if the original cannot be expressed, or if the ids of a text of
    `probe` change.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content, own = _content(given)
    run = given.tokenizer
    special = {**own, **given.special}
    copied = run.kind == "huggingface"
    names = {"eos": run.eos_id, "bos": run.bos_id, "pad": run.pad_id}
    path = folder / "tokenizer.json"
    # An unchanged tokenizer.json is copied as it is.
    if _add(content, special) or not copied:
        tokenizer = Tokenizer.from_str(json.dumps(content))
        if run.begins_with is not None and not copied:
            first = _text_of(tokenizer, run.begins_with, "first")
            content["post_processor"] = _beginning(first, run.begins_with)
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    else:
        shutil.copyfile(given.file, path)
    tokenizer = Tokenizer.from_file(str(path))
    wrong = {text: i for text, i in special.items() if tokenizer.token_to_id(text) != i}
    assert not wrong, f"tokens did not get their ids: {wrong}"
    config: dict[str, Any] = {"tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": max_length, "model_input_names": ["input_ids", "attention_mask"]}
    # Nulls, because without these fields the library would use the defaults of the class.
    config |= dict.fromkeys(("eos_token", "bos_token", "pad_token"))
    if copied:
        config |= _settings(given)
        copy_companions(given.file.parent, folder, without=(OLDER_NAME,))
    for name, i in names.items():
        text = _text_of(tokenizer, i, name)
        # The end token is always the run's, even None; other tokens may come from the settings.
        if text is not None or name == "eos":
            config[f"{name}_token"] = text
    write_json(folder / "tokenizer_config.json", config)
    refuse_difference(
        given, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, probe
    )
    # Check again with the library's class, which applies the settings.
    try:
        library = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, model_max_length=1 << 30
        )
    except Exception as error:  # unusual settings may raise any error
        raise ValueError(
            f"the transformers library cannot load the exported tokenizer: {error}"
        ) from error
    refuse_difference(given, lambda text: library.encode(text, add_special_tokens=False), ())
    return names


def refuse_difference(
    given: Given, encode: Callable[[str], Sequence[int]], probe: Sequence[str]
) -> None:
    """Raise ValueError with the first text of `probe` whose ids in `encode` differ from the run's.

    Texts around added tokens are compared, too. A Unigram model may split a text like `-----` in
    several ways with equal scores. Such ties are accepted.
    """
    model = spm_model(given.file) if given.tokenizer.kind == "sentencepiece" else None
    symbols = sorted(given.added)
    plain: list[str] = []  # texts that look like special pieces
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
    around: list[str] = []
    for x in symbols:
        around += (x, f"a{x}b", f" {x} {x}{x}  word {x}")
    for text in [*probe, *plain, *around]:
        expected = given.encode(text)
        found = list(map(int, encode(text)))
        if expected == found or (model is not None and are_tied(model, expected, found)):
            continue
        pairs = enumerate(zip(expected, found, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
        raise ValueError(
            f"the exported tokenizer differs from the original: starting at token {first}, "
            f"{text[:200]!r} gives {found[first : first + 8]} instead of "
            f"{expected[first : first + 8]}"
        )


def are_tied(model: Any, first: list[int], second: list[int]) -> bool:
    """Return whether two ways to split a text have the same score in a Unigram model.

    Scores that differ by less than the rounding error of float32 count as the same.
    """
    if model.trainer_spec.model_type != 1 or max(first + second) >= len(model.pieces):
        return False
    # Pieces that are not normal have no score, so both ways must contain the same ones.
    if _other_pieces(model, first) != _other_pieces(model, second):
        return False
    score_of_first = _score(model, first)
    score_of_second = _score(model, second)
    # n additions, each with an error of 2^-24 of the sum
    additions = max(len(first), len(second))
    rounding = 2.0**-24 * additions * max(abs(score_of_first), abs(score_of_second))
    return abs(score_of_first - score_of_second) <= rounding


def _score(model: Any, ids: Sequence[int]) -> float:
    """Return the sum of the scores of normal pieces."""
    normal = [model.pieces[i] for i in ids if model.pieces[i].type == _NORMAL]
    return math.fsum(piece.score for piece in normal)


def _other_pieces(model: Any, ids: Sequence[int]) -> list[int]:
    """Return the sorted ids of pieces that are not normal."""
    return sorted(i for i in ids if model.pieces[i].type != _NORMAL)
