"""Train a byte-level BPE `tokenizer.json` on text.

The result is a single file for `preprocess_data.py --tokenizer`; its vocabulary includes the
end-of-document token. The same input produces the same file. (To train a SentencePiece model, use
that project's `spm_train`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megacp.prepare.records.read import Extent, read_extent
from megacp.prepare.records.record import RecordError, RecordRules, Refusal
from megacp.prepare.records.sample import parse_record
from megacp.storage.files import write_result

# the first of EOS_NAMES, so load_tokenizer finds it
EOD_TOKEN = "<|endoftext|>"
# files with these suffixes contain records; any other file is one plain text
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zst", ".parquet", ".tar")
_ANYTHING = RecordRules(
    media=True,
    ignore_keys=("*", "image", "images", "video", "videos", "audio"),
    context_roles=("*",),
)
"""Rules that read only the text of a record and ignore everything else."""


def texts(paths: list[str], text_key: str, max_bytes: int) -> Iterator[str]:
    """Yield the texts of records, or of whole plain-text files, up to `max_bytes` of UTF-8.

    Raise ValueError for the first unreadable input, and if there is no text.
    """
    left = max_bytes
    for path in paths:
        for text in _texts_of(path, text_key):
            if not text:
                continue
            yield text
            left -= len(text.encode())
            if left <= 0:
                return
    # nothing has been subtracted, so there was no text
    if left == max_bytes:
        raise ValueError("--input: the files contain no text")


def _texts_of(path: str, text_key: str) -> Iterator[str]:
    """Yield the texts of one file: one text per part of each record, or the whole file."""
    if Path(path).suffix.lower() not in RECORD_SUFFIXES:
        try:
            yield Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
        return
    rules = replace(_ANYTHING, text_key=text_key)
    for item in read_extent(Extent(0, path, 0, Path(path).stat().st_size)):
        # training data must be complete: no bad record is skipped
        if isinstance(item, Refusal):
            raise ValueError(str(item))
        try:
            sample = parse_record(item.value, rules)
        except RecordError as error:
            raise ValueError(f"{path}:{item.line}: {error}") from error
        # join messages, with their headers, into one text
        for part in (sample.prefix, *sample.branches):
            yield "".join(piece.text or "" for piece in part)


def train_bpe(
    stream: Iterator[str],
    output: Path,
    vocab_size: int,
    symbols: Sequence[str],
    overwrite: bool = False,
) -> int:
    """Train a byte-level BPE and write it as tokenizer.json; return the size of its vocabulary.

    EOD_TOKEN has id 0. `symbols` get the last ids and are matched before a text is split. Raise
    ValueError if `vocab_size` is too small.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 257 + len(symbols)
    if vocab_size < least:
        raise ValueError(
            f"--vocab-size is {vocab_size}, but byte-level BPE needs at least {least}: the bytes, "
            f"{EOD_TOKEN} and {len(symbols)} symbols"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # start with all 256 bytes, so that no text has an unknown token
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(symbols),
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stream, trainer)
    # not normalized: a symbol matches only its exact text
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    write_result("--output", output, tokenizer.to_str(pretty=True).encode(), overwrite)
    return tokenizer.get_vocab_size()
