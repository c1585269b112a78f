"""What a run says: one console line a step, the same numbers as JSON lines, TensorBoard, W&B and
Trackio when asked.

No place ends a run: one that cannot be written is reported once on the others, and tried again with
the next line.

The JSONL file is only ever appended to, a whole line at a time. A run that goes on in a file that
has lines begins with one of kind `run`, whose `step` is the last one before it: of what stands
above, later steps count no more.
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
    """The figures of one optimizer step, already reduced over the grid."""

    step: int
    """Optimizer steps done, from 1."""
    loss: float
    """Weighted mean over the step's loss tokens."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens_per_second: float
    """Tokens of the whole step over its wall time."""
    mfu: float | None
    """Model FLOPs utilisation in [0, 1]; None where the peak of the device is unknown."""
    peak_memory: int
    """Bytes of the fullest rank since the start."""
    data_wait: float
    """Seconds the step waited for its batch."""
    seconds: float
    """Wall time of the step."""
    consumed_samples: int
    """Packs seen by the run so far."""
    epoch: float
    """Passes over the dataset so far; of a blend, its samples over the packs of all its datasets.
    """
    seconds_left: float
    """Seconds until the last step, by the median time from step to step."""
    experts: Mapping[str, Number] = field(default_factory=dict)
    """Balance of experts: terms that are no part of the loss, and loads."""


@dataclass(frozen=True)
class LogTargets:
    """Where a run reports to. On ranks other than 0 build `RunLog` with `LogTargets()`: it says
    nothing.
    """

    console: bool = False
    jsonl: Path | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    trackio_project: str | None = None
    log_interval: int = 1
    """Steps between console lines; files get every step."""


class RunLog:
    """The log of one rank. `resume_step` is the step of the loaded checkpoint, 0 for a fresh
    run.
    """

    def __init__(
        self,
        targets: LogTargets,
        total_steps: int,
        resume_step: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open all sinks; ValueError when one cannot be opened, or needs a package that is not
        installed.

        `settings` are shown by W&B and Trackio.
        """
        self._targets = targets
        self._total = total_steps
        self._step = resume_step
        self._console = Console(self._without_console)
        self._sinks: list[Sink] = []
        self._silent: set[str] = set()
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
        """Report a training step."""
        self._step = record.step
        figures = {**dataclasses.asdict(record), **record.experts}
        self.figures(
            "train",
            record.step,
            "",
            {k: v for k, v in figures.items() if k not in ("step", "experts")},
        )
        if record.step % self._targets.log_interval == 0 or record.step == self._total:
            self.say(step_line(record, self._total))

    def validation(self, step: int, loss: float) -> None:
        """Report a validation loss after `step` optimizer steps."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        text = f"step {step}/{self._total}  validation loss {loss:.4f}  perplexity {perplexity:.4g}"
        self.figures("valid", step, text, {"loss": loss})

    def figures(
        self, kind: str, step: int, text: str, figures: Mapping[str, Number | None]
    ) -> None:
        """Report named figures of a step, which `text` says in words, if any: kind attention, blend
        or timing.
        """
        self._to_sinks(lambda sink: sink.write(kind, step, figures))
        if text:
            self.say(text)

    def note(self, step: int, text: str) -> None:
        """Report what must be found again after the run: a skipped update, a document left out."""
        self._to_sinks(lambda sink: sink.note(step, text))
        self.say(f"step {step}: {text}")

    def fail(self, step: int, text: str) -> None:
        """Report why the run ends here, on standard error and in every file."""
        self._to_sinks(lambda sink: sink.note(step, text))
        if self._targets.console:
            warn(f"error: step {step}: {text}")

    def say(self, text: str) -> None:
        """Print a line on the console of rank 0."""
        if self._targets.console:
            self._console.say(text)

    def close(self) -> None:
        """Close every sink."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            with contextlib.suppress(Exception):
                sink.close()
        self._console.close()

    def _to_sinks(self, action: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                action(sink)
            except Exception as error:  # whatever a guest package raises, the run goes on
                if sink.name not in self._silent:
                    self._silent.add(sink.name)
                    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                    warning = (
                        f"{sink.name} cannot be written ({reason}): the run goes on without "
                        "its lines"
                    )
                    self.note(self._step, warning)
                    self._silent.add(sink.name)  # this line may have been short enough
            else:
                self._silent.discard(sink.name)

    def _without_console(self, reason: str) -> None:
        text = (
            f"standard output cannot be written ({reason}): the run goes on, its lines are in "
            "the log file"
        )
        warn(text)
        self._to_sinks(lambda sink: sink.note(self._step, text))


class JsonlSink:
    """One JSON object a line: `{"kind": "train", "step": 3, "loss": ...}`, in the file at once.

    Floats keep all their digits; nan and inf are written as strings (JSON has no word for them).
    `name`: what it is called where it is reported that it cannot be written. `kind`: train, valid,
    blend, attention or timing.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open for appending. ValueError where a link or no regular file stands."""
        self.name = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND)
        if os.fstat(self._file).st_size:
            with contextlib.suppress(OSError):  # a full disk ends nothing
                self._line("run", resume_step, {})

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        values = {
            name: str(v) if v is not None and not math.isfinite(v) else v
            for name, v in figures.items()
        }
        self._line(kind, step, values)

    def note(self, step: int, text: str) -> None:
        self._line("note", step, {"text": text})

    def _line(self, kind: str, step: int, values: Mapping[str, Number | str | None]) -> None:
        line = (json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n").encode()
        before, done = os.fstat(self._file).st_size, 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            if done:  # the disk is full: take back what is no whole line
                os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        os.close(self._file)


class TensorBoardSink:
    """Scalars `train/loss`, `valid/loss`, ... as TensorBoard events; a resumed run hides what it
    does again.
    """

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_missing("--tensorboard-dir", "tensorboard")) from error
        self.name = f"--tensorboard-dir {folder}"
        self._writer = SummaryWriter(folder, purge_step=resume_step + 1 if resume_step else None)
        self.close = self._writer.close

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def note(self, step: int, text: str) -> None:
        self._writer.add_text("note", text, step)


class ProjectSink:
    """The same scalars in a run of Weights & Biases, or of Trackio, which has its calls."""

    def __init__(self, package: str, project: str, settings: Mapping[str, Any]) -> None:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ValueError(_missing(f"--{package}-project", package)) from error
        self.name = f"--{package}-project {project}"
        self._run = module.init(project=project, config=dict(settings))
        self.close = self._run.finish

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        known = {f"{kind}/{name}": value for name, value in figures.items() if value is not None}
        self._run.log(known, step=step)

    def note(self, step: int, text: str) -> None:
        self._run.log({"note": text}, step=step)


Sink = JsonlSink | TensorBoardSink | ProjectSink


def _missing(option: str, package: str) -> str:
    how = (
        "pip install trackio"
        if package == "trackio"
        else "install the extra `log` (pip install 'megacp[log]')"
    )
    return f"{option} needs the package {package}: {how} or drop the flag"


def step_line(record: StepRecord, total_steps: int) -> str:
    """The console line of a step."""
    mfu = "" if record.mfu is None else f"MFU {100 * record.mfu:.1f}%  "
    width, wait = len(str(total_steps)), record.data_wait
    experts = "".join(
        f"{name.replace('_', ' ')} {value:.4g}  " for name, value in record.experts.items()
    )
    data_wait = f"{wait:.3g} s" if wait >= 1 else f"{1000 * wait:.3g} ms"
    return (
        f"step {record.step:>{width}}/{total_steps}  epoch {record.epoch:.2f}  loss "
        f"{record.loss:.4f}  {experts}"
        f"grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}  {record.seconds:.3g} s  "
        f"{record.tokens_per_second:,.0f} tokens/s  {mfu}{record.peak_memory / 2**30:.3g} GiB  "
        f"data wait {data_wait}  left {duration(record.seconds_left)}"
    )


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `5:06:07`, `3d 5h`."""
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
