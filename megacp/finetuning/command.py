r"""Fine-tune a model on one or more files, and write a folder that transformers can load.

    megacp finetune Qwen3-0.6B chats.json --output my-model
    megacp finetune Qwen/Qwen3-0.6B chats.json more.parquet --output my-model --train-epochs 2
    megacp finetune Qwen3-0.6B chats.json --output my-model --dry-run

MODEL is a folder or a name on the Hugging Face Hub. DATA are files of records: conversations,
questions with answers, captioned images, or texts. The command chooses the row length, the batch,
the learning rate, the parallel layout and, if the memory is too small for full training, LoRA
adapters. It prints its choices and the three commands that it runs. Append any flag of these
commands to override a choice. Run the same command again to resume a run that was stopped.

The output folder contains packs/ (the tokenized data), checkpoints/ (saved during training) and
model/ (the result, with the tokenizer).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megacp.engine.config.cli import OneLineParser, path_text
from megacp.finetuning.request import FinetuneRequest
from megacp.finetuning.steps import Failure
from megacp.training.monitor.console import warn
from megacp.training.start.interrupts import INTERRUPTED
from megacp.training.start.status import REFUSED


def finetune_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags."""
    parser = OneLineParser(
        prog="megacp finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="megacp finetune MODEL DATA [DATA ...] --output FOLDER [OPTIONS]",
        epilog="All flags of `megacp-preprocess build`, `megacp-train` and `megacp-convert` are "
        "accepted, too. --dtype sets the dtype of training, and --export-dtype that of the "
        "exported weights.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output", required=True, type=path_text, metavar="FOLDER", help="folder to write")
    ranks = "number of GPUs or CPU ranks (default: all GPUs, or one CPU rank per core, at most 8)"
    add("--nproc", type=int, metavar="N", help=ranks)
    add(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the exported model with transformers (default: yes)",
    )
    add("--dry-run", action="store_true", help="print the choices and the commands, and stop")
    return parser


def request_of(arguments: Sequence[str]) -> FinetuneRequest:
    """Return the request of a command line. Exit with one message if it is not valid."""
    parser = finetune_parser()
    # argparse would take the value of an unknown flag for a file, so MODEL and DATA come first.
    before = 0
    while before < len(arguments) and not arguments[before].startswith("-"):
        before += 1
    places, flags = arguments[:before], arguments[before:]
    if "-h" in flags or "--help" in flags or "--version" in flags:
        parser.parse_args(flags)
    if len(places) < 2:
        parser.error("give MODEL and at least one file of DATA first, before all flags")
    own, words = parser.parse_known_args(flags)
    if own.nproc is not None and own.nproc < 1:
        parser.error(f"--nproc is {own.nproc}, but must be at least 1")
    model, *data = places
    return FinetuneRequest(
        model,
        tuple(data),
        Path(own.output),
        own.nproc,
        own.verify,
        own.dry_run,
        tuple(words),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 if the request is refused."""
    request = request_of(sys.argv[1:] if argv is None else argv)
    # Importing torch takes seconds; the checks above do not need it.
    from megacp.finetuning.run import run_finetuning

    try:
        return run_finetuning(request)
    except Failure as failure:
        return failure.status  # the command has printed its error
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return REFUSED
    except KeyboardInterrupt:
        warn("interrupted; the same command resumes")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
