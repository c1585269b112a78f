"""What a run says: one console line a step, the same numbers as JSON lines, TensorBoard and W&B when asked.

Key property: every figure goes through one `StepRecord`, so all places show the same numbers; the JSONL file holds each
step once, also after a resume, because lines past the resumed step are cut off first. Rejected: Python's logging with
handlers, which formats text and would make the numbers something to parse.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

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


class Sink(Protocol):
    """A place that figures are written to."""

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Record named figures of a step; `kind` is train, valid or attention."""

    def note(self, step: int, text: str) -> None:
        """Record what happened in a step, in words."""

    def close(self) -> None:
        """Flush and end."""


@dataclass(frozen=True)
class LogTargets:
    """Where a run reports to. On ranks other than 0 build `RunLog` with `LogTargets()`: it says nothing."""

    console: bool = False
    jsonl: Path | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    log_interval: int = 1
    """Steps between console lines; files get every step."""


class RunLog:
    """The log of one rank. `resume_step` is the step of the loaded checkpoint, 0 for a fresh run."""

    def __init__(
        self, targets: LogTargets, total_steps: int, resume_step: int = 0, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Open all sinks; ValueError when TensorBoard or W&B is asked for and not installed.

        `settings` are shown by W&B.
        """
        self._targets = targets
        self._total = total_steps
        self._sinks: list[Sink] = []
        if targets.tensorboard_dir:
            self._sinks.append(TensorBoardSink(targets.tensorboard_dir, resume_step))
        if targets.wandb_project:
            self._sinks.append(WandbSink(targets.wandb_project, settings or {}))
        if targets.jsonl:
            self._sinks.append(JsonlSink(targets.jsonl, resume_step))

    def step(self, record: StepRecord) -> None:
        """Report a training step."""
        figures = dataclasses.asdict(record)
        figures.pop("step")
        for sink in self._sinks:
            sink.write("train", record.step, figures)
        if record.step % self._targets.log_interval == 0 or record.step == self._total:
            self.say(step_line(record, self._total))

    def validation(self, step: int, loss: float) -> None:
        """Report a validation loss after `step` optimizer steps."""
        for sink in self._sinks:
            sink.write("valid", step, {"loss": loss})
        self.say(f"step {step}/{self._total}  validation loss {loss:.4f}  perplexity {_exp(loss):.4g}")

    def attention(self, step: int, text: str, figures: Mapping[str, Number]) -> None:
        """Report measured beside predicted seconds of core attention, as a line and as figures."""
        for sink in self._sinks:
            sink.write("attention", step, figures)
        self.say(text)

    def note(self, step: int, text: str) -> None:
        """Report what must be found again after the run: a skipped update, a document left out."""
        for sink in self._sinks:
            sink.note(step, text)
        self.say(f"step {step}: {text}")

    def say(self, text: str) -> None:
        """Print a line on the console of rank 0."""
        if self._targets.console:
            print(text, file=sys.stdout, flush=True)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def step_line(record: StepRecord, total_steps: int) -> str:
    """The console line of a step."""
    mfu = "n/a" if record.mfu is None else f"{100 * record.mfu:.1f}%"
    width = len(str(total_steps))
    return (
        f"step {record.step:>{width}}/{total_steps}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
        f"lr {record.lr:.3e}  {record.tokens_per_second:,.0f} tokens/s  MFU {mfu}  "
        f"peak {record.peak_memory / 2**30:.2f} GiB  data wait {1000 * record.data_wait:.1f} ms"
    )


class JsonlSink:
    """One JSON object a line: `{"kind": "train", "step": 3, "loss": ...}`, flushed at every line.

    Floats keep all their digits; nan and inf are written as strings (JSON has no word for them).
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open for appending. A resumed run drops lines past `resume_step`; a fresh one moves an old file aside."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step > 0:
            truncate_after(path, resume_step)
        elif path.exists() and path.stat().st_size > 0:
            path.rename(_free_name(path))
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, figures: Mapping[str, Number | None]) -> None:
        """Append one line."""
        self._line(kind, step, {name: _json_number(value) for name, value in figures.items()})

    def note(self, step: int, text: str) -> None:
        """Append a line `{"kind": "note", "step": 3, "text": ...}`."""
        self._line("note", step, {"text": text})

    def _line(self, kind: str, step: int, values: Mapping[str, Number | str | None]) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Scalars `train/loss`, `valid/loss`, ... as TensorBoard events; a resumed run hides what it does again."""

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_missing("--tensorboard-dir", "tensorboard")) from error
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

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(_missing("--wandb-project", "wandb")) from error
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


def truncate_after(path: Path, step: int) -> None:
    """Keep the lines of a JSONL log whose step is at most `step`; a line cut short by a crash goes too.

    The file is replaced as a whole, so a crash here leaves the old or the new one.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if line.endswith("\n") and isinstance(row, dict) and row.get("step", 0) <= step:
            kept.append(line)
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)


def _free_name(path: Path) -> Path:
    """`log.jsonl` -> the first of `log.1.jsonl`, `log.2.jsonl`, ... that does not exist."""
    number = 1
    while (name := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return name


def _json_number(value: Number | None) -> Number | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _missing(option: str, package: str) -> str:
    return f"{option} needs the package {package}: install the extra `log` (pip install 'megacp[log]') or drop the flag"
