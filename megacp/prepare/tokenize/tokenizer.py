"""Text to token ids and back: one interface over bytes, SentencePiece, tokenizer.json and GPT-2's
files, all local.

The fast engine (gigatoken) is used only where its ids equal those of the kind's reference on a
probe, when a tokenizer is loaded. Text with a symbol that the engine cuts otherwise, or a character
newer than its Unicode tables may be, goes to the reference.
"""

from __future__ import annotations

import abc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megacp.prepare.tokenize.beside import (
    BESIDE_NAMES,
    TEMPLATE_FOLDER,
    Beside,
    Surroundings,
    read_beside,
    surroundings_of,
    token_text,
    tokens_beside,
)
from megacp.storage.cache import kept_folder
from megacp.storage.files import refuse_pointer, sha256_of_all
from megacp.training.data.manifest import TokenizerInfo

EOS_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|eot|>",
    "<|im_end|>",
    "[EOS]",
)
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")
PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]")
FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
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


@cache
def _newer() -> np.ndarray:
    """bool [code points]: letters, digits and spaces that `regex` knows and the older tables of
    Python do not.
    """
    import regex

    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    newer = [
        ord(c)
        for c in regex.findall(r"[\p{L}\p{N}\s]", everything)
        if unicodedata.category(c) == "Cn"
    ]
    table = np.zeros(sys.maxunicode + 1, dtype=bool)
    table[newer] = True
    return table


def _has_newer(text: str) -> bool:
    """Whether engines with Unicode tables of different age could split a text differently."""
    return not text.isascii() and bool(
        _newer()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")].any()
    )


class Tokenizer(abc.ABC):
    """What every kind offers. Ids are 0 .. vocab_size - 1; eos_id, bos_id and pad_id are None where
    there is none.
    """

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
    asked_as_messages: bool = False
    """Whether its folder has the converter's template of messages in the house's own form."""
    model: Any = None
    own: frozenset[str] = frozenset()
    """Special tokens of a vocabulary itself, which in a text are plain text."""
    _fast: Any = None
    _apart: tuple[str, ...] = ()
    """Texts that the fast engine treats otherwise: what contains one goes to the reference."""

    @abc.abstractmethod
    def encode_reference(self, text: str) -> np.ndarray:
        """Ids of one text by the kind's own implementation, integers [n]; no bos or eos is
        added.
        """

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` [n]; bytes that are no UTF-8 become U+FFFD."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, a list of integer arrays [n_i], in order; no bos or eos is added.

        ValueError when a text cannot be UTF-8 (a lone surrogate).
        """
        try:
            slow = self.encode_reference
            if self._fast is None:
                return [slow(text) for text in texts]
            fast = self._fast.encode
            return [
                slow(text) if self._is_apart(text) or _has_newer(text) else fast(text)
                for text in texts
            ]
        except TypeError as error:  # the word of the packages for a lone surrogate
            raise ValueError(f"a text is not valid Unicode: {error}") from error

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None when there is none, or the kind's files do not name
        tokens by text.
        """
        return None

    def info(self) -> TokenizerInfo:
        """What the manifest of a dataset records."""
        ids = self.eos_id, self.bos_id, self.pad_id, self.begins_with
        return TokenizerInfo(self.kind, self.sha256, self.vocab_size, *ids)

    def accelerate(self, engine: str, load: Callable[[Any], Any], symbols: Iterable[str]) -> None:
        """Adopt `load(gigatoken module)` when the engine is installed, reads this tokenizer, and
        passes the probe.

        `symbols` are texts that may be one token by themselves; those that the engine cuts
        otherwise are set apart.
        """
        if engine != "auto" or importlib.util.find_spec("gigatoken") is None:
            return
        import gigatoken

        def differs(*texts: str) -> bool:
            return any(
                not np.array_equal(fast.encode(text), self.encode_reference(text)) for text in texts
            )

        try:
            fast = load(gigatoken).backend
            if fast.vocab_size > self.vocab_size or differs(
                *(text for text in PROBE if not self._is_apart(text))
            ):
                return
            cut = [s for s in symbols if differs(s, f"a{s}b", f" {s} {s}{s}\n{s}")]
        except Exception:  # whatever it cannot read or panics on: the reference is always right
            return
        self._fast, self.engine = fast, "gigatoken"
        self._apart += tuple(cut)

    def _is_apart(self, text: str) -> bool:
        return any(symbol in text for symbol in self._apart)


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


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file; the `sentencepiece` package is the reference."""

    kind = "sentencepiece"

    def __init__(self, path: Path, engine: str) -> None:
        """ValueError when the file is no SentencePiece model."""
        import sentencepiece

        self.files = (path,)
        self.sha256 = sha256_of_all(path)
        refuse_pointer(path)
        content = path.read_bytes()
        if not content:  # the package takes it for a model without pieces
            raise ValueError(f"{path}: not a SentencePiece model (it is empty)")
        try:
            model = self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size, ids = (
                model.vocab_size(),
                (model.eos_id(), model.bos_id(), model.pad_id()),
            )
        except Exception as error:  # RuntimeError or a protobuf error, depending on the damage
            raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
        self.eos_id, self.bos_id, self.pad_id = (None if i < 0 else i for i in ids)
        self.own = frozenset(model.id_to_piece(i) for i in (model.unk_id(), *ids) if i >= 0)
        # "<s>" written in a text is plain text to SentencePiece and a special token to gigatoken
        self._apart = tuple(
            model.id_to_piece(i) for i in range(self.vocab_size) if model.is_control(i)
        )
        # the package does not say which pieces are user-defined symbols, but all have score 0
        kinds = (model.is_control, model.is_unknown, model.is_byte)
        plain = (i for i in range(self.vocab_size) if not any(kind(i) for kind in kinds))
        symbols = [model.id_to_piece(i) for i in plain if model.get_score(i) == 0.0]
        self.accelerate(
            engine, lambda gigatoken: gigatoken.Tokenizer.from_sentencepiece(path), symbols
        )

    def encode_reference(self, text: str) -> np.ndarray:
        """int32 [n]."""
        return np.array(self._model.encode(text), dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Control pieces give nothing."""
        return self._model.decode(np.asarray(ids).tolist())


class PackageTokenizer(Tokenizer):
    """A model of the `tokenizers` package, made of a Hugging Face `tokenizer.json` or of GPT-2's
    two files.

    A `tokenizer_config.json` beside them says which token ends a document, where null is none, or
    `eod_token`. Where it is silent, the first of EOS_NAMES that is special counts; the first and
    the padding token likewise.
    """

    def __init__(
        self,
        kind: str,
        files: tuple[Path, ...],
        model: Any,
        special: Mapping[str, int],
        beside: Beside,
    ) -> None:
        """`special`: the ids of tokens that no text makes by chance."""
        self.kind, self.files, self.model = kind, files, model
        self.sha256 = sha256_of_all(*files)
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        self.surroundings = surroundings_of(model)
        for field, names in (("eos", EOS_NAMES), ("bos", BOS_NAMES), ("pad", PAD_NAMES)):
            found = next((special[name] for name in names if name in special), None)
            if f"{field}_token" in beside.values:
                text = token_text(beside.values[f"{field}_token"])
                found = None if text is None else self.token_id(text)
            setattr(self, f"{field}_id", found)

    def token_id(self, token: str) -> int | None:
        """Id of a token, as of any `Tokenizer`."""
        return self.model.token_to_id(token)

    def encode_reference(self, text: str) -> np.ndarray:
        """int32 [n]; special tokens written in a text are recognised, as the package does."""
        (encoding,) = self.model.encode_batch_fast(
            [text], add_special_tokens=False
        )  # without offsets
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special tokens are shown."""
        return self.model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _from_tokenizer_json(path: Path, engine: str, beside: Beside) -> Tokenizer:
    import tokenizers

    refuse_pointer(path)
    try:
        text = path.read_text(encoding="utf-8")
        model = tokenizers.Tokenizer.from_str(text)
        model.no_truncation()
        model.no_padding()
        added = model.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        made = PackageTokenizer("huggingface", (path,), model, special, beside)
    except BaseException as error:
        # the package raises bare Exception, and a panic of its Rust code is not even one
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path}: not a Hugging Face tokenizer.json ({error})") from error
    if beside.config is not None:
        made.files = (path, beside.config)
    symbols = [token.content for token in added.values()]
    made.accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_json(text), symbols)
    return made


def _from_gpt2(vocabulary: Path, merges: Path, engine: str, beside: Beside) -> Tokenizer:
    """GPT-2's byte-level BPE. Special tokens in a text stay plain text: those are special that no
    merge makes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    refuse_pointer(vocabulary)
    refuse_pointer(merges)
    try:
        ids, pairs = models.BPE.read_file(str(vocabulary), str(merges))
        model = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    # no ids, a line of merges that is no pair, a half or a whole of one that is no token
    except Exception as error:
        raise ValueError(f"{vocabulary}, {merges}: no byte-level BPE ({error})") from error
    if missing := sorted({*pre_tokenizers.ByteLevel.alphabet()} - ids.keys()):
        raise ValueError(
            f"{vocabulary}: no byte-level BPE, {len(missing)} bytes have no token, as "
            f"{missing[0]!r}"
        )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    apart = ids.keys() - {"".join(pair) for pair in pairs}
    special = {name: ids[name] for name in EOS_NAMES if name in apart}
    made = PackageTokenizer("gpt2", (vocabulary, merges), model, special, beside)
    made.own = frozenset(special)
    made.accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_json(model.to_str()), ())
    return made


def _by_library(folder: Path, engine: str, tokens: set[str]) -> Tokenizer:
    """A vocabulary with `tokens` beside it, by the tokenizer.json that the library makes of the
    folder.
    """
    begin = f"{folder}: {', '.join(sorted(tokens)[:3])} stand beside the vocabulary"
    try:
        release = importlib.metadata.version("transformers")
    except ImportError as error:
        raise ValueError(f"{begin}, which transformers reads: pip install 'megacp[hf]'") from error
    given = [
        path
        for name in (*itertools.chain(*FILES), *BESIDE_NAMES)
        if (path := folder / name).is_file()
    ]
    given += sorted(folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"))

    def convert(made: Path) -> None:
        from transformers import AutoTokenizer

        try:
            library = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            library.save_pretrained(made)
        except Exception as error:  # files of a foreign folder may fail anywhere in it
            raise ValueError(f"{begin}, and transformers does not read them: {error}") from error

    kept = kept_folder(f"{sha256_of_all(*given)}-{release}", convert)
    return _from_files(str(kept / "tokenizer.json"), engine)


def load_tokenizer(
    specification: str,
    engine: str = "auto",
    eod_token: str | None = None,
    prepend_bos: bool | None = None,
) -> Tokenizer:
    """Load what `--tokenizer` names. ValueError lists what is allowed; files are local, always.

    engine: "auto" uses gigatoken where its ids are identical, "reference" never. eod_token: the
    token, by its text, that ends a document, for files that do not say. prepend_bos: None = as the
    files say.
    """
    tokenizer = ByteTokenizer() if specification == "byte" else _from_files(specification, engine)
    if eod_token is not None:
        tokenizer.eos_id = tokenizer.token_id(eod_token)
        if tokenizer.eos_id is None:
            raise ValueError(
                f"--eod-token {eod_token!r} is not in the vocabulary of --tokenizer {specification}"
            )
    first = tokenizer.surroundings.first(tokenizer.bos_id)
    if prepend_bos and first is None:
        first = next(iter(tokenizer.surroundings.before), tokenizer.bos_id)
        if first is None:
            raise ValueError(
                f"--prepend-bos: --tokenizer {specification} does not say which token begins a "
                "document"
            )
    tokenizer.begins_with = first if prepend_bos is not False else None
    return tokenizer


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that are a folder's tokenizer; none where it has none."""
    return next((names for names in FILES if all((folder / name).is_file() for name in names)), ())


def _from_files(specification: str, engine: str) -> Tokenizer:
    """A tokenizer, with the first token and the chat template that the files beside it state."""
    paths = [Path(part) for part in specification.split(",")]
    if paths[0].is_dir():
        paths = [paths[0] / name for name in tokenizer_files(paths[0])]
        if not paths:
            names = ", ".join(" with ".join(names) for names in FILES)
            raise ValueError(f"--tokenizer {specification}: the folder has none of {names}")
    kind = tuple(path.suffix for path in paths)
    if kind not in ((".model",), (".json",), (".json", ".txt")):
        raise ValueError(
            f"--tokenizer is {specification!r}, allowed are byte | FOLDER of a model | FILE.model "
            "(SentencePiece) | "
            "tokenizer.json (Hugging Face) | vocab.json,merges.txt (GPT-2 byte-level BPE); nothing is downloaded"
        )
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(
            f"--tokenizer {specification}: no such file: {', '.join(missing)} (nothing is "
            "downloaded)"
        )
    beside = read_beside(paths[0].parent)
    tokenizer: Tokenizer
    if len(paths) == 2:
        tokenizer = _from_gpt2(paths[0], paths[1], engine, beside)
    elif kind == (".model",):
        tokenizer = SentencePieceTokenizer(paths[0], engine)
    else:
        tokenizer = _from_tokenizer_json(paths[0], engine, beside)
    folder, named = paths[0].parent, tuple(path.name for path in paths)
    if named in FILES[1:] and (tokens := tokens_beside(folder) - tokenizer.own):
        return _by_library(folder, engine, tokens)
    tokenizer.chat_template = beside.chat_template
    tokenizer.asked_as_messages = beside.is_ours
    if isinstance(stated := beside.values.get("add_bos_token"), bool):
        tokenizer.surroundings = replace(tokenizer.surroundings, stated=stated)
    return tokenizer
