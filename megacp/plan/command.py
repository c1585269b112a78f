"""Find the fastest parallel layout with which a model and its packs fit on N GPUs.

    megacp-plan --gpu h100 --world-size 8 --load-hf Qwen3-8B --data-path data/chat \\
        --output best.yaml
    python -m megacp.train --nproc 8 --config best.yaml --load-hf Qwen3-8B --data-path data/chat

All flags of a training run are accepted. megacp-plan keeps the layout flags that you set, and
chooses the others. Nothing is trained and no GPU is needed; `--gpu here` plans for this machine's
device. A resumed run (`--load`, or `--save` with `--auto-resume`) keeps the parallel layout of its
checkpoint if the number of ranks is the same.

`megacp-plan calibrate --output machine.yaml` trains for two minutes to measure this machine, and
writes a file for `--gpu machine.yaml`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacp.dry_run.packs import sample_packs
from megacp.engine.config.blend import weighted_folders
from megacp.engine.config.cli import (
    OneLineParser,
    accepted_note,
    given_names,
    parse,
    path_text,
)
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.plan.answer import Answer, as_json, flags, plan_text
from megacp.plan.hardware import DEFAULT_GPU, GPUS, NETWORKS, Hardware, hardware, hardware_here
from megacp.plan.picture import page
from megacp.plan.search import no_problems
from megacp.storage.files import require_free, write_result
from megacp.training.data.manifest import DatasetManifest
from megacp.training.loop.finetuning import default_batch
from megacp.training.monitor.console import say, warn

# Value of --gpu for this machine's device.
HERE = "here"
# A function that returns the reasons why a machine cannot run a configuration.
Problems = Callable[[RunConfig], list[str]]


@dataclass(frozen=True)
class _Question:
    """The run that a command line describes."""

    config: RunConfig
    """Flags of the run, completed with the model sizes and the pack length."""
    given: frozenset[str]
    """Fields that flags or --config files set."""
    is_dry: bool
    """Whether --dry-run was given, so that the run may be meant for another machine."""
    has_checkpoint: bool
    """Whether the model and the dtype come from a checkpoint."""


def _asked(arguments: Sequence[str]) -> _Question:
    """Parse the flags, and read sizes from the given checkpoint, model folder and dataset."""
    given = given_names(arguments)
    parsed = parse(arguments, "megacp-plan")
    config = with_values(parsed, {"train_epochs": None, "dry_run": True})
    has_checkpoint = False
    if config.checkpoint.load is not None or config.checkpoint.auto_resume:
        from megacp.training.loop.stored import resumes, with_stored_model  # imports torch

        has_checkpoint = config.checkpoint.load is not None or resumes(config)
        config, _ = with_stored_model(config, given)
        if resumes(config):
            # Like the training run, a plan for a resumed run does not read the model folder.
            unused = dict.fromkeys(("load_hf", "vision_from_hf", "load_adapter"))
            config = with_values(config, unused)
    if config.checkpoint.load_hf is not None and config.checkpoint.load is None:
        # megacp.huggingface has optional dependencies, so import it only if the flag is set.
        from megacp.huggingface.convert.start import open_start

        config, *_ = open_start(config, given)
    if config.data.data_path is not None:
        # Raises ValueError for an invalid list of weights and folders.
        folder = weighted_folders("--data-path", config.data.data_path)[0].folder
        try:
            manifest = DatasetManifest.read(folder)
        except ValueError as error:
            raise ValueError(f"--data-path {error}") from error
        length = manifest.seq_length
        if "seq_length" in given:
            length = config.data.seq_length
        words = config.model.vocab_size or manifest.tokenizer.vocab_size
        config = with_values(config, {"seq_length": length, "vocab_size": words})
        # Use the default of training, where it is rounded up to a multiple of the dp ranks.
        if "load_hf" in given and "global_batch_size" not in given:
            batch = default_batch(manifest.num_tokens, length)
            config = with_values(config, {"global_batch_size": batch})
    if config.model.vocab_size == 0:
        raise ValueError(
            "--vocab-size is 0: set it, or set --data-path or --load-hf to read it from there"
        )
    return _Question(config, given, parsed.dry_run, has_checkpoint)


def _device(own: argparse.Namespace, world_size: int, is_dry: bool) -> tuple[Hardware, Problems]:
    """Return the hardware of --gpu, and a function that checks whether it can run a configuration.

    Only the device of this machine (`here`) can be checked. If it is a CPU, all ranks share its
    memory.
    """
    if own.gpu.lower() != HERE:
        return hardware(own.gpu, own.network), no_problems
    from megacp.engine.backends.select import backend_problems
    from megacp.training.start import launch

    kind = launch.device_type(launch.World())
    if kind == "cpu" and is_dry:
        return hardware(DEFAULT_GPU, own.network), no_problems
    local = 1 if kind == "cuda" else world_size
    name, gib = launch.device_at_hand(launch.World(size=world_size, local_size=local))
    return hardware_here(name, gib, own.network), lambda config: backend_problems(config, kind)


def _answered(own: argparse.Namespace, asked: _Question) -> Answer:
    """Search for layouts and return the answer. Raise ValueError if no layout is valid."""
    config = asked.config
    if config.world_size is None:
        raise ValueError("--world-size N is missing: set it to the number of GPUs")
    longest = config.data.seq_length
    packed = config.data.data_path is not None
    if own.documents:
        in_range = 1 <= min(own.documents) and max(own.documents) <= longest
        if packed or not in_range:
            lengths = " ".join(map(str, own.documents))
            rule = f"use lengths from 1 to --seq-length {longest}, and no --data-path"
            raise ValueError(f"--documents {lengths}: {rule}")
    sample = sample_packs(config, own.documents)
    here, problems = _device(own, config.world_size, asked.is_dry)
    # A parallel layout must not change a run's results, so keep the dtype if it is known.
    keeps_dtype = own.gpu.lower() == HERE or asked.has_checkpoint
    kept = None
    note = ""
    if asked.has_checkpoint:
        from megacp.plan.resumed import kept_layout  # imports torch

        fixed = asked.given | {"dtype"}
        kept, note = kept_layout(config, config.world_size, fixed, here, sample, problems)
    answer = Answer(
        config, config.world_size, asked.given, here, sample, problems, keeps_dtype, kept, note
    )
    if not answer.found:
        raise ValueError(answer.refusal())
    return answer


def _planned(own: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, bool]:
    """Plan, write the files of --output and --html, and return the text to print.

    Also return whether any layout fits. If none fits, --output is not written.
    """
    for name in ("output", "html"):
        path = getattr(own, name)
        if path is not None:
            require_free(flag(name), path, own.overwrite)
    answer = _answered(own, _asked(arguments))
    best = answer.found[0]
    fits = best.gib <= answer.hardware.memory
    if own.output is not None and fits:
        write_result("--output", own.output, flags(best).encode(), own.overwrite)
    if own.html is not None:
        write_result("--html", own.html, "".join(page(answer)).encode(), own.overwrite)
    text = as_json(answer) if own.json else plan_text(answer)
    return text, fits


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if no layout fits, 2 for invalid flags."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(
        prog="megacp-plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = (
        f"{', '.join(GPUS)}; a file written by `calibrate`; or `here`: this machine's device and "
        "the dtype of the run"
    )
    parser.add_argument(
        "--gpu",
        default=DEFAULT_GPU,
        metavar="NAME",
        type=path_text,
        help=f"GPU type: {kinds} (default {DEFAULT_GPU})",
    )
    parser.add_argument(
        "--network",
        choices=NETWORKS,
        default="infiniband",
        help="interconnect between machines (default infiniband)",
    )
    lengths = (
        "lengths in tokens of the documents to pack, each equally likely, instead of --data-path "
        "(default: one document per pack)"
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[], metavar="N", help=lengths)
    parser.add_argument(
        "--output", type=Path, help="write the flags of the best parallel layout, for --config"
    )
    parser.add_argument(
        "--html",
        type=Path,
        help="write an HTML page with the five best parallel layouts, and the memory of the best "
        "one during a step",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the files of --output and --html if they exist",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    try:
        if arguments[:1] == ["calibrate"]:
            # Calibration trains with torch and megacp.verify; a plan imports neither.
            from megacp.plan import calibrate

            return calibrate.main(arguments[1:])
        own, rest = parser.parse_known_args(arguments)
        text, fits = _planned(own, rest)
        # on standard error, so that the output of --json stays JSON
        if note := accepted_note(rest):
            warn(note)
        say(text.removesuffix("\n"))
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
