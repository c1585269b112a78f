"""Progress line and final summary of a build.

Progress goes to stderr: a terminal shows one line that is updated in place; other streams get a
new line every 10 seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

from megacp.prepare.packs.unit import UnitResult
from megacp.storage.wording import counted
from megacp.training.data.manifest import DatasetManifest, answers_told, thoughts_told

# Seconds between two lines if the stream is not a terminal.
_EVERY_SECONDS = 10.0


class BuildProgress:
    """Count finished documents, input bytes and tokens, and print the progress."""

    def __init__(self, stream: TextIO, total_bytes: int, resumed_bytes: int = 0) -> None:
        """Start the clock.

        `total_bytes` is the size of the input; an earlier run has processed `resumed_bytes` of it.
        """
        self._stream = stream
        self._total = total_bytes
        self._resumed = resumed_bytes
        self.bytes = self._documents = self._tokens = 0
        self._terminal = stream.isatty()
        self.started = self._shown = time.monotonic()

    def add(self, result: UnitResult, size: int) -> None:
        """Add a finished unit with `size` bytes of input, and print the progress if it is due."""
        self.bytes += size
        self._documents += result.documents
        if result.entry is not None:
            self._tokens += result.entry.num_tokens
        now = time.monotonic()
        if self._terminal or now - self._shown >= _EVERY_SECONDS:
            self._shown = now
            line = self.line()
            if self._terminal:
                line = f"\r\x1b[K{line}"  # back to the first column, and clear the old line
            print(line, file=self._stream, flush=True)

    def finish(self) -> None:
        """End the progress line of a terminal."""
        if self._terminal and self._documents:
            print(file=self._stream)

    def line(self) -> str:
        """Return the progress as one line of text."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        done = self._resumed + self.bytes
        # Only this run's bytes count for the speed: resumed bytes took no time.
        seconds_left = (self._total - done) * seconds / max(1, self.bytes)
        left = timedelta(seconds=round(seconds_left))
        return (
            f"{done / max(1, self._total):4.0%}  {self._documents / seconds:,.0f} docs/s  "
            f"{self.bytes / seconds / 1e6:.3g} MB/s  {self._tokens / seconds:,.0f} tokens/s  "
            f"{left} left"
        )


@dataclass(frozen=True)
class BuildSummary:
    """Result of a build."""

    manifest: DatasetManifest | None
    """Manifest of the dataset; None after a part of a build."""
    results: tuple[UnitResult, ...]
    """Results of all units, or of the units of the part."""
    read_bytes: int
    """Bytes of input that this run has read."""
    seconds: float
    units_resumed: int
    """Number of units that an earlier run finished."""
    tokenizer_engine: str
    form_named: bool = False
    """Whether a flag or the tokenizer's folder determines the form of conversations."""

    @property
    def already_complete(self) -> bool:
        """Whether an earlier run had finished the dataset."""
        return self.manifest is not None and self.units_resumed == len(self.results)

    @property
    def documents(self) -> int:
        """Number of documents in the dataset."""
        return sum(result.documents for result in self.results)

    @property
    def unlearned(self) -> int:
        """Number of documents without learned tokens."""
        return sum(result.unlearned for result in self.results)

    @property
    def learned_tokens(self) -> int:
        """Number of tokens that are predicted with a loss weight above 0."""
        return sum(result.learned_tokens for result in self.results)

    @property
    def sentence(self) -> str:
        """Printed summary: contents of the dataset, speed and resumed shards."""
        manifest = self.manifest
        shards = counted(len(self.results), "shard")
        verb = "was" if 1 in (self.units_resumed, len(self.results)) else "were"
        resumed = f"{self.units_resumed} of {shards} {verb} already built"
        if manifest is None:
            return (
                f"{counted(self.documents, 'document')} ({resumed}); {self.seconds:.1f} s; "
                "run `finish` to write the dataset"
            )
        if self.already_complete:
            return f"already complete: {counted(manifest.num_packs, 'pack')}; nothing to do"

        # Each of these parts is empty if it does not apply.
        nothing = ""
        if self.unlearned:
            nothing = f" ({self.unlearned:,} without learned tokens)"
        there = f" ({resumed})" if self.units_resumed else ""

        # The maxima avoid divisions by zero.
        learned = self.learned_tokens / max(1, manifest.num_tokens)
        megabytes_per_second = self.read_bytes / max(self.seconds, 1e-9) / 1e6
        line = (
            f"{counted(self.documents, 'document')}{nothing}, "
            f"{counted(manifest.num_tokens, 'token')} ({learned:.1%} learned) in "
            f"{counted(manifest.num_packs, 'pack')} of {manifest.seq_length:,} "
            f"({manifest.packing_efficiency:.2%} full), "
        )
        line += (
            f"{manifest.num_rejected:,} rejected; {self.seconds:.1f} s, "
            f"{megabytes_per_second:.3g} MB/s, "
            f"tokenizer {manifest.tokenizer.kind} ({self.tokenizer_engine}){there}"
        )
        return "\n".join([line, *self._about_answers(manifest)])

    def _about_answers(self, manifest: DatasetManifest) -> list[str]:
        """Return lines about the form of the answers and about unusual answers in templates."""
        lines = []
        if self.answers:
            lines.append(self.answers)
        in_context = sum(result.in_context for result in self.results)
        if in_context:
            lines.append(
                f"{counted(in_context, 'answer')} not learned, only used as context: the chat "
                "template leaves out the thought"
            )
        told = thoughts_told(manifest.chat_template)
        if told:
            lines.append(told)
        no_end = sum(result.no_end for result in self.results)
        # Such a dataset is valid, so this is a warning and not an error.
        if no_end:
            verb = "is" if no_end == 1 else "are"
            lines.append(
                f"{counted(no_end, 'answer')} {verb} learned without an end token, so a model may "
                "not stop after them: let the chat template write a special token, such as the "
                "tokenizer's eos_token, after each answer (inside its generation block, if it has "
                "blocks)"
            )
        return lines

    @property
    def answers(self) -> str:
        """Line about the form of the answers and how to prompt the model; empty without answers."""
        forms: dict[str, int] = {}
        if self.manifest is not None:
            forms = self.manifest.answer_forms or {}
        told = answers_told(forms)
        # A user who did not choose the form should see why it was used.
        why = "" if self.form_named else ", as the tokenizer's folder has no chat template"
        if "messages" in forms:
            told += (
                f"{why}. tools/generate.py --prompt and --chat use this form; "
                "tools/convert_checkpoint.py --chat-template messages adds a template for it to an "
                "export"
            )
        elif "alpaca" in forms:
            told += (
                f"{why}. tools/generate.py --prompt uses this form; an export has no template for "
                "it"
            )
        return told
