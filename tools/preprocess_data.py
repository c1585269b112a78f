#!/usr/bin/env python
"""Makes packed datasets from text (`build`), and looks into them: `inspect`, `stats`, `verify`, `merge`.

Key property: this file only reads the command line and prints; the work is in megacp/data, and nothing here or there
imports torch. Rejected: tyro for the flags, which costs more to import than a tiny build takes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import NoReturn

EXAMPLES = """examples:
  tools/preprocess_data.py build --input corpus.jsonl --output data/corpus --tokenizer tokenizer.json --seq-length 4096
  tools/preprocess_data.py build --input part-*.jsonl.zst --output data/big --tokenizer llama.model \\
      --seq-length 32768 --oversize split --workers 16 --on-error skip --max-errors 100
  tools/preprocess_data.py inspect data/corpus --pack 0
  tools/preprocess_data.py stats data/corpus
  tools/preprocess_data.py verify data/corpus
  tools/preprocess_data.py merge data/a data/b --output data/both
"""
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` and exit 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description="Make packed token datasets from text, and look into them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_build(commands)
    inspect = commands.add_parser("inspect", help="show packs: documents, lengths, loss weights, beginnings")
    inspect.add_argument("dataset")
    inspect.add_argument("--pack", type=int, nargs="+", default=[0], metavar="N", help="which packs (default: 0)")
    inspect.add_argument("--tokenizer", metavar="KIND_OR_PATH", help="default: the one kept in the dataset")
    inspect.add_argument("--characters", type=int, default=60, metavar="N", help="how much of each document (60)")
    stats = commands.add_parser("stats", help="counts, packing efficiency, histogram of lengths, refused records")
    stats.add_argument("dataset")
    stats.add_argument("--json", action="store_true", help="print JSON")
    verify = commands.add_parser("verify", help="read every byte: sizes, hashes, bounds, token ids; exit 1 on damage")
    verify.add_argument("dataset", nargs="+")
    merge = commands.add_parser("merge", help="copy several datasets of one tokenizer and length into one")
    merge.add_argument("dataset", nargs="+", help="at least two, in order")
    merge.add_argument("--output", required=True, metavar="DIR")
    merge.add_argument("--overwrite", action="store_true", help="delete the dataset in DIR first")
    return parser


def _add_build(commands: argparse._SubParsersAction[_Parser]) -> None:
    build = commands.add_parser(
        "build",
        help="tokenize and pack text files; run it again to continue after an interruption",
        description="Tokenize and pack text files. The result does not depend on --workers or on interruptions.",
    )
    what = build.add_argument_group("input and output")
    what.add_argument(
        "--input", nargs="+", required=True, metavar="F", help=".jsonl, .gz, .zst, .parquet or .tar files"
    )
    what.add_argument("--output", required=True, metavar="DIR", help="directory of the dataset")
    what.add_argument("--overwrite", action="store_true", help="delete the dataset in DIR first, finished or not")
    what.add_argument("--text-key", default="text", metavar="KEY", help="key of plain text in a record (text)")
    how = build.add_argument_group("tokens")
    how.add_argument(
        "--tokenizer",
        required=True,
        metavar="KIND_OR_PATH",
        help="byte | FILE.model (SentencePiece) | tokenizer.json (Hugging Face) | vocab.json,merges.txt (GPT-2)",
    )
    how.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end documents (yes)")
    how.add_argument("--eod-token", metavar="TEXT", help="the token that ends a document, when its files do not say")
    how.add_argument(
        "--tokenizer-engine",
        choices=("auto", "reference"),
        default="auto",
        help="auto: the fast engine where its ids are identical (auto)",
    )
    packs = build.add_argument_group("packs")
    packs.add_argument("--seq-length", type=int, required=True, metavar="N", help="tokens of a pack")
    packs.add_argument(
        "--oversize",
        choices=("error", "drop", "split", "truncate"),
        default="error",
        help="what to do with a document longer than a pack (error)",
    )
    packs.add_argument("--pad-multiple", type=int, default=1, metavar="N", help="pad every document to this (1)")
    packs.add_argument("--seed", type=int, metavar="N", help="shuffle documents within a window (default: input order)")
    packs.add_argument("--window-tokens", type=int, metavar="N", help="tokens packed at a time (16,777,216)")
    packs.add_argument("--cp-degrees", default="1,2,4,8,16", metavar="A,B", help="context-parallel sizes planned for")
    work = build.add_argument_group("work")
    work.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    work.add_argument("--unit-bytes", type=int, default=0, metavar="N", help="input of one shard (8 MiB or 256 packs)")
    work.add_argument("--on-error", choices=("fail", "skip"), default="fail", help="at a bad record (fail)")
    work.add_argument("--max-errors", type=int, metavar="N", help="with skip: give up after more bad records than N")
    work.add_argument("--max-line-bytes", type=int, default=64 << 20, metavar="N", help="longest record (64 MiB)")


def _build(args: argparse.Namespace) -> int:
    from megacp.data.build import build
    from megacp.data.unit import DEFAULT_WINDOW_TOKENS, BuildSettings

    try:
        cp_degrees = tuple(int(part) for part in args.cp_degrees.split(","))
    except ValueError as error:
        raise ValueError(f"--cp-degrees is {args.cp_degrees!r}, it must be integers with commas between") from error
    settings = BuildSettings(
        input=tuple(args.input),
        output=args.output,
        tokenizer=args.tokenizer,
        seq_length=args.seq_length,
        oversize=args.oversize,
        pad_multiple=args.pad_multiple,
        append_eod=args.append_eod,
        seed=args.seed,
        text_key=args.text_key,
        max_line_bytes=args.max_line_bytes,
        on_error=args.on_error,
        max_errors=args.max_errors,
        workers=len(os.sched_getaffinity(0)) if args.workers is None else args.workers,
        unit_bytes=args.unit_bytes,
        window_tokens=DEFAULT_WINDOW_TOKENS if args.window_tokens is None else args.window_tokens,
        cp_degrees=cp_degrees,
        tokenizer_engine=args.tokenizer_engine,
        eod_token=args.eod_token,
    )
    summary = build(settings, sys.stderr, args.overwrite)
    manifest = summary.manifest
    if summary.already_complete:
        print(f"{args.output} is already complete: {manifest.num_packs:,} packs; nothing to do")
        return 0
    speed = summary.input_bytes / max(summary.seconds, 1e-9) / 1e6
    resumed = f" ({summary.units_resumed} of {summary.units} shards were there)" if summary.units_resumed else ""
    print(
        f"{args.output}: {summary.documents:,} documents, {manifest.num_tokens:,} tokens in "
        f"{manifest.num_packs:,} packs of {manifest.seq_length:,} ({manifest.packing_efficiency:.2%} full), "
        f"{manifest.num_rejected:,} rejected; "
        f"{summary.seconds:.1f} s, {speed:.1f} MB/s, tokenizer {manifest.tokenizer.kind} ({summary.tokenizer_engine})"
        f"{resumed}"
    )
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megacp.data.build import kept_tokenizer
    from megacp.data.describe import describe_pack
    from megacp.data.store import PackedDataset
    from megacp.data.tokenizer import load_tokenizer

    dataset = PackedDataset(args.dataset)
    tokenizer = load_tokenizer(args.tokenizer or kept_tokenizer(args.dataset), engine="reference")
    if tokenizer.sha256 != dataset.manifest.tokenizer.sha256:
        raise ValueError(f"--tokenizer {args.tokenizer} is not the one {args.dataset} was made with (sha256 differs)")
    for index in args.pack:
        print(describe_pack(dataset, index, tokenizer, args.characters))
    return 0


def _stats(args: argparse.Namespace) -> int:
    from megacp.data.describe import statistics, statistics_text

    values = statistics(args.dataset)
    print(json.dumps(values, indent=1) if args.json else statistics_text(values))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megacp.data.store import verify

    damaged = 0
    for path in args.dataset:
        reasons = verify(path)
        damaged += bool(reasons)
        for reason in reasons:
            print(f"error: {reason}", file=sys.stderr)
        if not reasons:
            print(f"{path}: sound")
    return 1 if damaged else 0


def _merge(args: argparse.Namespace) -> int:
    from megacp.data.merge import merge

    manifest = merge(args.dataset, args.output, args.overwrite)
    count = len(args.dataset)
    print(f"{args.output}: {manifest.num_packs:,} packs, {manifest.num_tokens:,} tokens from {count} datasets")
    return 0


COMMANDS = {"build": _build, "inspect": _inspect, "stats": _stats, "verify": _verify, "merge": _merge}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 damage found, 2 an error, 130 interrupted."""
    args = _parser().parse_args(argv)
    from megacp.data.workers import WorkerFailed

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        return COMMANDS[args.command](args)
    except (ValueError, OSError, WorkerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; run the same command again to continue" if args.command == "build" else ""
        print(f"interrupted{again}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
