"""The training loop: packs in, steps, lines out, validation, checkpoints, and an orderly end when asked to stop.

Key property: every decision that all ranks must take alike (stop, save, validate) follows from numbers that all ranks
hold. Rejected: callbacks and hooks, whose order a reader cannot see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megacp.core.checkpoint.weights import Weights
from megacp.core.config.checks.health import profiled_ranks, profiled_steps
from megacp.core.config.checks.idle import idle_notes
from megacp.core.config.run import RunConfig
from megacp.core.context_parallel.choose import resolve_auto
from megacp.core.data.batch import PackedBatch
from megacp.core.data.blend import PackBlend
from megacp.core.data.loader import PackedLoader, validation_steps
from megacp.core.distributed.clock import clock_of
from megacp.core.distributed.collectives import gather_objects
from megacp.core.distributed.grid import ProcessGrid
from megacp.core.distributed.launch import trim_heap
from megacp.core.distributed.supervision.failure_report import report_failure
from megacp.core.monitor.flops import utilisation
from megacp.core.monitor.log import StepRecord
from megacp.core.monitor.memory import peak_bytes
from megacp.core.monitor.pace import Pace
from megacp.core.monitor.timers import Timers
from megacp.core.monitor.trace import Trace
from megacp.core.training.health import Health, StepNumbers, UnwellError, Verdict, damaged_tensors, named_packs
from megacp.core.training.images import image_documents, image_loading, shard_strategies, without_bad_images
from megacp.core.training.loss import RankReport, StepAgreement, agree
from megacp.core.training.reporting import (
    blend_figures,
    blend_heading,
    breakdown,
    heading,
    open_log,
    peak_flops,
    row_flops,
)
from megacp.core.training.rows import PlannedRow
from megacp.core.training.saving import Saver
from megacp.core.training.sources import Sources, first_rows, loader_options
from megacp.core.training.state import Progress, Resumed, Start, load, load_weights, saved_boxes, starting_point
from megacp.core.training.step import ParallelModel, StepResult
from megacp.core.training.stopping import FAILED, REASONS, STOPPED, StopSignal

STEPS_BETWEEN_TRIMS = 10
"""Optimizer steps after which a CPU rank gives free heap back: milliseconds, and without it a small run grows by MiB a
step."""


class Trainer:
    """One rank of a run. `config` is resolved and checked; `weights` are those of --load-hf."""

    def __init__(self, config: RunConfig, grid: ProcessGrid, sources: Sources, weights: Weights | None = None) -> None:
        self.stop = StopSignal(config.training.exit_duration)
        self.saver = Saver(config, grid.world)
        try:
            self._prepare(config, grid, sources, weights)
        except BaseException:
            self.saver.close()
            self.stop.release()
            raise

    def _prepare(self, config: RunConfig, grid: ProcessGrid, sources: Sources, weights: Weights | None) -> None:
        config, self.chosen = resolve_auto(config, lambda: first_rows(config, sources))
        self.config, self.grid, self.sources = config, grid, sources
        self.timers = Timers(clock_of(grid.device))
        self.model = ParallelModel(config, grid, self.timers.phase)
        self.progress = Progress(
            data_fingerprint=sources.data_fingerprint,
            seed=config.training.seed,
            tokenizer_sha256=sources.tokenizer_sha256,
            image_rules=sources.image_rules,
            document_start=sources.document_start,
            document_end=sources.document_end,
            chat_template=sources.chat_template,
        )
        start = starting_point(config, grid.world)
        resumed = load(self.model, self.progress, config, start) if start.path is not None else None
        if resumed is None and weights is not None:
            start = dataclasses.replace(start, weights_only=True)
            resumed = load_weights(self.model, weights, self.progress)
        if resumed is not None and not start.weights_only:
            self.progress = resumed.progress
            self.saver.resumed(self.progress.step, self.model.optimizer.updates, resumed.path)
        if resumed is not None:
            self._refuse_damaged(resumed)
        self.health = Health(config.health, self.progress.health)
        self.skipped_packs: frozenset[int] = frozenset()
        self.fault: Exception | None = None  # of the plans of the step under way
        self.first_step = self.progress.step + 1
        self.trace = self._trace()
        self.log = open_log(config, grid, self.progress.step, resumed.path if resumed is not None else None)
        for line in self._opening_lines(start, resumed):
            self.log.say(line)
        self.rows = self.model.rows
        self.images = image_loading(config, grid, self.rows, sources.decoder)
        self.known_strategies: set[str] = set()
        self.leads_replica = grid.tp.rank == self.rows.axis.rank == grid.pp.rank == 0
        self.counts_images = self.leads_replica and config.data.on_bad_image == "skip"
        self.peak_flops = peak_flops(config, grid)

    def run(self) -> int:
        """Train to the end or until asked to stop; the exit status."""
        try:
            return self._run()
        except UnwellError as reason:
            return self._end_unwell(str(reason))
        except Exception as error:
            error.add_note(report_failure(error, f"step {self.progress.step + 1}", self.grid.world))
            raise
        finally:
            self.saver.close()
            self.stop.release()
            self.log.close()

    def _run(self) -> int:
        training, checkpoint = self.config.training, self.config.checkpoint
        options, consumed = loader_options(self.config, self.rows.packs), self.progress.consumed_samples
        self.pace = Pace()
        with PackedLoader(
            self.sources.train, options, self.rows.data_rank, consumed, self.images, self._plan
        ) as loader:
            while self.progress.step < training.train_iters:
                if reason := self._train_step(loader):
                    return self._stop(reason)
                step = self.progress.step
                if training.eval_interval and (step % training.eval_interval == 0 or step == training.train_iters):
                    self._validate()
                if checkpoint.save_interval and step % checkpoint.save_interval == 0 and step < training.train_iters:
                    self._save("saved")
        self._end_trace()
        self._tell_last_steps()
        self._save("finished")
        self.saver.finish(self.log.say)
        return 0

    def _stop(self, reason: int) -> int:
        """Save and end in order. A fault of the step that was left is raised then: a run that was to fail, fails."""
        try:
            self._end_trace()
            self._save(REASONS[reason])
            self.saver.finish(self.log.say)
            return STOPPED
        finally:
            if self.fault is not None:
                raise self.fault

    def _tell_last_steps(self) -> None:
        """A run that ends with skipped steps says so; one that never made an update is no finished run."""
        if self.model.optimizer.updates == 0:
            raise UnwellError(f"none of {self.progress.step} steps made an update{self._of_skipped()}")
        if skipped := self.health.skipped_in_a_row:
            self.log.note(self.progress.step, f"the last {skipped} steps made no update{self._of_skipped()}")

    def _of_skipped(self) -> str:
        return f"; they had {named_packs(self.skipped_packs)}" if self.skipped_packs else ""

    def _end_unwell(self, reason: str) -> int:
        """Commit what was pending, say why the run ends and from where to go on; the exit status."""
        self._end_trace()
        self.saver.keeps_all = True
        self.saver.finish(self.log.say)
        newest = self.saver.newest
        way = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint of this run"
        self.log.fail(self.progress.step, f"{reason}. Nothing was saved after it; {way}")
        return FAILED

    def _plan(self, batch: PackedBatch) -> PlannedRow:
        """What the loader's threads make of a microbatch ahead of its step."""
        row = self.model.plan(batch)
        return dataclasses.replace(row, flops=row_flops(row, self.config)) if self.leads_replica else row

    def _planned(
        self, loader: PackedLoader[PlannedRow], batches: Sequence[PackedBatch]
    ) -> tuple[list[PlannedRow], Exception | None]:
        """The plans of a step's batches, and what went wrong: a run that is asked to stop still saves in order."""
        try:
            pairs = zip(loader.prepared(), batches, strict=True)  # a batch that lost a document has another mask
            return [row if row.batch is batch else self._plan(batch) for row, batch in pairs], None
        except Exception as error:
            return [], error

    def _train_step(self, loader: PackedLoader[PlannedRow]) -> int:
        """One step, and 0; a number of REASONS, with nothing of the step done, when some rank is to stop."""
        step, interval = self.progress.step + 1, self.config.log.timing_log_interval
        self.timers.detailed = interval > 0 and step % interval == 0
        if self.trace:
            self.trace.before(step)
        with self.timers.measure("step"):
            with self.timers.measure("data"):
                read = loader.next_step()
                documents = image_documents(read) if self.counts_images else 0
                batches, left_out = self._sound(read, step)
            with self.timers.measure("plan"):
                rows, self.fault = self._planned(loader, batches)
            with self.timers.phase("agreement"):
                agreed = agree(
                    batches, self.grid, self._rank_report(rows, documents), replica=self.rows.data_rank.index
                )
            self.saver.settle(agreed.report.save_state, self.log.say)
            if agreed.report.stop_reason:
                return agreed.report.stop_reason
            if self.fault is not None:
                raise self.fault
            seen = StepNumbers(step, 0.0, 0.0, agreed.weight, agreed.report.image_documents, left_out)
            result = self._update(rows, agreed.denominator, seen)
        before = self.progress.consumed_samples
        self.progress = dataclasses.replace(self.progress, step=step, consumed_samples=loader.consumed_samples)
        taken = self.timers.take()
        self._report(result, agreed, taken["step"])
        if isinstance(self.sources.train, PackBlend):
            is_last = step == self.config.training.train_iters
            self.log.figures(
                "blend", step, *blend_figures(self.sources.train, before, loader.consumed_samples, is_last)
            )
        if self.timers.detailed:
            found = breakdown(taken, self.grid.world, self.grid.device)
            self.log.figures("timing", step, found.line(step), found.figures())
        if self.trace and self.trace.is_over(step):
            self._end_trace()
        if self.grid.device.type == "cpu" and step % STEPS_BETWEEN_TRIMS == 0:
            trim_heap()
        return 0

    def _rank_report(self, rows: list[PlannedRow], documents: int) -> RankReport:
        return RankReport(
            self.stop.reason,
            sum(row.flops for row in rows),
            peak_bytes(self.grid.device.type),
            self.timers.seconds("data") + self.timers.seconds("plan"),
            self.saver.save_state,
            documents,
        )

    def _update(self, rows: list[PlannedRow], denominator: float, seen: StepNumbers) -> StepResult:
        """Forward, backward and, if the step's numbers are well, the update."""

        def judge(loss: float, grad_norm: float) -> Verdict:
            return self.health.judge(dataclasses.replace(seen, loss=loss, grad_norm=grad_norm))

        if seen.weight == 0.0:
            return self.model.leave_out(seen.step, judge)
        return self.model.train(rows, seen.step, denominator, judge)

    def _sound(self, batches: list[PackedBatch], step: int) -> tuple[list[PackedBatch], int]:
        """What was read without the documents of which some rank could not decode an image, and their number.

        Also tells how images are dealt.
        """
        for strategy in sorted(shard_strategies(batches) - self.known_strategies):
            self.known_strategies.add(strategy)
            self.log.say(f"image shards of the context-parallel ranks: {strategy}")
        if self.images is None or self.images.on_bad_image != "skip":
            return batches, 0
        batches, reasons = without_bad_images(batches, self.grid, self.rows.data_rank.index)
        for reason in reasons:
            self.log.note(step, f"left out a document: {reason}")
        return batches, len(reasons)

    def _report(self, result: StepResult, agreed: StepAgreement, seconds: float) -> None:
        """Log a step; UnwellError when the run ends with it."""
        step, verdict = self.progress.step, result.verdict
        for line in self.model.backend.warnings():
            self.log.say(line)
        if verdict.findings:
            what = "; ".join(verdict.findings) + ("" if verdict.update else ", all ranks skipped the update")
            self.log.note(step, what + (f"; {result.suspects.sentence}" if result.suspects else ""))
        packs = result.suspects.packs if result.suspects else frozenset()
        self.skipped_packs = frozenset() if verdict.update else self.skipped_packs | packs
        self.saver.keeps_all = not verdict.update
        self.log.step(
            StepRecord(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_per_second=agreed.tokens / seconds,
                mfu=utilisation(agreed.report.flops, seconds, self.peak_flops),
                peak_memory=agreed.report.peak_bytes,
                data_wait=agreed.report.data_wait,
                seconds=seconds,
                consumed_samples=self.progress.consumed_samples,
                epoch=self.progress.consumed_samples / len(self.sources.train),
                seconds_left=self.pace.left(self.config.training.train_iters - step),
            )
        )
        if verdict.end:
            raise UnwellError(f"{verdict.end}{self._of_skipped()}")

    def _validate(self) -> None:
        assert self.sources.valid is not None
        options = loader_options(self.config, self.rows.packs)
        count = self.config.training.eval_iters
        steps = validation_steps(self.sources.valid, options, self.rows.data_rank, count, self.images)
        total, weight = 0.0, 0.0
        for read in steps:
            batches, _ = self._sound(read, self.progress.step)
            agreed = agree(batches, self.grid, replica=self.rows.data_rank.index)
            total += self.model.evaluate(batches, agreed.denominator) * agreed.denominator
            weight += agreed.weight
        self.timers.take()  # its phases belong to no training step
        if weight == 0.0:
            self.log.say(f"step {self.progress.step}: no token of --valid-data-path has a loss weight")
            return
        self.log.validation(self.progress.step, total / weight)

    def _save(self, reason: str) -> None:
        progress = dataclasses.replace(self.progress, health=self.health.state())
        self.saver.save(self.model, progress, self.log.say, reason)

    def _refuse_damaged(self, resumed: Resumed) -> None:
        """ValueError on all ranks when what was read is not finite on any."""
        if damaged := damaged_tensors(saved_boxes(self.model), self.grid.world):
            raise ValueError(f"{resumed.path} holds numbers that are not finite: {damaged}; --load an older checkpoint")

    def _trace(self) -> Trace | None:
        log, world, rank = self.config.log, self.grid.world, self.grid.rank
        if log.profile is None:
            return None
        mine = rank in profiled_ranks(log.profile_ranks, world.size)
        return Trace(self.config.profile_path, profiled_steps(log.profile), rank, mine, self.timers)

    def _end_trace(self) -> None:
        """Write the trace where one was begun, and say where it is."""
        if self.trace is None or not self.trace.running:
            return
        problems = [text for text in gather_objects(self.trace.finish(self.progress.step), self.grid.world) if text]
        if not problems:
            self.log.say(f"trace up to step {self.progress.step}: {self.trace.folder}")
        for problem in problems:
            self.log.note(self.progress.step, f"the trace could not be written: {problem}")

    def _opening_lines(self, start: Start, resumed: Resumed | None) -> list[str]:
        """What runs where, what it starts from, and what is not as it was."""
        lines = [heading(self.config, self.grid), *([self.chosen] if self.chosen else ()), *self.saver.notes]
        lines += [*blend_heading(self.sources.train), *idle_notes(self.config)]
        lines += [start.note] if start.note else []
        if resumed is None and self.config.model.lora_rank:
            rank = self.config.model.lora_rank
            lines.append(f"--lora-rank {rank}: no --load-hf and no --load, so the frozen model is a random one")
        if resumed is not None:
            resumes = f"resumed from {resumed.path} after step {self.progress.step}"
            fresh = f"weights of {resumed.path}; this run starts at step 0 with a fresh optimizer"
            lines.append(fresh if start.weights_only else resumes)
            lines += [f"changed since the checkpoint: {change}" for change in resumed.changed]
            if self.config.training.train_iters <= (step := self.progress.step):
                last = self.config.training.train_iters
                lines.append(f"--train-iters {last} is not above step {step} of the checkpoint: nothing is trained")
        return lines
