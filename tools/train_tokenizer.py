"""Train a tokenizer on text: a byte-level BPE `tokenizer.json`, or a SentencePiece `.model`.

    python tools/train_tokenizer.py --input corpus.jsonl --output tokenizer.json --vocab-size 4096

The result is one local file that preprocess_data.py takes as --tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megacp.core.config.cli import OneLineParser
from megacp.prepare.records.record import Accepted
from megacp.prepare.train_tokenizer import RECORD_SUFFIXES, train


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Train a tokenizer. The suffix of --output says which: .json byte-level BPE, .model SentencePiece."
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="F", help=f"records ({', '.join(RECORD_SUFFIXES)}), or plain text"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="tokenizer.json or NAME.model")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="at least 257 for .json")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key of plain text in a record (text)")
    parser.add_argument(
        "--symbols", nargs="+", default=[], metavar="TEXT", help="texts that are one token each, such as '<|user|>'"
    )
    parser.add_argument("--max-mib", type=float, default=256, metavar="N", help="stop after so much text (256)")
    for name, what in (("ignore-keys", "unknown keys of records to leave out"), ("context-roles", "further roles")):
        parser.add_argument(f"--{name}", type=_names, default=(), metavar="A,B", help=f"{what}, as for a build")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit code, 2 for an error."""
    args = _parser().parse_args(argv)
    try:
        records = args.text_key, Accepted(args.ignore_keys, args.context_roles)
        size = train(args.input, args.output, args.vocab_size, args.symbols, records, args.max_mib, args.overwrite)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {size:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
