"""The progress of a build on stderr, one line that changes on a terminal, a line now and then
elsewhere; its sum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

from megacp.engine.config.training import TrainingConfig
from megacp.prepare.packs.unit import UnitResult
from megacp.storage.wording import counted
from megacp.training.data.manifest import DatasetManifest, answers_told, thoughts_told

_BATCH = TrainingConfig.global_batch_size
_EVERY_SECONDS = 10.0
"""Seconds between two lines when the stream is no terminal."""


class BuildProgress:
    """Documents, input bytes and tokens that are done."""

    def __init__(self, stream: TextIO, total_bytes: int, resumed_bytes: int = 0) -> None:
        """`total_bytes`: all of the input; `resumed_bytes`: those that an earlier run has done."""
        self._stream, self._total, self._resumed = stream, total_bytes, resumed_bytes
        self.bytes = self._documents = self._tokens = 0
        self._terminal = stream.isatty()
        self.started = self._shown = time.monotonic()

    def add(self, result: UnitResult, size: int) -> None:
        """One more unit, of `size` bytes of input, is done."""
        self.bytes += size
        self._documents += result.documents
        self._tokens += result.entry.num_tokens if result.entry is not None else 0
        now = time.monotonic()
        if self._terminal or now - self._shown >= _EVERY_SECONDS:
            self._shown = now
            print(
                f"\r\x1b[K{self.line()}" if self._terminal else self.line(),
                file=self._stream,
                flush=True,
            )

    def finish(self) -> None:
        """Leave the line of a terminal."""
        if self._terminal and self._documents:
            print(file=self._stream)

    def line(self) -> str:
        """The progress in one line."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        done = self._resumed + self.bytes
        left = timedelta(seconds=round((self._total - done) * seconds / max(1, self.bytes)))
        return (
            f"{done / max(1, self._total):4.0%}  {self._documents / seconds:,.0f} docs/s  "
            f"{self.bytes / seconds / 1e6:.3g} MB/s  {self._tokens / seconds:,.0f} tokens/s  "
            f"{left} left"
        )


@dataclass(frozen=True)
class BuildSummary:
    """What a build did."""

    manifest: DatasetManifest | None
    """None for a part of a build."""
    results: tuple[UnitResult, ...]
    """Results of all units, or of those of the part."""
    read_bytes: int
    """Bytes of the input that this run has read."""
    seconds: float
    units_resumed: int
    """Finished by an earlier run."""
    tokenizer_engine: str
    is_valid: bool = False
    """Whether it is for validation."""
    form_named: bool = False
    """Whether a flag or the tokenizer's folder says in which form conversations are written."""

    @property
    def already_complete(self) -> bool:
        """Whether there was nothing to do."""
        return self.manifest is not None and self.units_resumed == len(self.results)

    @property
    def documents(self) -> int:
        """Documents in the dataset."""
        return sum(result.documents for result in self.results)

    @property
    def unlearned(self) -> int:
        """Documents of which nothing is learned."""
        return sum(result.unlearned for result in self.results)

    @property
    def learned_tokens(self) -> int:
        """Tokens that some token before them predicts with a loss weight."""
        return sum(result.learned_tokens for result in self.results)

    @property
    def sentence(self) -> str:
        """What was made, how fast, and what was there before."""
        manifest, there = (
            self.manifest,
            f"{self.units_resumed} of {counted(len(self.results), 'shard')} were there",
        )
        if manifest is None:
            return (
                f"{counted(self.documents, 'document')} ({there}); {self.seconds:.1f} s; "
                "`finish` makes the dataset"
            )
        if self.already_complete:
            return f"already complete: {counted(manifest.num_packs, 'pack')}; nothing to do"
        more = "".join(f"\n{line}" for line in self._about_answers(manifest))
        steps = (
            f"; {counted(-(-manifest.num_packs // _BATCH), 'step')} of an epoch at "
            f"--global-batch-size {_BATCH}"
        )
        learned = self.learned_tokens / max(1, manifest.num_tokens)
        nothing = f" ({self.unlearned:,} {'teaches' if self.unlearned == 1 else 'teach'} nothing)"
        return (
            f"{counted(self.documents, 'document')}{nothing if self.unlearned else ''}, "
            f"{counted(manifest.num_tokens, 'token')} ({learned:.1%} learned) in "
            f"{counted(manifest.num_packs, 'pack')} of {manifest.seq_length:,} "
            f"({manifest.packing_efficiency:.2%} full"
            f"{'' if self.is_valid else steps}), "
            f"{manifest.num_rejected:,} rejected; {self.seconds:.1f} s, "
            f"{self.read_bytes / max(self.seconds, 1e-9) / 1e6:.3g} MB/s, "
            f"tokenizer {manifest.tokenizer.kind} ({self.tokenizer_engine})"
            f"{f' ({there})' if self.units_resumed else ''}{more}"
        )

    def _about_answers(self, manifest: DatasetManifest) -> list[str]:
        """Lines about answers: their form, and what is not as usual where a chat template wrote
        them.
        """
        lines = [self.answers] if self.answers else []
        in_context = sum(result.in_context for result in self.results)
        if in_context:
            lines.append(
                f"{counted(in_context, 'answer')} not learned, but context: the chat template "
                "leaves out the thought"
            )
        told = thoughts_told(manifest.chat_template)
        if told:
            lines.append(told)
        no_end = sum(result.no_end for result in self.results)
        if no_end:
            lines.append(
                f"{counted(no_end, 'answer')} {'is' if no_end == 1 else 'are'} learned without an "
                "end, so a model may not stop after them: let the chat template write a special "
                "token after each answer (inside its generation block, if it has blocks), such as "
                "the tokenizer's eos_token"
            )
        return lines

    @property
    def answers(self) -> str:
        """The form in which answers are learned, and how a model that learned them is asked; empty
        without answers.
        """
        forms = (self.manifest and self.manifest.answer_forms) or {}
        told = answers_told(forms)
        why = "" if self.form_named else ", as the tokenizer's folder has no chat template"
        if "messages" in forms:
            told += (
                f"{why}. tools/generate.py --prompt and --chat ask in it; "
                "tools/convert_checkpoint.py --chat-template "
                "messages adds a template of it to an export"
            )
        elif "alpaca" in forms:
            told += f"{why}. tools/generate.py --prompt asks in it; an export has no template of it"
        return told
