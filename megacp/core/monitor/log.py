"""What a run says: one console line a step, the same numbers as JSON lines, TensorBoard and W&B when asked.

Key property: every figure goes through one `StepRecord`, so all places show the same numbers. No place ends a run: one
that cannot be written is told once on the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.core.monitor.console import Console, warn
from megacp.core.monitor.sinks import JsonlSink, Number, RunPlaces, Sink, TensorBoardSink, WandbSink


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
    """Passes over the dataset so far; of a blend, its samples over the packs of all its datasets."""
    seconds_left: float
    """Until the last step, by the median time from step to step."""


@dataclass(frozen=True)
class LogTargets:
    """Where a run reports to. On ranks other than 0 build `RunLog` with `LogTargets()`: it says nothing."""

    console: bool = False
    jsonl: Path | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    log_interval: int = 1
    """Steps between console lines; files get every step."""
    places: RunPlaces = RunPlaces()
    """By which the JSONL file of an earlier part of this run is known."""


class RunLog:
    """The log of one rank. `resume_step` is the step of the loaded checkpoint, 0 for a fresh run."""

    def __init__(
        self, targets: LogTargets, total_steps: int, resume_step: int = 0, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Open all sinks; ValueError when one cannot be opened, or needs a package that is not installed.

        `settings` are shown by W&B.
        """
        self._targets = targets
        self._total = total_steps
        self._step = resume_step
        self._console = Console(self._without_console)
        self._sinks: list[Sink] = []
        self._silent: set[str] = set()
        try:
            if targets.tensorboard_dir:
                self._sinks.append(TensorBoardSink(targets.tensorboard_dir, resume_step))
            if targets.wandb_project:
                self._sinks.append(WandbSink(targets.wandb_project, settings or {}))
            if targets.jsonl:
                self._sinks.append(JsonlSink(targets.jsonl, resume_step, self.say, targets.places))
        except BaseException:
            self.close()
            raise

    def step(self, record: StepRecord) -> None:
        """Report a training step."""
        self._step = record.step
        figures = dataclasses.asdict(record)
        figures.pop("step")
        self._write("train", record.step, figures)
        if record.step % self._targets.log_interval == 0 or record.step == self._total:
            self.say(step_line(record, self._total))
        if self._targets.console:
            left = duration(record.seconds_left)
            self._console.progress(record.step, self._total, f"loss {record.loss:.4f}  left {left}")

    def validation(self, step: int, loss: float) -> None:
        """Report a validation loss after `step` optimizer steps."""
        self._write("valid", step, {"loss": loss})
        self.say(f"step {step}/{self._total}  validation loss {loss:.4f}  perplexity {_exp(loss):.4g}")

    def figures(self, kind: str, step: int, text: str, figures: Mapping[str, Number]) -> None:
        """Report named figures of a step, which `text` says in words, if any: kind attention, blend or timing."""
        self._write(kind, step, figures)
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

    def _write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        self._to_sinks(lambda sink: sink.write(kind, step, figures))

    def _to_sinks(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # whatever a guest package raises, the run goes on
                self._without(sink, error)
            else:
                self._silent.discard(sink.name)

    def _without(self, sink: Sink, error: Exception) -> None:
        """Say once that a sink cannot be written; one that lasts is tried again with the next line."""
        if not sink.lasting:
            self._sinks.remove(sink)
        if sink.name in self._silent:
            return
        self._silent.add(sink.name)
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        text = f"{sink.name} cannot be written ({reason}): the run goes on without its lines"
        for other in list(self._sinks):
            if other is not sink:
                with contextlib.suppress(Exception):
                    other.note(self._step, text)
        self.say(text)

    def _without_console(self, reason: str) -> None:
        text = f"standard output cannot be written ({reason}): the run goes on, its lines are in the log file"
        warn(text)
        self._to_sinks(lambda sink: sink.note(self._step, text))


def step_line(record: StepRecord, total_steps: int) -> str:
    """The console line of a step."""
    mfu = "n/a" if record.mfu is None else f"{100 * record.mfu:.1f}%"
    width = len(str(total_steps))
    return (
        f"step {record.step:>{width}}/{total_steps}  epoch {record.epoch:.2f}  loss {record.loss:.4f}  "
        f"grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}  {record.seconds:.3g} s  "
        f"{record.tokens_per_second:,.0f} tokens/s  MFU {mfu}  {record.peak_memory / 2**30:.3g} GiB  "
        f"data wait {1000 * record.data_wait:.3g} ms  left {duration(record.seconds_left)}"
    )


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `5:06:07`, `3d 5h`."""
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
