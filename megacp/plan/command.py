"""Find the layout for a model, packs and GPUs: `megacp-plan --gpu h100 --world-size 8` and the flags of a run.

    megacp-plan --gpu h100 --world-size 8 --load-hf Qwen3-8B --data-path data/chat --output best.yaml
    python -m megacp.train --nproc 8 --config best.yaml --load-hf Qwen3-8B --data-path data/chat

Flags of a layout that are given stay as they are; all others are chosen. Nothing runs, and no GPU is needed.
`megacp-plan calibrate --output here.yaml` trains for two minutes and writes what `--gpu here.yaml` takes.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from megacp.dry_run.packs import sample_packs
from megacp.engine.checks import require
from megacp.engine.config.blend import named_folders
from megacp.engine.config.cli import OneLineParser, given_names, parse, path_text
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.plan.answer import Answer, as_json, flags, plan_text
from megacp.plan.cluster import FLAGS, Trouble, drawn_text
from megacp.plan.hardware import GPUS, NETWORKS, hardware
from megacp.plan.picture import figure_png, page
from megacp.storage.files import require_free, write_result
from megacp.training.data.manifest import DatasetManifest
from megacp.training.monitor.console import say, warn


def _asked(arguments: Sequence[str]) -> tuple[RunConfig, frozenset[str]]:
    """The config with the sizes of its model and the length of its packs, and the fields that were given."""
    given = given_names(arguments)
    config = with_values(parse(arguments, "megacp-plan"), {"train_epochs": None, "dry_run": True})
    if config.checkpoint.load_hf is not None:
        # the converter is an extra: a plan without the flag reaches no file of megacp.huggingface
        converter = importlib.import_module("megacp.huggingface.convert.start")
        config, *_ = converter.open_start(config, given)
    if config.checkpoint.load is not None or config.checkpoint.auto_resume:
        stored = importlib.import_module("megacp.training.loop.stored")  # which imports torch
        config, _ = stored.with_stored_model(config, given)
    if config.data.data_path is not None:
        manifest = DatasetManifest.read(named_folders(config.data.data_path)[0])
        length = config.data.seq_length if "seq_length" in given else manifest.seq_length
        words = config.model.vocab_size or manifest.tokenizer.vocab_size
        config = with_values(config, {"seq_length": length, "vocab_size": words})
    if config.model.vocab_size == 0:
        raise ValueError("--vocab-size is 0: give it, or --data-path or --load-hf, which know it")
    return config, given


def _planned(own: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, bool]:
    """The text, and whether a layout fits; one that does not is not written as flags of a run."""
    asked = {name: getattr(own, name) for name, *_ in FLAGS.values() if hasattr(own, name)}
    if asked and own.json:
        raise ValueError("--json has no drawn steps: leave it, or --simulate and its flags, out")
    trouble = Trouble(**asked)
    for name in ("output", "html", "figure"):
        if (path := getattr(own, name)) is not None:
            require_free(flag(name), path, own.overwrite)
    config, given = _asked(arguments)
    if config.world_size is None:
        raise ValueError("--world-size N is missing: the number of GPUs")
    longest, packed = config.data.seq_length, config.data.data_path is not None
    if own.documents and (packed or not 1 <= min(own.documents) <= max(own.documents) <= longest):
        lengths = " ".join(map(str, own.documents))
        rule = f"lengths of 1 to --seq-length {longest} tokens, in place of --data-path"
        raise ValueError(f"--documents {lengths}: {rule}")
    sample = sample_packs(config, own.documents)
    answer = Answer(config, config.world_size, given, hardware(own.gpu, own.network), sample)
    if not answer.found:
        require(config, config.world_size)
        freed = [f"; without {flag(name)} one does" for name, _ in answer.freed()]
        raise ValueError(f"no layout of {config.world_size} ranks takes these flags{''.join(freed)}")
    best = answer.found[0]
    fits = best.gib <= answer.hardware.memory
    if own.figure is not None:
        write_result("--figure", own.figure, figure_png(answer), own.overwrite)
    if own.output is not None and fits:
        write_result("--output", own.output, flags(best).encode(), own.overwrite)
    if own.html is not None:
        write_result("--html", own.html, "".join(page(answer)).encode(), own.overwrite)
    told = as_json(answer) if own.json else plan_text(answer)
    if asked:
        told += drawn_text(best.config, answer.world_size, answer.hardware, sample, trouble)
    return told, fits


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status, 1 where no layout fits."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    kinds = f"{', '.join(GPUS)}, or a file of `calibrate`"
    parser.add_argument(
        "--gpu", default="h100", metavar="NAME", type=path_text, help=f"of the machines: {kinds} (default h100)"
    )
    parser.add_argument("--network", choices=NETWORKS, default="infiniband", help="between them (default infiniband)")
    lengths = "tokens of the documents that packs are filled with, drawn alike; without --data-path (one each)"
    parser.add_argument("--documents", type=int, nargs="+", default=[], metavar="N", help=lengths)
    parser.add_argument("--output", type=Path, help="file for the flags of the best layout, which --config takes")
    parser.add_argument("--html", type=Path, help="file for a page: bars of the five best, memory through a step")
    parser.add_argument("--figure", type=Path, help="file.png for those bars (needs matplotlib)")
    parser.add_argument("--overwrite", action="store_true", help="replace these files where they exist")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, (field, kind, meaning) in FLAGS.items():
        parser.add_argument(f"--{name}", dest=field, type=kind, default=argparse.SUPPRESS, help=meaning)
    try:
        if arguments[:1] == ["calibrate"]:
            # it trains: a plan without the word reaches no file of megacp.verify
            return importlib.import_module("megacp.plan.calibrate").main(arguments[1:])
        own, rest = parser.parse_known_args(arguments)
        text, fits = _planned(own, rest)
        say(text.removesuffix("\n"))
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    return 0 if fits else 1
