"""Train a byte-level BPE tokenizer on text.

    python tools/train_tokenizer.py --input corpus.jsonl --output tokenizer.json --vocab-size 4096

The result is a local `tokenizer.json`, which preprocess_data.py accepts as --tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megacp.engine.config.cli import OneLineParser, path_text
from megacp.prepare.train_tokenizer import RECORD_SUFFIXES, texts, train_bpe
from megacp.storage.files import require_free
from megacp.training.monitor.console import say, warn


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description="Train a byte-level BPE tokenizer.")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="F",
        type=path_text,
        help=f"files with records ({', '.join(RECORD_SUFFIXES)}) or plain text",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="file to write, such as tokenizer.json",
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="number of tokens, at least 257"
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="key of the text in a record (default: text)",
    )
    parser.add_argument(
        "--symbols",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="texts that become a single token each, such as '<|user|>'",
    )
    parser.add_argument(
        "--max-mib",
        type=float,
        default=256,
        metavar="N",
        help="read at most this many MiB of text (default: 256)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    return parser


def _train(args: argparse.Namespace) -> int:
    """Train a tokenizer, and return its vocabulary size.

    Raise ValueError with the flag if the input is invalid.
    """
    if args.output.suffix != ".json":
        raise ValueError(f"--output {args.output} must end in .json")
    require_free("--output", args.output, args.overwrite)
    stream = texts(args.input, args.text_key, int(args.max_mib * (1 << 20)))
    return train_bpe(stream, args.output, args.vocab_size, args.symbols, args.overwrite)


def main(argv: list[str] | None = None) -> int:
    """Train a tokenizer; return 0, or 2 after an error message."""
    args = _parser().parse_args(argv)
    try:
        size = _train(args)
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    say(f"{args.output}: {size:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
