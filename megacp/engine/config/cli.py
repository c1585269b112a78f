"""The command line: flags and YAML files, read left to right, the last one wins.

A YAML file stands where its `--config` stands among the flags. tyro derives flags, types and help
from the fields and their docstrings, so there is no second table of flags.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megacp import __version__
from megacp.engine.config.run import RunConfig, fields, with_homes, with_values
from megacp.engine.config.yaml_file import RETIRED, nearest, values_of_file
from megacp.storage.place import at_home
from megacp.storage.wording import for_terminal

_MOST_UNKNOWN = 20
"""Unknown flags whose nearest names are looked for."""
HELP = ("-h", "--help")
PROGRAM = "python -m megacp.train"
DESCRIPTION = (
    "Train a language model on packed sequences over a grid of ranks. `--config FILE.yaml` may stand anywhere and "
    "more than once: its keys are these flags, and of flags and files the last one wins."
)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser of other commands, that prints no usage with its errors and has
    `--version`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, _path)
        self.add_argument(
            "--version", action="version", version=f"megacp {__version__}", help="print the version"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print what argparse has to say: help, version and errors, which quote arguments."""
        super()._print_message(for_terminal(message), file)

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` and exit 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def path_text(text: str) -> str:
    """Read a path or a URL of a command line, as the `type` of a flag; `~` is the user's folder."""
    try:
        return at_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_texts(text: str) -> str:
    """Read paths with commas between, as `path_text` does."""
    return ",".join(map(path_text, text.split(",")))


def _path(text: str) -> Path:
    """Read what a flag has whose `type` is Path."""
    return Path(path_text(text))


def parse(argv: Sequence[str], prog: str = PROGRAM) -> RunConfig:
    """The configuration said by command line arguments (without the program's name).

    Raises ValueError for unknown flags: all of them, with the nearest name, and a YAML file that
    is missing or wrong. Exits with status 2 and tyro's message for a value of the wrong type, and
    with 0 after `--help`.
    """
    config, last = _before_last_flags(argv, prog)
    asks_help = any(argument in HELP for argument in argv)
    return with_homes(_apply([*last, "--help"] if asks_help else last, config, prog))


@dataclass(frozen=True)
class FlagGroup:
    """Flags that the help shows together."""

    title: str
    flags: tuple[argparse.Action, ...]


def flag_groups(argv: Sequence[str], prog: str = PROGRAM) -> list[FlagGroup]:
    """Return the groups of flags as the parser has them. Their defaults are the values of the files
    in `argv`.

    Raises ValueError as `parse`.
    """
    import tyro

    config, _ = _before_last_flags(argv, prog)
    flat = tyro.conf.OmitArgPrefixes[RunConfig]
    with warnings.catch_warnings():
        # tyro plans to remove this function, and has no other one that returns the parser
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(
            flat, prog=prog, description=DESCRIPTION, default=config, add_help=False
        )
    return [
        FlagGroup(group.title or "", tuple(group._group_actions)) for group in parser._action_groups
    ]


def _before_last_flags(argv: Sequence[str], prog: str) -> tuple[RunConfig, list[str]]:
    """Return the configuration after the last `--config`, and the flags after it, without
    `--help`.
    """
    arguments = [argument for argument in argv if argument not in HELP]
    known = (
        {"config"}
        | set(fields())
        | {f"no_{info.name}" for info in fields().values() if info.hint is bool}
    )
    names = {
        argument.partition("=")[0]: None for argument in arguments if argument.startswith("--")
    }
    unknown = [
        (name, name[2:].replace("-", "_"))
        for name in names
        if name[2:].replace("-", "_") not in known
    ]
    if unknown:
        near = []
        for name, field in unknown[:_MOST_UNKNOWN]:
            if field in RETIRED:
                near.append(f"{name} no longer exists: {RETIRED[field].instead}")
            else:
                near.append(f"unknown flag {name}{nearest(field[:100], known, as_flag=True)}")
        if len(unknown) > _MOST_UNKNOWN:
            near.append(f"and {len(unknown) - _MOST_UNKNOWN} more")
        raise ValueError("\n".join(near))
    for argument in (
        arguments
    ):  # such a name cannot stand in a config, a log or a message: the first save would fail
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(
                f"{argument!r} on the command line is no text in UTF-8: rename the file or "
                "directory"
            )
    config = RunConfig()
    *parts, (last, _) = _segments(arguments)
    for flags, path in parts:
        config = with_values(_apply(flags, config, prog), values_of_file(path))
    return config, last


def _apply(flags: Sequence[str], config: RunConfig, prog: str) -> RunConfig:
    if not flags:
        return config
    import tyro

    flat = tyro.conf.OmitArgPrefixes[RunConfig]
    return tyro.cli(flat, args=list(flags), default=config, prog=prog, description=DESCRIPTION)


def given_names(argv: Sequence[str]) -> frozenset[str]:
    """The fields that flags or YAML files of a command line set, whatever the value; ValueError as
    `parse`.
    """
    return given_flags(argv).union(*(values_of_file(path) for _, path in _segments(argv) if path))


def given_flags(argv: Sequence[str]) -> frozenset[str]:
    """The fields that flags of a command line set, files aside; ValueError for a `--config` without
    a path.
    """
    flags = (
        text
        for flags, _ in _segments(argv)
        for text in flags
        if text.startswith("--") and text not in HELP
    )
    plain = (text.partition("=")[0][2:].replace("-", "_") for text in flags)
    return frozenset(name if name in fields() else name.removeprefix("no_") for name in plain)


def _segments(arguments: Sequence[str]) -> list[tuple[list[str], str]]:
    """The flags before each `--config` with its file, and at last those after all of them with no
    file.
    """
    parts: list[tuple[list[str], str]] = []
    segment: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, path = argument.partition("=")
        if name != "--config":
            segment.append(argument)
            continue
        path = path if equals else next(rest, "--")
        if path.startswith("--"):
            raise ValueError("--config needs the path of a YAML file")
        parts.append((segment, path))
        segment = []
    return [*parts, (segment, "")]
