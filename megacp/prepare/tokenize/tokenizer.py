"""Convert text to token ids and back, with local files only.

One interface covers bytes, SentencePiece, tokenizer.json and GPT-2's two files. The fast engine
(gigatoken) is used only if it produces the ids of the reference on a probe when the tokenizer is
loaded. A text goes to the reference if it has a symbol that the engine splits differently, or a
character that may be newer than the engine's Unicode tables.
"""

from __future__ import annotations

import abc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import re
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

# usual texts of special tokens, in order of preference
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
# texts on which the fast engine must agree with the reference: white space, contractions, numbers,
# scripts, combined emoji, control characters, code, and long runs
PROBE = (
    "",
    " ",
    "  ",
    "\n\n\n",
    "\r\n mixed \r\n\tends",
    "The quick brown fox; it's we'll I'D don\u2019t CAN'T.",
    "runs  of   spaces    and\t\ttabs \n \n\n  x = 1\n        y = 2   ",
    "12345 1 23 1,234.50 0x7f 3e-7 \u00b2 \u00bd \u2167 \u0663",
    "\u00e9 \u00fc \u00df \u6f22\u5b57 \u304b\u306a \ud55c\uae00 \u0420\u0443\u0441"
    " \u0627\u0644 \u05e2\u05d1"
    " \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f1e9\U0001f1ea"
    " e\u0301"
    " \ufb01 \u00a0 \u3000x \ufeff\u2028\u2029",
    "\x00\x01\x7f\x80 def f(x): return {'a': [1, 2], \"b\": None}  "
    "# <tag/> \\n \\u00e9 ___ --- === ...",
    "A" * 300 + "ab" * 100 + "!?" * 60,
)


@cache
def _newer() -> np.ndarray:
    """Return bool [code points]: letters, digits and spaces that `regex` knows, but Python's older
    tables do not.
    """
    import regex

    # all code points except surrogates, which are not characters
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    # "Cn" is the category of unassigned characters in Python's tables
    found = regex.findall(r"[\p{L}\p{N}\s]", everything)
    newer = [ord(c) for c in found if unicodedata.category(c) == "Cn"]
    table = np.zeros(sys.maxunicode + 1, dtype=bool)
    table[newer] = True
    return table


def _has_newer(text: str) -> bool:
    """Return whether engines with different Unicode versions could split a text differently."""
    if text.isascii():
        return False
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return bool(_newer()[code_points].any())


class Tokenizer(abc.ABC):
    """Interface of all tokenizers.

    Ids are 0 .. vocab_size - 1. `eos_id`, `bos_id` and `pad_id` are None if there is no such token.
    """

    kind: str
    sha256: str
    vocab_size: int
    eos_id: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    files: tuple[Path, ...] = ()
    """Files of the tokenizer; empty for `byte`."""
    engine: str = "reference"
    """Implementation that encodes: "gigatoken" or "reference"."""
    begins_with: int | None = None
    """Id at the beginning of every document; `encode` does not add it."""
    surroundings: Surroundings = Surroundings()
    """Special tokens that its files put around a text."""
    chat_template: Path | None = None
    """File with the chat template of a server."""
    asked_as_messages: bool = False
    """Whether its folder has the converter's template for conversations without a chat template."""
    model: Any = None
    own: frozenset[str] = frozenset()
    """Special tokens of the vocabulary that are plain text within a text."""
    _fast: Any = None
    _apart: tuple[str, ...] = ()
    """Texts that the fast engine splits differently; a text that contains one goes to the
    reference.
    """

    @abc.abstractmethod
    def encode_reference(self, text: str) -> np.ndarray:
        """Return the ids of one text, integers [n], from the reference; no BOS or EOS is added."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` [n]; bytes that are not UTF-8 become U+FFFD."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, integer arrays [n_i] in order; no BOS or EOS is added.

        Raise ValueError if a text cannot be encoded as UTF-8 (a lone surrogate).
        """
        # the reference encodes texts that the fast engine might split differently
        try:
            slow = self.encode_reference
            if self._fast is None:
                return [slow(text) for text in texts]
            fast = self._fast.encode
            return [
                slow(text) if self._is_apart(text) or _has_newer(text) else fast(text)
                for text in texts
            ]
        except TypeError as error:  # the packages' error for a lone surrogate
            raise ValueError(f"a text is not valid Unicode: {error}") from error

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text; None if there is none, or if tokens have no
        text.
        """
        return None

    def info(self) -> TokenizerInfo:
        """Return the tokenizer's entry in the manifest of a dataset."""
        ids = self.eos_id, self.bos_id, self.pad_id, self.begins_with
        return TokenizerInfo(self.kind, self.sha256, self.vocab_size, *ids)

    def accelerate(self, engine: str, load: Callable[[Any], Any], symbols: Iterable[str]) -> None:
        """Use `load(gigatoken module)` if it is installed, reads this tokenizer, and passes the
        probe.

        `symbols` are texts that may be a single token. Texts with a symbol that the engine splits
        differently go to the reference.
        """
        if engine != "auto" or importlib.util.find_spec("gigatoken") is None:
            return
        import gigatoken

        def differs(*texts: str) -> bool:
            """Return whether the engine encodes any text differently from the reference."""
            for text in texts:
                if not np.array_equal(fast.encode(text), self.encode_reference(text)):
                    return True
            return False

        try:
            fast = load(gigatoken).backend
            probe = [text for text in PROBE if not self._is_apart(text)]
            if fast.vocab_size > self.vocab_size or differs(*probe):
                return
            # test each symbol between other text, and next to spaces and another symbol
            cut = [s for s in symbols if differs(s, f"a{s}b", f" {s} {s}{s}\n{s}")]
        # the engine cannot read the tokenizer, or panics: the reference is always right
        except Exception:
            return
        self._fast = fast
        self.engine = "gigatoken"
        self._apart += tuple(cut)

    def _is_apart(self, text: str) -> bool:
        """Return whether a text contains a symbol that only the reference encodes correctly."""
        return any(symbol in text for symbol in self._apart)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and the end of a document as 256."""

    kind = "byte"
    sha256 = hashlib.sha256(b"megacp byte tokenizer").hexdigest()
    vocab_size = 257
    eos_id = 256

    def encode_reference(self, text: str) -> np.ndarray:
        """Return the bytes of a text, uint8 [n]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of bytes; the end-of-document id is skipped."""
        # a cut in the middle of a character gives U+FFFD
        ids = np.asarray(ids, dtype=np.int64)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file; the `sentencepiece` package is the reference."""

    kind = "sentencepiece"

    def __init__(self, path: Path, engine: str) -> None:
        """Load a model. Raise ValueError if the file is not a SentencePiece model."""
        import sentencepiece

        self.files = (path,)
        self.sha256 = sha256_of_all(path)
        refuse_pointer(path)
        content = path.read_bytes()
        # the package would accept an empty file as a model without pieces
        if not content:
            raise ValueError(f"{path}: not a SentencePiece model (it is empty)")
        try:
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self._model = model
            self.vocab_size = model.vocab_size()
            ids = (model.eos_id(), model.bos_id(), model.pad_id())
        except Exception as error:  # RuntimeError or a protobuf error, depending on the damage
            raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
        # the package returns -1 for a token that the model does not have
        self.eos_id, self.bos_id, self.pad_id = (None if i < 0 else i for i in ids)
        self.own = frozenset(model.id_to_piece(i) for i in (model.unk_id(), *ids) if i >= 0)
        # "<s>" in a text is plain text for SentencePiece, but a special token for gigatoken
        self._apart = tuple(
            model.id_to_piece(i) for i in range(self.vocab_size) if model.is_control(i)
        )
        # the package does not report user-defined symbols, but all of them have score 0
        kinds = (model.is_control, model.is_unknown, model.is_byte)
        symbols = []
        for i in range(self.vocab_size):
            is_plain = not any(kind(i) for kind in kinds)
            if is_plain and model.get_score(i) == 0.0:
                symbols.append(model.id_to_piece(i))
        self.accelerate(
            engine, lambda gigatoken: gigatoken.Tokenizer.from_sentencepiece(path), symbols
        )

    def encode_reference(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [n]."""
        return np.array(self._model.encode(text), dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; control pieces are skipped."""
        return self._model.decode(np.asarray(ids).tolist())


class PackageTokenizer(Tokenizer):
    """A model of the `tokenizers` package, from a Hugging Face `tokenizer.json` or GPT-2's two
    files.

    A `tokenizer_config.json` next to them names the end-of-document token (null for none);
    `eod_token` overrides it. Without it, the first special token among EOS_NAMES is used. BOS and
    padding tokens are found in the same way.
    """

    def __init__(
        self,
        kind: str,
        files: tuple[Path, ...],
        model: Any,
        special: Mapping[str, int],
        beside: Beside,
    ) -> None:
        """Wrap a model; `special` has the ids of tokens that ordinary text does not produce."""
        self.kind = kind
        self.files = files
        self.model = model
        self.sha256 = sha256_of_all(*files)
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        self.surroundings = surroundings_of(model)
        # by name if the text is a special token; the config overrides it, even with null
        for field, names in (("eos", EOS_NAMES), ("bos", BOS_NAMES), ("pad", PAD_NAMES)):
            found = next((special[name] for name in names if name in special), None)
            if f"{field}_token" in beside.values:
                text = token_text(beside.values[f"{field}_token"])
                found = None if text is None else self.token_id(text)
            setattr(self, f"{field}_id", found)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None."""
        return self.model.token_to_id(token)

    def encode_reference(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [n]; special tokens in the text are recognised, as in the
        package.
        """
        # the fast variant does not compute offsets
        (encoding,) = self.model.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, including special tokens."""
        return self.model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _from_tokenizer_json(path: Path, engine: str, beside: Beside) -> Tokenizer:
    """Load a Hugging Face tokenizer.json. Raise ValueError if it is invalid."""
    import tokenizers

    refuse_pointer(path)
    try:
        text = path.read_text(encoding="utf-8")
        model = tokenizers.Tokenizer.from_str(text)
        # a file may store settings of its last use, which would cut or pad every text
        model.no_truncation()
        model.no_padding()
        added = model.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        made = PackageTokenizer("huggingface", (path,), model, special, beside)
    except BaseException as error:
        # the package raises bare Exceptions, and a panic of its Rust code is a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path}: not a Hugging Face tokenizer.json ({error})") from error
    # a dataset keeps the config next to the tokenizer, because it names the special tokens
    if beside.config is not None:
        made.files = (path, beside.config)
    symbols = [token.content for token in added.values()]
    made.accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_json(text), symbols)
    return made


def _from_gpt2(vocabulary: Path, merges: Path, engine: str, beside: Beside) -> Tokenizer:
    """Load GPT-2's byte-level BPE.

    Special tokens in a text stay plain text. A token is special if no merge produces it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    refuse_pointer(vocabulary)
    refuse_pointer(merges)
    try:
        ids, pairs = models.BPE.read_file(str(vocabulary), str(merges))
        model = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    # files without ids, or merges that are not pairs of tokens
    except Exception as error:
        raise ValueError(f"{vocabulary}, {merges}: not a byte-level BPE ({error})") from error
    missing = sorted({*pre_tokenizers.ByteLevel.alphabet()} - ids.keys())
    if missing:
        raise ValueError(
            f"{vocabulary}: not a byte-level BPE: {len(missing)} bytes have no token, such as "
            f"{missing[0]!r}"
        )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    # tokens that no merge produces cannot come from a text
    apart = ids.keys() - {"".join(pair) for pair in pairs}
    special = {name: ids[name] for name in EOS_NAMES if name in apart}
    made = PackageTokenizer("gpt2", (vocabulary, merges), model, special, beside)
    made.own = frozenset(special)
    made.accelerate(engine, lambda gigatoken: gigatoken.Tokenizer.from_json(model.to_str()), ())
    return made


def _by_library(folder: Path, engine: str, tokens: set[str]) -> Tokenizer:
    """Load a vocabulary with extra `tokens` next to it, converted to tokenizer.json by
    transformers.
    """
    begin = f"{folder}: files next to the vocabulary add tokens ({', '.join(sorted(tokens)[:3])})"
    try:
        release = importlib.metadata.version("transformers")
    except ImportError as error:
        raise ValueError(
            f"{begin}; reading them needs transformers: pip install -e '.[hf]'"
        ) from error
    # the conversion depends on all of these files and on the library's version
    names = (*itertools.chain(*FILES), *BESIDE_NAMES)
    given = [folder / name for name in names if (folder / name).is_file()]
    given += sorted(folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"))

    def convert(made: Path) -> None:
        from transformers import AutoTokenizer

        try:
            library = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            library.save_pretrained(made)
        # invalid files may fail anywhere inside the library
        except Exception as error:
            raise ValueError(f"{begin}, but transformers cannot read them: {error}") from error

    # convert once and keep the result, because importing transformers takes seconds
    kept = kept_folder(f"{sha256_of_all(*given)}-{release}", convert)
    return _from_files(str(kept / "tokenizer.json"), engine)


def load_tokenizer(
    specification: str,
    engine: str = "auto",
    eod_token: str | None = None,
    prepend_bos: bool | None = None,
) -> Tokenizer:
    """Load the tokenizer of `--tokenizer` from local files. Raise ValueError with the allowed
    values.

    engine: "auto" uses gigatoken if its ids are identical, "reference" never does. eod_token: text
    of the end-of-document token, if the files do not name one. prepend_bos: None follows the files.
    """
    tokenizer = ByteTokenizer() if specification == "byte" else _from_files(specification, engine)
    # --eod-token overrides the files
    if eod_token is not None:
        tokenizer.eos_id = tokenizer.token_id(eod_token)
        if tokenizer.eos_id is None:
            raise ValueError(
                f"--eod-token {eod_token!r} is not in the vocabulary of --tokenizer {specification}"
            )
    # the files decide, unless the caller asks for a BOS or for none
    first = tokenizer.surroundings.first(tokenizer.bos_id)
    if prepend_bos and first is None:
        first = next(iter(tokenizer.surroundings.before), tokenizer.bos_id)
        if first is None:
            raise ValueError(
                f"--prepend-bos: --tokenizer {specification} does not name a BOS token"
            )
    tokenizer.begins_with = first if prepend_bos is not False else None
    return tokenizer


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of a folder's tokenizer; () if it has none."""
    for names in FILES:
        if all((folder / name).is_file() for name in names):
            return names
    return ()


def _from_files(specification: str, engine: str) -> Tokenizer:
    """Load a tokenizer, with the first token and the chat template from the files next to it."""
    paths = [Path(part) for part in specification.split(",")]
    if paths[0].is_dir():
        paths = [paths[0] / name for name in tokenizer_files(paths[0])]
        if not paths:
            names = ", ".join(" with ".join(names) for names in FILES)
            raise ValueError(
                f"--tokenizer {specification}: the folder has none of {names}; copy the files of "
                "the model's tokenizer into it"
            )
    kind = tuple(path.suffix for path in paths)
    # the id of a repository on the Hub, such as Qwen/Qwen3-0.6B
    is_file = paths[0].suffix in (".model", ".json")
    if re.fullmatch(r"[\w-]+/[\w.-]+", specification) and not is_file:
        raise ValueError(
            f"--tokenizer {specification}: no such folder, and nothing is downloaded. For a model "
            f"on the Hugging Face Hub, use `hf download {specification} --local-dir "
            f"{paths[0].name}` and --tokenizer {paths[0].name}"
        )
    if kind not in ((".model",), (".json",), (".json", ".txt")):
        raise ValueError(
            f"--tokenizer is {specification!r}; use byte | FOLDER of a model | FILE.model "
            "(SentencePiece) | tokenizer.json (Hugging Face) | vocab.json,merges.txt (GPT-2 "
            "byte-level BPE); nothing is downloaded"
        )
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"--tokenizer {specification}: no such file: {', '.join(missing)} (nothing is "
            "downloaded)"
        )
    # the suffixes decide about the format
    beside = read_beside(paths[0].parent)
    tokenizer: Tokenizer
    if len(paths) == 2:
        tokenizer = _from_gpt2(paths[0], paths[1], engine, beside)
    elif kind == (".model",):
        tokenizer = SentencePieceTokenizer(paths[0], engine)
    else:
        tokenizer = _from_tokenizer_json(paths[0], engine, beside)
    # only tokenizer.json lists added tokens itself; with other files they are next to it
    folder = paths[0].parent
    named = tuple(path.name for path in paths)
    if named in FILES[1:]:
        tokens = tokens_beside(folder) - tokenizer.own
        if tokens:
            return _by_library(folder, engine, tokens)
    tokenizer.chat_template = beside.chat_template
    tokenizer.asked_as_messages = beside.is_ours
    stated = beside.values.get("add_bos_token")
    if isinstance(stated, bool):
        tokenizer.surroundings = replace(tokenizer.surroundings, stated=stated)
    return tokenizer
