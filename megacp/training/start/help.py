"""Help of the training command: `--help` prints common flags, `--help-all` prints all flags."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence

from megacp.engine.config.cli import DESCRIPTION, HELP, PROGRAM, flag_groups, parse
from megacp.engine.config.run import flag
from megacp.training.monitor.console import say

HELP_ALL = "--help-all"
# Fields with common flags, which `--help` shows.
FIRST_FIELDS = (
    "dry_run",
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "cp_layout",
    "num_layers",
    "hidden_size",
    "lora_rank",
    "data_path",
    "valid_data_path",
    "seq_length",
    "global_batch_size",
    "train_iters",
    "train_epochs",
    "lr",
    "lr_warmup_iters",
    "dtype",
    "recompute_granularity",
    "eval_interval",
    "load",
    "load_hf",
    "load_adapter",
    "finetune",
    "save",
    "save_interval",
    "auto_resume",
)
# Maximum number of columns in a help line.
_WIDEST = 100
_INDENT = 8 * " "


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for help in any form."""
    return any(argument in (*HELP, HELP_ALL) for argument in arguments)


def show_help(arguments: Sequence[str]) -> None:
    """Print the common flags by group, or all flags for `--help-all`.

    Defaults come from the --config files in `arguments`. Raise ValueError as `parse` does.
    """
    others = [argument for argument in arguments if argument not in (*HELP, HELP_ALL)]
    if HELP_ALL in arguments:
        # argparse prints the help for all flags and exits
        parse([*others, *HELP])
    # the texts come from the parser, so that defaults and groups are always correct
    shown = {flag(name) for name in FIRST_FIELDS}
    lines = [f"usage: {PROGRAM} [-h] [OPTIONS]", DESCRIPTION]
    for group in flag_groups(others):
        actions = [action for action in group.flags if action.option_strings[0] in shown]
        if actions:
            lines += ["", group.title]
        for action in actions:
            lines += _described(action)
    lines += [
        "",
        "--nproc N starts N ranks on this machine after checking the flags; "
        "--help-all shows all flags",
    ]
    say("\n".join(lines))


def _described(action: argparse.Action) -> list[str]:
    """Return the help lines for a flag: its names and allowed values, then its help text."""
    names = ", ".join(action.option_strings)
    values = f" {action.metavar}" if action.metavar else ""
    # use the terminal's width, but keep lines readable on wide terminals
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    text = " ".join((action.help or "").split())  # docstrings contain line breaks
    wrapped = textwrap.wrap(
        text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )
    return [f"  {names}{values}", *wrapped]
