"""Find the layout for a model, packs and GPUs: `megacp-plan --gpu h100 --world-size 8` and the flags of a run.

    megacp-plan --gpu h100 --world-size 8 --load-hf Qwen3-8B --data-path data/chat --output best.yaml
    python -m megacp.train --nproc 8 --config best.yaml --load-hf Qwen3-8B --data-path data/chat

Flags of a layout that are given stay as they are; all others are chosen. Nothing runs, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from megacp.core.checks import require
from megacp.core.config.blend import named_folders
from megacp.core.config.cli import OneLineParser, given_names, parse
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.manifest import DatasetManifest
from megacp.plan.answer import as_json, flags, plan_text
from megacp.plan.cluster import add_flags, asked_trouble, drawn_text
from megacp.plan.hardware import GPUS, NETWORKS, hardware
from megacp.plan.packs import PackSample, sample_packs
from megacp.plan.search import search


def _asked(arguments: Sequence[str]) -> tuple[RunConfig, frozenset[str]]:
    """The config with the sizes of its model and the length of its packs, and the fields that were given."""
    given = given_names(arguments)
    config = with_values(parse(arguments, "megacp-plan"), {"train_epochs": None, "dry_run": True})
    if config.checkpoint.load_hf is not None:
        # the converter is an extra: a plan without the flag reaches no file of megacp.huggingface
        converter = importlib.import_module("megacp.huggingface.convert.start")
        config, *_ = converter.open_start(config, given)
    if config.data.data_path is not None and "seq_length" not in given:
        manifest = DatasetManifest.read(named_folders(config.data.data_path)[0])
        config = with_values(config, {"seq_length": manifest.seq_length})
    return config, given


def _planned(own: argparse.Namespace, arguments: Sequence[str]) -> str:
    trouble = asked_trouble(own)
    config, given = _asked(arguments)
    if config.world_size is None:
        raise ValueError("--world-size N is missing: the number of GPUs")
    sample = sample_packs(config) if config.data.data_path is not None else PackSample()
    here = hardware(own.gpu, own.network)
    found = search(config, config.world_size, given, here, sample)
    if not found:
        require(config, config.world_size)
        raise ValueError(f"no layout of {config.world_size} ranks takes these flags: give fewer of them")
    if own.output is not None:
        own.output.parent.mkdir(parents=True, exist_ok=True)
        own.output.write_text(flags(found[0]), encoding="utf-8")
    tell = as_json if own.json else plan_text
    told = tell(found, config.world_size, here, sample)
    return told + (drawn_text(found[0].config, config.world_size, here, sample, trouble) if trouble else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="of the machines (default h100)")
    parser.add_argument("--network", choices=NETWORKS, default="infiniband", help="between them (default infiniband)")
    parser.add_argument("--output", type=Path, help="file for the flags of the best layout, which --config takes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser)
    own, rest = parser.parse_known_args(argv)
    try:
        print(_planned(own, rest), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
