"""Places that the figures of a run are written to: a JSONL file, TensorBoard, Weights & Biases.

Key property: the JSONL file holds each step once, also after a resume: lines past the resumed step are cut off first.
That is done to the log of the resumed run alone: one of another run is moved aside. The file holds whole lines only:
one that does not fit on the disk is taken back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from megacp.core.storage.files import open_own, parse_json, rename, replacement

Number = int | float

LOG_NAME = "log.jsonl"
"""Of the file in a folder of checkpoints: it belongs to the run that saves there."""
LONGEST_LINE = 1 << 20
"""Bytes of a line of the JSONL file: a longer one was written by nobody here."""


class Sink(Protocol):
    """A place that figures are written to."""

    name: str
    """What it is called where it is told that it cannot be written."""
    lasting: bool
    """Whether it may be written again after an error."""

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Record named figures of a step; `kind` is train, valid, blend, attention or timing."""

    def note(self, step: int, text: str) -> None:
        """Record what happened in a step, in words."""

    def close(self) -> None:
        """Flush and end."""


@dataclass(frozen=True)
class RunPlaces:
    """By which a log is known as that of a run: its folders of checkpoints, as absolute paths or URLs."""

    save: str | None = None
    """Where this run saves."""
    resumed: str | None = None
    """Where the checkpoint lies that it goes on from."""


class JsonlSink:
    """One JSON object a line: `{"kind": "train", "step": 3, "loss": ...}`, in the file at once.

    Floats keep all their digits; nan and inf are written as strings (JSON has no word for them).
    """

    lasting = True

    def __init__(
        self,
        path: Path,
        resume_step: int = 0,
        say: Callable[[str], None] = lambda text: None,
        places: RunPlaces = RunPlaces(),
    ) -> None:
        """Open for appending. A resumed run drops lines of its log past `resume_step`; another file is moved aside.

        `say` is told of a damaged file, and of another run's. Raises ValueError where a link or no regular file stands.
        """
        self.name = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND)
        before: str | None = None
        if os.fstat(self._file).st_size > 0:
            os.close(self._file)
            before = _owner(path)
            if resume_step > 0 and before is not None and before == places.resumed:
                if aside := truncate_after(path, resume_step):
                    say(
                        f"{path} holds lines that no run writes: it is now {aside}, its sound lines are in a new {path}"
                    )
            else:
                aside, before = _free_name(path), None
                rename(path, aside)
                if resume_step > 0:
                    say(f"{path} is not known as the log of {places.resumed}: it is now {aside}")
            self._file = open_own(path, os.O_WRONLY | os.O_APPEND)
        if places.save is not None and places.save != (before or _folder_of(path)):
            with contextlib.suppress(OSError):  # a log that does not name its run is moved aside, not cut
                self._line("run", resume_step, {"save": places.save})

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Append one line."""
        self._line(kind, step, {name: _json_number(value) for name, value in figures.items()})

    def note(self, step: int, text: str) -> None:
        """Append a line `{"kind": "note", "step": 3, "text": ...}`."""
        self._line("note", step, {"text": text})

    def _line(self, kind: str, step: int, values: Mapping[str, Number | str | None]) -> None:
        line = (json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n").encode()
        before = os.fstat(self._file).st_size
        done = 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            if done:
                os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class TensorBoardSink:
    """Scalars `train/loss`, `valid/loss`, ... as TensorBoard events; a resumed run hides what it does again."""

    lasting = False

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_missing("--tensorboard-dir", "tensorboard")) from error
        self.name = f"--tensorboard-dir {folder}"
        self._writer = SummaryWriter(folder, purge_step=resume_step + 1 if resume_step else None)

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Add every figure that is known."""
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def note(self, step: int, text: str) -> None:
        """Add a text."""
        self._writer.add_text("note", text, step)

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()


class WandbSink:
    """The same scalars in a Weights & Biases run."""

    lasting = False

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(_missing("--wandb-project", "wandb")) from error
        self.name = f"--wandb-project {project}"
        self._run = wandb.init(project=project, config=dict(settings))

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Log every figure that is known."""
        known = {f"{kind}/{name}": value for name, value in figures.items() if value is not None}
        self._run.log(known, step=step)

    def note(self, step: int, text: str) -> None:
        """Log the text."""
        self._run.log({"note": text}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def truncate_after(path: Path, step: int) -> Path | None:
    """Keep the lines of a JSONL log whose step is at most `step`; an end cut short by a crash goes too.

    The file is replaced as a whole, so a crash here leaves the old or the new one. Where a line is damaged, the old
    file stays under another name, which is returned. Raises ValueError where a link or no regular file stands.
    """
    damaged = False
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as old, replacement(path) as new:
        for line in _lines(old):
            if line is not None and not line.endswith(b"\n"):
                break
            row = _row(line)
            damaged |= row is None
            if line is not None and row is not None and row["step"] <= step:
                new.write(line)
        aside = _free_name(path) if damaged else None
        if aside is not None:
            _keep_aside(path, aside)
    return aside


def _keep_aside(path: Path, aside: Path) -> None:
    """Give the file a second name; only that one where the file system allows no two."""
    try:
        os.link(path, aside, follow_symlinks=False)
    except OSError:
        rename(path, aside)


def _lines(stream: BufferedReader) -> Iterator[bytes | None]:
    """The lines of a file, None for each that is longer than any of ours."""
    while line := stream.readline(LONGEST_LINE):
        whole = len(line) < LONGEST_LINE or line.endswith(b"\n")
        while not whole and (rest := stream.readline(LONGEST_LINE)):
            whole = rest.endswith(b"\n")
            line = b""
        yield line or None


def _folder_of(path: Path) -> str | None:
    """The folder of checkpoints that a log belongs to by its place; None where the place does not say."""
    return str(path.resolve().parent) if path.name == LOG_NAME else None


def _owner(path: Path) -> str | None:
    """Where the run saves that a log belongs to: what its last line of kind run says, else its folder."""
    owner = _folder_of(path)
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        for row in map(_row, _lines(file)):
            if row is not None and row.get("kind") == "run":
                owner = str(row.get("save"))
    return owner


def _row(line: bytes | None) -> dict[str, Any] | None:
    """What a line says; None for one that no run has written."""
    try:
        row = parse_json(line or b"")
    except ValueError:  # also of bytes that are no UTF-8
        return None
    if not isinstance(row, dict) or isinstance(row.get("step"), bool) or not isinstance(row.get("step"), int):
        return None
    return row


def _free_name(path: Path) -> Path:
    """`log.jsonl` -> the first of `log.1.jsonl`, `log.2.jsonl`, ... that does not exist."""
    number = 1
    while os.path.lexists(name := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return name


def _json_number(value: Number | None) -> Number | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _missing(option: str, package: str) -> str:
    return f"{option} needs the package {package}: install the extra `log` (pip install 'megacp[log]') or drop the flag"
