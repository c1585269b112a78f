"""Log of a run: one console line per step, and the same numbers as JSON lines and, on request,
in TensorBoard, W&B and Trackio.

A failing target does not end the run. The other targets report the failure once, and the next line
is tried again.

Whole lines are appended to the JSONL file, and nothing is overwritten. If the file is not empty, a
resumed run first appends a line of kind `run`, whose `step` is the step after which it resumes.
Earlier lines with later steps are then obsolete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.storage.files import open_own
from megacp.training.monitor.console import Console, warn

Number = int | float


@dataclass(frozen=True)
class StepRecord:
    """Figures of one optimizer step, already reduced across the grid."""

    step: int
    """Number of the optimizer step, from 1."""
    loss: float
    """Weighted mean loss over the step's loss tokens."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens_per_second: float
    """Tokens of the whole step divided by its wall time."""
    mfu: float | None
    """Model FLOPs utilisation in [0, 1]; None if the device's peak is unknown."""
    peak_memory: int
    """Peak bytes since the start, on the rank with the highest peak."""
    data_wait: float
    """Seconds that the step waited for its batch."""
    seconds: float
    """Wall time of the step."""
    consumed_samples: int
    """Packs that the run has consumed so far."""
    epoch: float
    """Passes over the dataset so far. For a blend: samples so far, divided by the number of packs
    in all its datasets.
    """
    seconds_left: float
    """Estimated seconds until the last step, from the median time between steps."""
    experts: Mapping[str, Number] = field(default_factory=dict)
    """Expert balance: loads, and auxiliary terms, which `loss` does not include."""


@dataclass(frozen=True)
class LogTargets:
    """Targets of a run's log. Ranks other than 0 use `LogTargets()`, which has no target."""

    console: bool = False
    jsonl: Path | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    trackio_project: str | None = None
    log_interval: int = 1
    """Number of steps between console lines; files contain every step."""


class RunLog:
    """Log of one rank. `resume_step` is the step of the loaded checkpoint, 0 for a new run."""

    def __init__(
        self,
        targets: LogTargets,
        total_steps: int,
        resume_step: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open all targets. W&B and Trackio also record the `settings`.

        Raise ValueError if a target cannot be opened, or if its package is not installed.
        """
        self._targets = targets
        self._total = total_steps
        self._step = resume_step
        self._console = Console(self._without_console)
        # optional dependencies are imported only if their flag is set
        self._sinks: list[Sink] = []
        self._silent: set[str] = set()  # sinks whose latest line could not be written
        if targets.tensorboard_dir:
            self._sinks.append(TensorBoardSink(targets.tensorboard_dir, resume_step))
        for package, project in (
            ("wandb", targets.wandb_project),
            ("trackio", targets.trackio_project),
        ):
            if project:
                self._sinks.append(ProjectSink(package, project, settings or {}))
        if targets.jsonl:
            self._sinks.append(JsonlSink(targets.jsonl, resume_step))

    def step(self, record: StepRecord) -> None:
        """Log a training step."""
        self._step = record.step
        figures = {**dataclasses.asdict(record), **record.experts}
        del figures["step"], figures["experts"]
        self.figures("train", record.step, "", figures)
        if record.step % self._targets.log_interval == 0 or record.step == self._total:
            self.say(step_line(record, self._total))

    def validation(self, step: int, loss: float) -> None:
        """Log a validation loss after `step` optimizer steps."""
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
        text = f"step {step}/{self._total}  validation loss {loss:.4f}  perplexity {perplexity:.4g}"
        self.figures("valid", step, text, {"loss": loss})

    def figures(
        self, kind: str, step: int, text: str, figures: Mapping[str, Number | None]
    ) -> None:
        """Log named figures of a step, and print `text` unless it is empty.

        `kind` is train, valid, attention, blend or timing.
        """
        self._to_sinks(lambda sink: sink.write(kind, step, figures))
        if text:  # empty for most steps
            self.say(text)

    def note(self, step: int, text: str) -> None:
        """Log an event, such as a skipped update or a dropped document."""
        self._to_sinks(lambda sink: sink.note(step, text))
        self.say(f"step {step}: {text}")

    def fail(self, step: int, text: str) -> None:
        """Log why the run ends with an error, to standard error and to every file."""
        self._to_sinks(lambda sink: sink.note(step, text))
        if self._targets.console:
            warn(f"error: step {step}: {text}")

    def say(self, text: str) -> None:
        """Print a line on the console of rank 0."""
        if self._targets.console:
            self._console.say(text)

    def close(self) -> None:
        """Close every target."""
        sinks = self._sinks
        self._sinks = []  # a message from `console.close` must not reach closed sinks
        for sink in sinks:
            with contextlib.suppress(Exception):
                sink.close()
        self._console.close()

    def _to_sinks(self, action: Callable[[Sink], None]) -> None:
        """Run an action on each sink. Report a failing sink once, until it has worked again."""
        for sink in self._sinks:
            try:
                action(sink)
            except Exception as error:  # third-party packages may raise anything
                if sink.name not in self._silent:
                    self._silent.add(sink.name)
                    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                    warning = f"{sink.name} cannot be written ({reason}): the run continues"
                    self.note(self._step, warning)
                    # Writing the note may have succeeded, because it is shorter than other lines.
                    self._silent.add(sink.name)
            else:  # it works again: report its next failure
                self._silent.discard(sink.name)

    def _without_console(self, reason: str) -> None:
        """Report a failing console on standard error and in the files."""
        text = (
            f"standard output cannot be written ({reason}): the run continues and writes its "
            "lines to the log file"
        )
        warn(text)
        self._to_sinks(lambda sink: sink.note(self._step, text))


class JsonlSink:
    """JSONL file with one object per line: `{"kind": "train", "step": 3, "loss": ...}`.

    Each line is written immediately. Floats keep all their digits; nan and inf become strings,
    because JSON cannot represent them. `name` is used in warnings. `kind` is train, valid, blend,
    attention, timing, note or run.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open the file to append. Raise ValueError if `path` is a link or not a regular file."""
        self.name = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: other processes may read the file or append to it at the same time
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND)
        if os.fstat(self._file).st_size:
            with contextlib.suppress(OSError):  # a full disk does not end the run
                self._line("run", resume_step, {})

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Write the metrics of a step."""
        values: dict[str, Number | str | None] = {}
        for name, value in figures.items():
            is_number = value is None or math.isfinite(value)
            values[name] = value if is_number else str(value)
        self._line(kind, step, values)

    def note(self, step: int, text: str) -> None:
        """Write a note."""
        self._line("note", step, {"text": text})

    def _line(self, kind: str, step: int, values: Mapping[str, Number | str | None]) -> None:
        """Append a whole line, or nothing if that fails."""
        content = {"kind": kind, "step": step, **values}
        line = (json.dumps(content, allow_nan=False) + "\n").encode()
        before = os.fstat(self._file).st_size
        done = 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            if done:  # the disk may be full: remove the incomplete line
                os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class TensorBoardSink:
    """TensorBoard events with the scalars `train/loss`, `valid/loss`, ...

    A resumed run hides the old events of the steps that it repeats.
    """

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_missing("--tensorboard-dir", "tensorboard")) from error
        self.name = f"--tensorboard-dir {folder}"
        # purge_step hides an earlier run's events, starting at this step
        self._writer = SummaryWriter(folder, purge_step=resume_step + 1 if resume_step else None)
        self.close = self._writer.close

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Write the metrics of a step."""
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def note(self, step: int, text: str) -> None:
        """Write a note."""
        self._writer.add_text("note", text, step)


class ProjectSink:
    """The same scalars in Weights & Biases, or in Trackio, which has the same API."""

    def __init__(self, package: str, project: str, settings: Mapping[str, Any]) -> None:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ValueError(_missing(f"--{package}-project", package)) from error
        self.name = f"--{package}-project {project}"
        self._run = module.init(project=project, config=dict(settings))
        self.close = self._run.finish

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Write the metrics of a step."""
        known = {f"{kind}/{name}": value for name, value in figures.items() if value is not None}
        self._run.log(known, step=step)

    def note(self, step: int, text: str) -> None:
        """Write a note."""
        self._run.log({"note": text}, step=step)


Sink = JsonlSink | TensorBoardSink | ProjectSink


def _missing(option: str, package: str) -> str:
    """Return the error message for a flag whose package is missing."""
    how = "install the extra `log` (pip install -e '.[log]')"
    if package == "trackio":  # the extra does not include it
        how = "pip install trackio"
    return f"{option} needs the package {package}: {how} or remove the flag"


def step_line(record: StepRecord, total_steps: int) -> str:
    """Return the console line of a step."""
    width = len(str(total_steps))  # align the columns of all lines
    experts = ""
    for name, value in record.experts.items():
        experts += f"{name.replace('_', ' ')} {value:.4g}  "
    mfu = "" if record.mfu is None else f"MFU {100 * record.mfu:.1f}%  "
    wait = record.data_wait
    data_wait = f"{wait:.3g} s" if wait >= 1 else f"{1000 * wait:.3g} ms"
    return (
        f"step {record.step:>{width}}/{total_steps}  epoch {record.epoch:.2f}  "
        f"loss {record.loss:.4f}  {experts}grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}  "
        f"{record.seconds:.3g} s  {record.tokens_per_second:,.0f} tokens/s  "
        f"{mfu}{record.peak_memory / 2**30:.3g} GiB  data wait {data_wait}  "
        f"left {duration(record.seconds_left)}"
    )


def duration(seconds: float) -> str:
    """Return a duration as `0:07`, `12:30`, `5:06:07` or `3d 5h`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
