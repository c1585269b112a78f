"""Text to token ids and back: one interface, the kinds of tokenizer in one table, all from local files.

Key property: the fast engine (gigatoken) is used only where its ids equal those of the kind's reference. Both are
compared on a probe when a tokenizer is loaded, and on the beginning of every unit of a build. Text that the engine is
known to treat differently goes to the reference. Rejected: transformers' AutoTokenizer, which imports torch, guesses
from names and downloads.
"""

from __future__ import annotations

import abc
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megacp.core.data.manifest import TokenizerInfo
from megacp.prepare.tokenize.beside import (
    Surroundings,
    both_ways,
    chosen_token,
    read_beside,
    read_object,
    surroundings,
    text_of,
)
from megacp.prepare.tokenize.gpt2_files import byte_level_bpe, merge_pairs
from megacp.prepare.tokenize.newer_characters import has_newer_characters

ENGINES = ("auto", "reference")
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot|>", "<|im_end|>", "[EOS]")
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")
PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]")
PROBE = (
    "",
    " ",
    "  ",
    "\n\n\n",
    "\r\n mixed \r\n\tends",
    "The quick brown fox; it's we'll I'D don\u2019t CAN'T.",
    "runs  of   spaces    and\t\ttabs \n \n\n  x = 1\n        y = 2   ",
    "12345 1 23 1,234.50 0x7f 3e-7 \u00b2 \u00bd \u2167 \u0663",
    "\u00e9 \u00fc \u00df \u6f22\u5b57 \u304b\u306a \ud55c\uae00 \u0420\u0443\u0441 \u0627\u0644 \u05e2\u05d1"
    " \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f1e9\U0001f1ea e\u0301"
    " \ufb01 \u00a0 \u3000x \ufeff\u2028\u2029",
    "\x00\x01\x7f\x80 def f(x): return {'a': [1, 2], \"b\": None}  # <tag/> \\n \\u00e9 ___ --- === ...",
    "A" * 300 + "ab" * 100 + "!?" * 60,
)

_TEXTS_A_CALL = 64
"""Texts given to the `tokenizers` package at once: it shares them among threads, and holds all about each token."""


class Tokenizer(abc.ABC):
    """What every kind offers. Ids are 0 .. vocab_size - 1; eos_id, bos_id and pad_id are None where there is none."""

    kind: str
    sha256: str
    vocab_size: int
    eos_id: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    files: tuple[Path, ...] = ()
    """The files it was read from; empty for `byte`."""
    engine: str = "reference"
    """Which implementation encodes: "gigatoken" or "reference"."""
    begins_with: int | None = None
    """The id that stands before every document; `encode` does not add it."""
    surroundings: Surroundings = Surroundings()
    """What its files put around a text."""
    chat_template: Path | None = None
    """The file with the template that a server writes messages by."""

    @abc.abstractmethod
    def encode_reference(self, text: str) -> np.ndarray:
        """Ids of one text by the kind's own implementation, integers [n]; no bos or eos is added."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` [n]; bytes that are no UTF-8 become U+FFFD."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, a list of integer arrays [n_i], in order; no bos or eos is added.

        ValueError when a text cannot be UTF-8 (a lone surrogate).
        """
        try:
            return self._encode_references(texts)
        except TypeError as error:  # the word of tokenizers for a lone surrogate
            raise ValueError(f"a text is not valid Unicode: {error}") from error

    def _encode_references(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_reference` of each text."""
        return [self.encode_reference(text) for text in texts]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None when there is none, or the kind's files do not name tokens by text."""
        return None

    def disagreement(self, texts: Sequence[str]) -> str | None:
        """The first text whose ids differ between `encode` and `encode_reference`; None when all agree."""
        for text, ids in zip(texts, self.encode(texts), strict=True):
            if not np.array_equal(ids, self.encode_reference(text)):
                return text
        return None

    def info(self) -> TokenizerInfo:
        """What the manifest of a dataset records."""
        ids = self.eos_id, self.bos_id, self.pad_id, self.begins_with
        return TokenizerInfo(self.kind, self.sha256, self.vocab_size, *ids)


class _Accelerated(Tokenizer):
    """A kind that may encode with gigatoken; subclasses call `_accelerate` at the end of their constructor."""

    _fast: Any = None
    _apart: tuple[str, ...] = ()
    """Texts that the fast engine is known to treat otherwise: what contains one goes to the reference."""

    def _accelerate(self, engine: str, load: Callable[[Any], Any], symbols: Iterable[str]) -> None:
        """Adopt `load(gigatoken module)` when the engine is installed, reads this tokenizer, and passes the probe.

        `symbols` are texts that may be one token by themselves; those that the engine cuts otherwise are set apart.
        """
        if engine != "auto" or importlib.util.find_spec("gigatoken") is None:
            return
        import gigatoken

        try:
            self._fast = load(gigatoken).backend
            agrees = self._fast.vocab_size <= self.vocab_size and self.disagreement(PROBE) is None
        except Exception:  # whatever it cannot read or panics on: the reference is always right
            agrees = False
        if agrees:
            self.engine = "gigatoken"
            self._apart += tuple(filter(self._is_cut_otherwise, symbols))
        else:
            self._fast = None

    def _is_cut_otherwise(self, symbol: str) -> bool:
        texts = (symbol, f"a{symbol}b", f" {symbol} {symbol}{symbol}\n{symbol}")
        return any(not np.array_equal(self._fast.encode(text), self.encode_reference(text)) for text in texts)

    def _needs_reference(self, text: str) -> bool:
        return has_newer_characters(text) or any(symbol in text for symbol in self._apart)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As Tokenizer.encode, with the fast engine where its ids are the reference's."""
        if self._fast is None:
            return super().encode(texts)
        fast, slow = self._fast.encode, self.encode_reference
        try:
            return [slow(text) if self._needs_reference(text) else fast(text) for text in texts]
        except TypeError as error:  # gigatoken's word for a lone surrogate
            raise ValueError(f"a text is not valid Unicode: {error}") from error


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0..255, and end of document as 256."""

    kind = "byte"
    sha256 = hashlib.sha256(b"megacp byte tokenizer").hexdigest()
    vocab_size = 257
    eos_id = 256

    def encode_reference(self, text: str) -> np.ndarray:
        """uint8 [n]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The end-of-document id gives nothing."""
        ids = np.asarray(ids, dtype=np.int64)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class SentencePieceTokenizer(_Accelerated):
    """A SentencePiece `.model` file; the `sentencepiece` package is the reference."""

    kind = "sentencepiece"

    def __init__(self, path: Path, engine: str) -> None:
        """ValueError when the file is no SentencePiece model."""
        import sentencepiece

        self.files = (path,)
        self.sha256 = _hash_files(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            self.vocab_size = self._model.vocab_size()
        except Exception as error:  # RuntimeError or a protobuf error, depending on the damage
            raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
        self.eos_id, self.bos_id, self.pad_id = (
            None if i < 0 else i for i in (self._model.eos_id(), self._model.bos_id(), self._model.pad_id())
        )
        pieces = range(self.vocab_size)
        # "<s>" written in a text is plain text to SentencePiece and a special token to gigatoken
        self._apart = tuple(self._model.id_to_piece(i) for i in pieces if self._model.is_control(i))
        self._accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_sentencepiece(path), self._symbols())

    def _symbols(self) -> list[str]:
        """The pieces that may be user-defined symbols: the package does not say which are, but all have score 0."""
        plain = (i for i in range(self.vocab_size) if not (self._model.is_control(i) or self._model.is_unknown(i)))
        ids = (i for i in plain if self._model.get_score(i) == 0.0 and not self._model.is_byte(i))
        return [self._model.id_to_piece(i) for i in ids]

    def _needs_reference(self, text: str) -> bool:
        return any(symbol in text for symbol in self._apart)

    def encode_reference(self, text: str) -> np.ndarray:
        """int32 [n]."""
        return np.array(self._model.encode(text), dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Control pieces give nothing."""
        return self._model.decode(np.asarray(ids).tolist())


class _PackageTokenizer(_Accelerated):
    """A kind whose reference is a model of the `tokenizers` package."""

    _model: Any

    def token_id(self, token: str) -> int | None:
        """As Tokenizer.token_id."""
        return self._model.token_to_id(token)

    def encode_reference(self, text: str) -> np.ndarray:
        """int32 [n]."""
        return np.array(self._model.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _encode_references(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Some texts a call, which the package shares among threads, and without offsets, which nobody reads here."""
        found: list[np.ndarray] = []
        for start in range(0, len(texts), _TEXTS_A_CALL):
            some = list(texts[start : start + _TEXTS_A_CALL])
            for encoding in self._model.encode_batch_fast(some, add_special_tokens=False):
                found.append(np.array(encoding.ids, dtype=np.int32))
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special tokens are shown."""
        return self._model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


class HuggingFaceTokenizer(_PackageTokenizer):
    """A Hugging Face `tokenizer.json`; the `tokenizers` package is the reference.

    Special tokens written in a text are recognised, as that package does. The file does not say which token ends a
    document: a `tokenizer_config.json` beside it does, where null is none, or `eod_token`. Where the config is silent,
    the first of EOS_NAMES that is a special added token counts. Tokens of BOS_NAMES and PAD_NAMES are found likewise.
    """

    kind = "huggingface"

    def __init__(self, path: Path, engine: str) -> None:
        """ValueError when the file is no tokenizer.json."""
        import tokenizers

        try:
            text = path.read_text(encoding="utf-8")
            self._model = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"{path}: not a Hugging Face tokenizer.json ({error})") from error
        self._model.no_truncation()
        self._model.no_padding()
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        beside = read_beside(path.parent)
        self.files = (path,) if beside.config is None else (path, beside.config)
        self.sha256 = _hash_files(path)
        added = self._model.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.eos_id, self.bos_id, self.pad_id = (
            chosen_token(beside.values, key, names, self.token_id, special)
            for key, names in (("eos_token", EOS_NAMES), ("bos_token", BOS_NAMES), ("pad_token", PAD_NAMES))
        )
        self.surroundings = Surroundings(*surroundings(*both_ways(self._model)))
        symbols = (token.content for token in added.values())
        self._accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_json(text), symbols)


class GPT2Tokenizer(_PackageTokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`. Special tokens in a text stay plain text.

    Every byte string has an encoding. The files are those published with Radford et al. 2019: each byte is written as
    one printable character, and `merges.txt` lists pairs from first to last merged. A `tokenizer_config.json` beside
    them says which token ends a document, where null is none. Where it is silent, the first of EOS_NAMES counts that no
    merge makes: what a merge makes is a word.
    """

    kind = "gpt2"

    def __init__(self, vocabulary: Path, merges: Path, engine: str) -> None:
        """ValueError when a file is not what its place says."""
        ids, pairs = read_object(vocabulary), list(merge_pairs(merges))
        if not ids or not all(type(i) is int and i >= 0 for i in ids.values()):
            raise ValueError(f"{vocabulary}: expected an object of token: id")
        try:
            self._model = byte_level_bpe(ids, pairs)
        except ValueError as error:
            raise ValueError(f"{vocabulary}, {merges}: {error}") from error
        self.files = (vocabulary, merges)
        self.sha256 = _hash_files(vocabulary, merges)
        self.vocab_size = max(ids.values()) + 1
        apart = ids.keys() - {left + right for left, right in pairs}
        special = {name: ids[name] for name in EOS_NAMES if name in apart}
        self.eos_id = chosen_token(read_beside(vocabulary.parent).values, "eos_token", EOS_NAMES, ids.get, special)
        self._accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_json(self._model.to_str()), ())


def _hash_files(*paths: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


@dataclass(frozen=True)
class _Kind:
    shown: str
    """How it is written after --tokenizer."""
    matches: Callable[[list[str]], bool]
    """Whether the comma-separated parts of a specification are of this kind."""
    load: Callable[[list[Path], str], Tokenizer]


_KINDS = (
    _Kind("byte", lambda parts: parts == ["byte"], lambda paths, engine: ByteTokenizer()),
    _Kind(
        "FILE.model (SentencePiece)",
        lambda parts: len(parts) == 1 and parts[0].endswith(".model"),
        lambda paths, engine: SentencePieceTokenizer(paths[0], engine),
    ),
    _Kind(
        "tokenizer.json (Hugging Face)",
        lambda parts: len(parts) == 1 and parts[0].endswith(".json"),
        lambda paths, engine: HuggingFaceTokenizer(paths[0], engine),
    ),
    _Kind(
        "vocab.json,merges.txt (GPT-2 byte-level BPE)",
        lambda parts: len(parts) == 2 and parts[0].endswith(".json") and parts[1].endswith(".txt"),
        lambda paths, engine: GPT2Tokenizer(paths[0], paths[1], engine),
    ),
)


def load_tokenizer(
    specification: str, engine: str = "auto", eod_token: str | None = None, prepend_bos: bool | None = None
) -> Tokenizer:
    """Load what `--tokenizer` names: byte | FILE.model | tokenizer.json | vocab.json,merges.txt.

    engine: "auto" uses gigatoken where its ids are identical, "reference" never. eod_token: the token, by its text,
    that ends a document, for files that do not say. prepend_bos: whether a token begins every document; None = as the
    files say. ValueError lists what is allowed; files are local, always.
    """
    if engine not in ENGINES:
        raise ValueError(f"--tokenizer-engine is {engine!r}, allowed are {', '.join(ENGINES)}")
    parts = specification.split(",")
    kind = next((kind for kind in _KINDS if kind.matches(parts)), None)
    if kind is None:
        allowed = " | ".join(kind.shown for kind in _KINDS)
        raise ValueError(f"--tokenizer is {specification!r}, allowed are {allowed}; nothing is downloaded")
    paths = [Path(part) for part in parts]
    missing = [str(path) for path in paths if kind.shown != "byte" and not path.is_file()]
    if missing:
        raise ValueError(f"--tokenizer {specification}: no such file: {', '.join(missing)} (nothing is downloaded)")
    tokenizer = kind.load(paths, engine)
    if eod_token is not None:
        eos_id = tokenizer.token_id(eod_token)
        if eos_id is None:
            raise ValueError(f"--eod-token {eod_token!r} is not in the vocabulary of --tokenizer {specification}")
        tokenizer.eos_id = eos_id
    if kind.shown != "byte":
        _take_beside(tokenizer, paths[0].parent)
    first = tokenizer.surroundings.first(tokenizer.bos_id)
    if prepend_bos and first is None:
        first = next(iter(tokenizer.surroundings.before), tokenizer.bos_id)
        if first is None:
            raise ValueError(f"--prepend-bos: --tokenizer {specification} does not say which token begins a document")
    tokenizer.begins_with = first if prepend_bos is not False else None
    return tokenizer


def _take_beside(tokenizer: Tokenizer, folder: Path) -> None:
    """Take over the first token and the chat template that the files beside a tokenizer state."""
    beside = read_beside(folder)
    tokenizer.chat_template = beside.chat_template
    stated, bos = beside.values.get("add_bos_token"), text_of(beside.values.get("bos_token"))
    if tokenizer.bos_id is None and stated is True and bos is not None:
        tokenizer.bos_id = tokenizer.token_id(bos)
    if isinstance(stated, bool):
        tokenizer.surroundings = replace(tokenizer.surroundings, stated=stated)
