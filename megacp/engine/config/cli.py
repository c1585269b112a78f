"""The command line: flags and YAML files, read from left to right. The last value wins.

A YAML file takes effect at the position of its `--config` among the flags. tyro derives flags,
types and help texts from the config fields and their docstrings, so no second table is needed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megacp import __version__
from megacp.engine.config.other_programs import accepted_line, advice, nearest, translate
from megacp.engine.config.run import RunConfig, fields, with_homes, with_values
from megacp.engine.config.yaml_file import RETIRED, accepted_of_file, values_of_file
from megacp.storage.place import at_home
from megacp.storage.wording import for_terminal

_MOST_UNKNOWN = 20
"""Maximum number of unknown flags in an error message."""
HELP = ("-h", "--help")
PROGRAM = "python -m megacp.train"
DESCRIPTION = (
    "Train a language model on packed sequences, using a grid of ranks. `--config FILE.yaml` may "
    "appear anywhere and more than once. Its keys are the names of these flags. If a flag is set "
    "several times, the last value wins."
)


class OneLineParser(argparse.ArgumentParser):
    """Argument parser for the other commands: one-line errors without usage, and `--version`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # expand `~` in every argument with `type=Path`
        self.register("type", Path, _path)
        self.add_argument(
            "--version", action="version", version=f"megacp {__version__}", help="print the version"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print a message (help, version or error), escaped and shortened for a terminal."""
        super()._print_message(for_terminal(message), file)

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` and exit with status 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def path_text(text: str) -> str:
    """Return the path or URL in `text` with `~` expanded, for `type=` of an argument."""
    try:
        return at_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_texts(text: str) -> str:
    """Return the paths or URLs in `text`, separated by commas, with `~` expanded in each."""
    return ",".join(map(path_text, text.split(",")))


def _path(text: str) -> Path:
    """Return the path in `text` with `~` expanded, for arguments with `type=Path`."""
    return Path(path_text(text))


def parse(argv: Sequence[str], prog: str = PROGRAM) -> RunConfig:
    """Parse command-line arguments (without the program name) and return the configuration.

    Raise ValueError for unknown flags, with the right or the nearest name for each, and for a
    missing or invalid YAML file. For a value of the wrong type, print tyro's message and exit with
    status 2. For `--help`, print the help and exit with status 0.
    """
    config, last = _before_last_flags(argv, prog)
    if any(argument in HELP for argument in argv):
        # tyro prints the help, in which the values of the files are the defaults
        last = [*last, "--help"]
    return with_homes(_apply(last, config, prog))


@dataclass(frozen=True)
class FlagGroup:
    """A group of flags in the help text."""

    title: str
    flags: tuple[argparse.Action, ...]


def flag_groups(argv: Sequence[str], prog: str = PROGRAM) -> list[FlagGroup]:
    """Return the parser's groups of flags, with values from the files in `argv` as defaults.

    Raise ValueError as `parse` does.
    """
    # tyro is slow to import, and commands without training flags do not need it
    import tyro

    config, _ = _before_last_flags(argv, prog)
    # flag names without their section as a prefix
    flat = tyro.conf.OmitArgPrefixes[RunConfig]
    with warnings.catch_warnings():
        # this function is deprecated, but tyro offers no other way to get the parser
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(
            flat, prog=prog, description=DESCRIPTION, default=config, add_help=False
        )
    return [
        FlagGroup(group.title or "", tuple(group._group_actions)) for group in parser._action_groups
    ]


def _before_last_flags(argv: Sequence[str], prog: str) -> tuple[RunConfig, list[str]]:
    """Return the configuration after the last `--config`, and the flags after it.

    The flags do not include `--help`. Raise ValueError for unknown flags and invalid files.
    """
    translated = translate([argument for argument in argv if argument not in HELP])
    arguments = translated.words
    reasons = translated.problems + _unknown_flags(arguments)
    if reasons:
        raise ValueError("\n".join(reasons))
    # A file name that is not UTF-8 cannot be written to a config or a log, so the first save would
    # fail. Python decodes such bytes to lone surrogates.
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(
                f"{argument!r} on the command line is not valid UTF-8: rename the file or directory"
            )
    config = RunConfig()
    *parts, (last, _) = _segments(arguments)
    for flags, path in parts:
        config = with_values(_apply(flags, config, prog), values_of_file(path))
    return config, last


def _unknown_flags(arguments: Sequence[str]) -> list[str]:
    """Return a reason for each unknown flag, with the right or the nearest name."""
    switches = {f"no_{info.name}" for info in fields().values() if info.hint is bool}
    known = {"config", *fields(), *switches}
    # a dict keeps the order of the command line and has each name once
    names = {
        argument.partition("=")[0]: None for argument in arguments if argument.startswith("--")
    }
    fields_of_flags = {name: name[2:].replace("-", "_") for name in names}
    unknown = [(name, field) for name, field in fields_of_flags.items() if field not in known]
    reasons = []
    for name, field in unknown[:_MOST_UNKNOWN]:
        if field in RETIRED:
            reasons.append(f"{name} no longer exists: {RETIRED[field].instead}")
        else:
            hint = advice(name) or nearest(field, known, as_flag=True)
            reasons.append(f"unknown flag {name}{hint}")
    if len(unknown) > _MOST_UNKNOWN:
        reasons.append(f"and {len(unknown) - _MOST_UNKNOWN} more")
    return reasons


def _apply(flags: Sequence[str], config: RunConfig, prog: str) -> RunConfig:
    """Parse `flags` with tyro and return `config` with their values."""
    if not flags:  # skip building a parser for about 150 flags
        return config
    import tyro

    flat = tyro.conf.OmitArgPrefixes[RunConfig]
    return tyro.cli(flat, args=list(flags), default=config, prog=prog, description=DESCRIPTION)


def given_names(argv: Sequence[str]) -> frozenset[str]:
    """Return the names of fields that flags or YAML files set, even to their default values.

    Raise ValueError as `parse` does.
    """
    files = [path for _, path in _segments(argv) if path]
    return given_flags(argv).union(*map(values_of_file, files))


def given_flags(argv: Sequence[str]) -> frozenset[str]:
    """Return the names of fields that flags set; fields set only in YAML files are not included.

    Raise ValueError if a `--config` lacks its path.
    """
    given = set[str]()
    for flags, _ in _segments(translate(argv).words):
        for text in flags:
            if not text.startswith("--") or text in HELP:
                continue
            # `--no-dry-run` sets the field dry_run
            name = text.partition("=")[0][2:].replace("-", "_")
            given.add(name if name in fields() else name.removeprefix("no_"))
    return frozenset(given)


def _segments(arguments: Sequence[str]) -> list[tuple[list[str], str]]:
    """Split arguments at each `--config` into pairs of the flags before it and its file.

    The last pair contains the flags after the last `--config`, and "" instead of a file. Raise
    ValueError if a `--config` lacks its path.
    """
    parts: list[tuple[list[str], str]] = []
    segment: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, path = argument.partition("=")
        if name != "--config":
            segment.append(argument)
            continue
        if not equals:
            path = next(rest, "--")  # a missing path fails the check below
        if path.startswith("--"):
            raise ValueError("--config needs the path of a YAML file")
        parts.append((segment, path))
        segment = []
    return [*parts, (segment, "")]


def accepted_note(argv: Sequence[str]) -> str:
    """Return a line with the flags and keys of other programs that a run accepts; "" if none.

    Raise ValueError as `parse` does.
    """
    translated = translate(argv)
    always = list(translated.always)
    needless = list(translated.needless)
    for _, path in _segments(argv):
        if path:
            in_file = accepted_of_file(path)
            always += in_file.always
            needless += in_file.needless
    return accepted_line(always, needless)
