"""Training a byte-level BPE `tokenizer.json` on text; SentencePiece trains its own models, by its
`spm_train`.

The result is one local file that preprocess_data.py takes as --tokenizer, with its end-of-document
token in it. The same input gives the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megacp.prepare.records.read import Extent, read_extent
from megacp.prepare.records.record import RecordError, RecordRules, Refusal
from megacp.prepare.records.sample import parse_record
from megacp.storage.files import write_result

EOD_TOKEN = "<|endoftext|>"
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zst", ".parquet", ".tar")
_ANYTHING = RecordRules(
    media=True,
    ignore_keys=("*", "image", "images", "video", "videos", "audio"),
    context_roles=("*",),
)
"""Only the text of a record is read here."""


def texts(paths: list[str], text_key: str, max_bytes: int) -> Iterator[str]:
    """The texts of records, or of whole plain-text files, in order, until `max_bytes` of UTF-8 are
    reached.

    ValueError at the first that cannot be read, and when there is no text at all.
    """
    left = max_bytes
    for text in (text for path in paths for text in _texts_of(path, text_key) if text):
        yield text
        left -= len(text.encode())
        if left <= 0:
            return
    if left == max_bytes:
        raise ValueError("--input: the files hold no text")


def _texts_of(path: str, text_key: str) -> Iterator[str]:
    if Path(path).suffix.lower() not in RECORD_SUFFIXES:
        try:
            yield Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
        return
    for item in read_extent(Extent(0, path, 0, Path(path).stat().st_size)):
        if isinstance(item, Refusal):
            raise ValueError(str(item))
        try:
            sample = parse_record(item.value, replace(_ANYTHING, text_key=text_key))
        except RecordError as error:
            raise ValueError(f"{path}:{item.line}: {error}") from error
        for part in (sample.prefix, *sample.branches):
            yield "".join(piece.text or "" for piece in part)


def train_bpe(
    stream: Iterator[str],
    output: Path,
    vocab_size: int,
    symbols: Sequence[str],
    overwrite: bool = False,
) -> int:
    """Write a byte-level BPE tokenizer.json with EOD_TOKEN as id 0 and `symbols` as the last ids,
    found in a text before its words are cut; returns its vocabulary's size.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < (least := 257 + len(symbols)):
        raise ValueError(
            f"--vocab-size is {vocab_size}, byte-level BPE needs at least {least}: the bytes, "
            f"{EOD_TOKEN} and "
            f"{len(symbols)} symbols"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(symbols),
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stream, trainer)
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    write_result("--output", output, tokenizer.to_str(pretty=True).encode(), overwrite)
    return tokenizer.get_vocab_size()
