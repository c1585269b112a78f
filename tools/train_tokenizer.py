#!/usr/bin/env python
"""Trains a tokenizer on text: a byte-level BPE `tokenizer.json`, or a SentencePiece `.model`.

Key property: the result is one local file that preprocess_data.py takes as --tokenizer, with its end-of-document token
in it, and the same input gives the same file. Rejected: a BPE trainer of our own; the two packages are fast and known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

EOD_TOKEN = "<|endoftext|>"
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".gz", ".zst", ".parquet", ".tar")
EXAMPLES = """examples:
  tools/train_tokenizer.py --input corpus.jsonl --output tokenizer.json --vocab-size 4096
  tools/train_tokenizer.py --input a.txt b.txt --output small.model --vocab-size 8000 --max-mib 64
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` and exit 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description="Train a tokenizer. The suffix of --output says which: .json byte-level BPE, .model SentencePiece.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="F", help=f"records ({', '.join(JSONL_SUFFIXES)}), or plain text"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="tokenizer.json or NAME.model")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="at least 257 for .json")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key of plain text in a record (text)")
    parser.add_argument(
        "--symbols", nargs="+", default=[], metavar="TEXT", help="texts that are one token each, such as '<|user|>'"
    )
    parser.add_argument("--max-mib", type=float, default=256, metavar="N", help="stop after so much text (256)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    return parser


def texts(paths: list[str], text_key: str) -> Iterator[str]:
    """The texts of records, or of whole plain-text files, in order. ValueError at the first that cannot be read."""
    from megacp.data.records.read import Extent, read_extent
    from megacp.data.records.record import Refusal
    from megacp.data.records.sample import RecordError, parse_record

    for source, path in enumerate(paths):
        if Path(path).suffix not in JSONL_SUFFIXES:
            try:
                yield Path(path).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
            continue
        for item in read_extent(Extent(source, path, 0, Path(path).stat().st_size)):
            if isinstance(item, Refusal):
                raise ValueError(str(item))
            try:
                sample = parse_record(item.value, text_key, media=True)  # only the text of a record is read
            except RecordError as error:
                raise ValueError(f"{path}:{item.line}: {error}") from error
            for part in (sample.prefix, *sample.branches):
                yield "".join(piece.text or "" for piece in part)


def limited(stream: Iterator[str], max_bytes: int) -> Iterator[str]:
    """Texts until `max_bytes` of UTF-8 are reached, without empty ones. ValueError when there is no text at all."""
    left = max_bytes
    for text in stream:
        if left <= 0:
            return
        if text:
            left -= len(text.encode())
            yield text
    if left == max_bytes:
        raise ValueError("--input: the files hold no text")


def train_bpe(stream: Iterator[str], output: Path, vocab_size: int, symbols: Sequence[str]) -> int:
    """Write a byte-level BPE tokenizer.json with EOD_TOKEN as id 0 and `symbols` as the last ids, found in a text
    before its words are cut; returns its vocabulary's size.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 257 + len(symbols)
    if vocab_size < least:
        more = f" and {len(symbols)} symbols" if symbols else ""
        raise ValueError(
            f"--vocab-size is {vocab_size}, byte-level BPE needs at least {least}: the bytes, {EOD_TOKEN}{more}"
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
    output.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return tokenizer.get_vocab_size()


def train_sentencepiece(stream: Iterator[str], output: Path, vocab_size: int, symbols: Sequence[str]) -> int:
    """Write a SentencePiece BPE model with byte fallback that keeps all whitespace; returns its vocabulary's size."""
    import io

    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=stream,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            user_defined_symbols=list(symbols),
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=1,
            minloglevel=2,
            max_sentence_length=1 << 20,
        )
    except RuntimeError as error:
        raise ValueError(f"--vocab-size {vocab_size}: {' '.join(str(error).split())}") from error
    output.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()


TRAINERS = {".json": train_bpe, ".model": train_sentencepiece}


def _train(args: argparse.Namespace) -> str:
    output = Path(args.output)
    if output.suffix not in TRAINERS:
        raise ValueError(f"--output is {args.output!r}, it must end in one of {', '.join(TRAINERS)}")
    if output.exists() and not args.overwrite:
        raise ValueError(f"--output {output} exists; nothing was overwritten, give --overwrite to replace it")
    if absent := [path for path in args.input if not Path(path).is_file()]:
        raise ValueError(f"--input: no such file: {', '.join(absent)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    stream = limited(texts(args.input, args.text_key), int(args.max_mib * (1 << 20)))
    size = TRAINERS[output.suffix](stream, output, args.vocab_size, args.symbols)
    return f"{output}: {size:,} tokens"


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit code, 2 for an error."""
    args = _parser().parse_args(argv)
    try:
        print(_train(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
