"""Divide the flags of `megacp finetune` among the three commands that it runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megacp.engine.config.other_programs import ACCEPTED, advice, nearest
from megacp.engine.config.run import fields, flag
from megacp.huggingface.convert_command import convert_parser
from megacp.prepare.command import preprocess_parser

# Flags that `finetune` sets itself, with the way to change them.
_OWN_PLACES = {
    "--input": "give the files after MODEL",
    "--tokenizer": "the tokenizer comes with MODEL",
    "--load-hf": "give the model as MODEL",
    "--data-path": "give the files after MODEL",
    "--save": "checkpoints are written to --output",
    "--load": "checkpoints are written to --output, and the same command resumes",
    "--units": "run preprocess_data.py build by hand",
    "--overwrite": "give another --output, or delete the old folder",
    "--from": "run convert_checkpoint.py by hand",
    "--to": "run convert_checkpoint.py by hand; the folder has the whole model",
    "--verify": "the export is verified, unless --no-verify is given",
    "--world-size": "use --nproc N",
}
# The dtype of training and the dtype of the exported weights have one name in their commands.
EXPORT_DTYPE = "--export-dtype"


@dataclass
class WordsByCommand:
    """Command-line words for each of the three commands."""

    build: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    export: list[str] = field(default_factory=list)


def _names(parser: argparse.ArgumentParser) -> set[str]:
    """Return the long flags of a parser."""
    return {name for name in parser._option_string_actions if name.startswith("--")}


def build_names() -> set[str]:
    """Return the flags of `preprocess_data.py build`."""
    # argparse keeps the parsers of subcommands in a private action.
    for action in preprocess_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _names(action.choices["build"])
    raise AssertionError("the parser of preprocess_data.py has no commands")


def export_names() -> set[str]:
    """Return the flags of convert_checkpoint.py, with --export-dtype for its --dtype."""
    return _names(convert_parser()) - {"--dtype"} | {EXPORT_DTYPE}


def train_names() -> set[str]:
    """Return the flags of a training run, and flags of other programs that it accepts."""
    found = {"--config", *map(flag, ACCEPTED)}
    for name, info in fields().items():
        found.add(flag(name))
        if info.hint is bool:
            found.add(flag(f"no_{name}"))
    return found


def divided(words: Sequence[str]) -> WordsByCommand:
    """Return the words for each command. A flag that two commands have goes to both.

    Raise ValueError for a word that belongs to no flag, for unknown flags with the nearest name of
    each, and for flags that `finetune` sets itself.
    """
    build, train, export = build_names(), train_names(), export_names()
    # The vision tower of the run comes with the model; the flag chooses the rules of the build.
    train -= {"--vision-family"}
    found = WordsByCommand()
    reasons = []
    # Collect all faults; one message lists them.
    for group in _groups(words):
        name = group[0].partition("=")[0]
        if name in _OWN_PLACES:
            reasons.append(f"{name} cannot be given here: {_OWN_PLACES[name]}")
            continue
        if name not in build | train | export:
            known = build | train | export
            reasons.append(f"unknown flag {name}{advice(name) or nearest(name, known)}")
            continue
        # --seq-length and --seed, for example, belong to the build and to training.
        if name in build:
            found.build += group
        if name in train:
            found.train += group
        if name in export:
            found.export += [group[0].replace(EXPORT_DTYPE, "--dtype"), *group[1:]]
    if reasons:
        raise ValueError("\n".join(reasons))
    return found


def _groups(words: Sequence[str]) -> list[list[str]]:
    """Return each flag with the words after it, up to the next flag."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise ValueError(
                f"{word}: expected a flag here; MODEL and the files of DATA come first"
            )
    return groups


def flag_words(values: Mapping[str, object]) -> list[str]:
    """Return the command-line words for values by field name, each flag before its value."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif isinstance(value, list | tuple):
            words += [flag(name), *map(str, value)]
        elif isinstance(value, float):
            words += [flag(name), f"{value:g}"]
        else:
            words += [flag(name), str(value)]
    return words
