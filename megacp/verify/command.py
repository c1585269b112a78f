"""Does this layout train like one process? Trains it on random packs on this machine's CPU and compares every gradient.

    python tools/check_parity.py --nproc 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --context-parallel-size 2 --mask mixed
    python tools/check_parity.py --config my_run.yaml --nproc 8

Takes every flag and `--config` of megacp.train. A model too large for one process is made small, choices that need a
GPU are replaced, and each change is told. With `--data-path` the stored packs are used, if they are short enough. Exit
status: 0 the same within rounding, 1 different, 2 refused with one message, 3 a rank failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from megacp.core.config.cli import given_flags, parse
from megacp.core.config.parallel import ParallelConfig
from megacp.core.context_parallel.choose import is_auto
from megacp.core.data.mock import MASKS
from megacp.core.distributed.spawn import RankFailure, run_ranks
from megacp.core.models.costs import run_parameters
from megacp.core.storage.wording import human_count
from megacp.verify.parity import TOLERANCES, StepComparison, chosen_way, compare, train_rank
from megacp.verify.parity_config import MODELS, ParityRequest, ParitySetup, prepare

REFUSED, FAILED = 2, 3


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Train a layout on random packs and compare it with one process; also takes all flags of "
        "megacp.train (see its --help) and --config FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start here (default: tp x pp x cp)")
    parser.add_argument(
        "--mask",
        choices=MASKS,
        help="attention mask of random packs (default: --attention-mask, mixed for a model with a vision tower)",
    )
    parser.add_argument(
        "--model", choices=list(MODELS), help="sizes by name (default: tiny_llm, with --config its own)"
    )
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps to compare (default 2)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds until a hang is told (600)")
    own, rest = parser.parse_known_args(argv)
    for name, least in (("nproc", 1), ("steps", 1), ("timeout", 1)):
        value = getattr(own, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value:g}: must be at least {least}")
    return own, rest


def _setup(own: argparse.Namespace, rest: Sequence[str]) -> ParitySetup:
    has_config = any(argument.partition("=")[0] == "--config" for argument in rest)
    request = ParityRequest(given_flags(rest), has_config, own.model, own.mask, own.nproc)
    return prepare(parse(rest, prog="megacp-parity"), request)


def _without_auto(setup: ParitySetup, timeout: float) -> ParitySetup:
    """The setup with transport and layout chosen on this machine, as a run chooses them; told in lines."""
    if not is_auto(setup.config):
        return setup
    config, line = chosen_way(setup.config, setup.rules)
    print(f"  {line}", flush=True)
    return dataclasses.replace(setup, config=config)


def _heading(setup: ParitySetup) -> str:
    p, t, m = setup.config.parallel, setup.config.training, setup.config.model
    dp, layers = setup.config.data_parallel_size(setup.world_size), setup.config.vision.vision_num_layers
    tower = f"a vision tower of {layers} layers, " if layers else ""
    lines = [
        f"parity of {setup.world_size} ranks = pp {p.pipeline_model_parallel_size} x dp {dp} x "
        f"cp {p.context_parallel_size} x tp {p.tensor_model_parallel_size} with one process",
        f"  layout  virtual stages {p.num_virtual_stages_per_pipeline_rank}, schedule {p.pipeline_schedule}, "
        f"sequence parallel {'on' if p.sequence_parallel else 'off'}, {_context(p)}, "
        f"recompute {t.recompute_granularity}, sharding {p.data_parallel_sharding_strategy}",
        f"  model   {setup.model or 'of the config'}: {human_count(run_parameters(setup.config))} parameters, "
        f"{m.num_layers} layers, {m.num_attention_heads}/{m.query_groups} heads, {tower}{t.dtype}",
        f"  packs   {t.global_batch_size} a step of up to {setup.config.data.seq_length} tokens, {setup.packs}, "
        f"seed {t.seed}",
    ]
    return "\n".join([*lines, *(f"  note    {note}" for note in setup.notes)])


def _context(p: ParallelConfig) -> str:
    """Transport and layout in words."""
    sizes = p.hierarchical_context_parallel_sizes
    transport = p.cp_comm_type + (f" {sizes[0]} x {sizes[1]}" if sizes else "")
    return f"{transport}, {p.cp_layout}" + (" over dp x cp" if p.dynamic_context_parallel else "")


def _line(c: StepComparison) -> str:
    return (
        f"step {c.step}  loss {c.loss:.6f} off by {c.loss_difference:.1e}  grad norm {c.grad_norm:.4f} off by "
        f"{c.grad_norm_difference:.1e}  gradients {c.gradient.value:.1e} ({c.gradient.name})  "
        f"updates {c.update.value:.1e} ({c.update.name})  parameters {c.parameter.value:.1e} ({c.parameter.name})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    own, rest = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        setup = _setup(own, rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(_heading(setup), flush=True)
    begin = time.monotonic()
    try:
        setup = _without_auto(setup, own.timeout)
        print(f"  running {own.steps} steps on one process ...", flush=True)
        (reference,) = run_ranks(train_rank, 1, setup.reference, setup.rules, own.steps, timeout=own.timeout)
        print(f"  running them on {setup.world_size} ranks, after {time.monotonic() - begin:.0f} s ...", flush=True)
        ranks = run_ranks(train_rank, setup.world_size, setup.config, setup.rules, own.steps, timeout=own.timeout)
    except RankFailure as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return FAILED
    comparisons = compare(reference, ranks)
    tolerance = TOLERANCES[setup.config.training.dtype]
    wrong = [f"step {c.step}: {reason}" for c in comparisons for reason in c.beyond(tolerance)]
    for comparison in comparisons:
        print(_line(comparison))
    kind = f"{tolerance:g} ({setup.config.training.dtype}, relative), {time.monotonic() - begin:.1f} s"
    if wrong:
        print("\n".join([f"DIFFERENT: beyond {kind}", *(f"  {reason}" for reason in wrong)]))
        return 1
    print(f"THE SAME: within {kind}")
    return 0
