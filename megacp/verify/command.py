"""Check that a parallel layout trains like one process, on random packs on this machine's CPU.

    python tools/check_parity.py --nproc 8 --tensor-model-parallel-size 2 --mask mixed \
        --pipeline-model-parallel-size 2 --context-parallel-size 2
    python tools/check_parity.py --config my_run.yaml --nproc 8

The command accepts every flag of megacp.train, including `--config`. It reduces sizes that are too
large for one process and prints the changes. With `--data-path`, it uses the dataset's packs. The
exit status is 0 if the results are the same, 1 if they differ, 2 if the flags are invalid, and 3 if
a rank failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from megacp.distributed.grid import single_axis
from megacp.engine.config.blend import shown_path
from megacp.engine.config.cli import OneLineParser, given_flags, parse
from megacp.engine.models.costs import run_parameters
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.choose import resolve_auto
from megacp.engine.rows.rank import DataRank
from megacp.engine.step.rows import Rows
from megacp.storage.wording import human_count
from megacp.training.data.mock import MASKS
from megacp.training.loop.sources import open_sources
from megacp.training.monitor.console import say, warn
from megacp.verify.cases import MODELS
from megacp.verify.parity import TOLERANCE, ParitySetup, compare, microbatches, prepare, train_rank
from megacp.verify.spawn import RankFailure, run_ranks


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    about = (
        "Train with a parallel layout on random packs and compare the results with one process. "
        "All flags of megacp.train are accepted, too."
    )
    parser = OneLineParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--nproc", type=_count, metavar="N", help="number of ranks to start (default: tp x pp x cp)"
    )
    parser.add_argument(
        "--mask",
        choices=MASKS,
        help="attention mask of the random packs (default: --attention-mask, or mixed for a model "
        "with a vision tower)",
    )
    parser.add_argument(
        "--model",
        choices=list(MODELS),
        help="tiny model to train (default: the model in --config, or tiny_llm without --config)",
    )
    parser.add_argument(
        "--steps",
        type=_count,
        default=2,
        metavar="N",
        help="number of optimizer steps to compare (default: 2)",
    )
    parser.add_argument(
        "--timeout",
        type=_count,
        default=600,
        metavar="S",
        help="seconds without an answer before a hang is reported (default: 600)",
    )
    return parser.parse_known_args(argv)


def setup_of(own: argparse.Namespace, rest: Sequence[str]) -> ParitySetup:
    """Return the settings of the comparison. Raise ValueError if a flag is invalid."""
    # `--config FILE` and `--config=FILE` are both possible.
    has_config = any(argument.partition("=")[0] == "--config" for argument in rest)
    return prepare(
        parse(rest, "megacp-parity"), given_flags(rest), has_config, own.model, own.mask, own.nproc
    )


def _resolved(setup: ParitySetup) -> ParitySetup:
    """Resolve `auto` values from the first rows, as a run does, and print the choice."""

    def rows() -> list[PackedBatch]:
        # No ranks have been started yet, so use the rows of a single process.
        whole = Rows(single_axis("cp"), DataRank(), setup.config.training.micro_batch_size)
        packs = setup.rules or open_sources(setup.config)[1]
        return microbatches(setup.config, packs, 1, whole)

    config, line = resolve_auto(setup.config, rows)
    if line is not None:
        say(f"  {line}")
    return replace(setup, config=config)


def _heading(setup: ParitySetup) -> str:
    c = setup.config
    p = c.parallel
    m = c.model
    packs = (
        f"random packs, mask {setup.rules.mask}"
        if setup.rules
        else f"packs of {shown_path(c.data.data_path)}"
    )
    # From the outermost to the innermost axis.
    sizes = {"pp": p.pipeline_model_parallel_size, "dp": c.data_parallel_size(setup.world_size)}
    sizes |= {"cp": p.context_parallel_size, "tp": p.tensor_model_parallel_size}
    lines = [
        f"parity of {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} with one "
        "process",
        f"  {human_count(run_parameters(c))} parameters, {m.num_layers} layers, "
        f"{m.num_attention_heads}/"
        f"{m.query_groups} heads, {c.vision.vision_num_layers} vision layers; {p.cp_comm_type}, "
        f"{p.cp_layout}",
        f"  {c.training.global_batch_size} rows per step of up to {c.data.seq_length} tokens, "
        f"{packs}",
    ]
    # The notes list the flags that `prepare` changed.
    return "\n".join([*lines, *(f"  note: {note}" for note in setup.notes)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    own, rest = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        setup = setup_of(own, rest)
    except ValueError as error:
        warn(f"error: {error}")
        return 2
    say(_heading(setup))
    begin = time.monotonic()
    # The single process trains first. Both runs use the same rules and seeds, hence the same packs.
    try:
        setup = _resolved(setup)
        (reference,) = run_ranks(
            train_rank, 1, setup.reference, setup.rules, own.steps, timeout=own.timeout
        )
        ranks = run_ranks(
            train_rank, setup.world_size, setup.config, setup.rules, own.steps, timeout=own.timeout
        )
    except RankFailure as error:
        warn(f"FAILED: {error}")
        return 3
    # `reference` and each element of `ranks` are lists with one trace per step.
    comparisons = compare(reference, ranks)
    # Print the worst difference of each kind, even if it is within the tolerance.
    for c in comparisons:
        figures = ", ".join(f"{what} {value:.1e}" for what, value in c.differences.items())
        say(f"step {c.step}  loss {c.loss:.6f}  grad norm {c.grad_norm:.4f}  off by: {figures}")
    wrong: list[str] = []
    for c in comparisons:
        wrong += [f"  step {c.step}: the {reason}" for reason in c.beyond()]
    kind = f"{TOLERANCE:g} (float64, relative), {time.monotonic() - begin:.1f} s"
    if wrong:
        say("\n".join([f"DIFFERENT: beyond {kind}", *wrong]))
        return 1
    say(f"THE SAME: within {kind}")
    return 0
