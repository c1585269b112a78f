"""The training loop: packs in, steps, lines out, validation, checkpoints, and an orderly end when
asked to stop.

Every decision that all ranks must take alike (stop, save, validate, skip) follows from numbers that
all ranks hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megacp.distributed.collectives import gather_objects
from megacp.distributed.grid import ProcessGrid
from megacp.distributed.heap import trim_heap
from megacp.engine.checks import profiled_steps
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.optim.lr_schedule import learning_rate
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.choose import resolve_auto
from megacp.engine.step.decision import Decision
from megacp.engine.step.rows import PlannedRow
from megacp.engine.step.step import ParallelModel, StepResult
from megacp.engine.timers import EventClock, Pace, Timers
from megacp.training.checkpoint.weights import Weights
from megacp.training.data.blend import PackBlend
from megacp.training.data.loader import PackedLoader, validation_steps
from megacp.training.loop.denominator import RankReport, StepAgreement, agree_on_step
from megacp.training.loop.health import AnomalyError, Health, StepNumbers, damaged_tensors
from megacp.training.loop.images import image_documents, image_loading, without_bad_images
from megacp.training.loop.reporting import (
    blend_figures,
    breakdown,
    open_log,
    opening_lines,
    row_flops,
)
from megacp.training.loop.saving import Saver
from megacp.training.loop.sources import Sources, first_rows, loader_options, whole_run
from megacp.training.loop.state import (
    Resumed,
    drawn_at,
    fresh_state,
    load,
    load_weights,
    saved_boxes,
    starting_point,
)
from megacp.training.loop.stopping import REASONS, StopSignal
from megacp.training.monitor.flops import cuda_peak, peak_bytes
from megacp.training.monitor.log import StepRecord
from megacp.training.monitor.trace import Trace
from megacp.training.start.launch import report_failure
from megacp.training.start.status import FAILED, STOPPED

STEPS_BETWEEN_TRIMS = 10
"""Optimizer steps after which a CPU rank gives free heap back: milliseconds, and without it a small
run grows by MiB a step."""


class Trainer:
    """One rank of a run. `config` is resolved and checked; `weights` are those of --load-hf."""

    def __init__(
        self, config: RunConfig, grid: ProcessGrid, sources: Sources, weights: Weights | None = None
    ) -> None:
        self.stop = StopSignal(config.training.exit_duration)
        self.saver = Saver(config, grid.world)
        try:
            self._begin(config, grid, sources, weights)
        except BaseException:  # the directory is another run's again, and signals the process's
            self.saver.close()
            self.stop.release()
            raise

    def _begin(
        self, config: RunConfig, grid: ProcessGrid, sources: Sources, weights: Weights | None
    ) -> None:
        """Build the model, fill it from where the run starts, and open the log.

        ValueError on all ranks when what was read is not finite on any.
        """
        config, chosen = resolve_auto(config, lambda: first_rows(config, sources))
        self.config, self.grid, self.sources = config, grid, sources
        self.timers = Timers(EventClock(grid.device) if grid.device.type == "cuda" else None)
        start = starting_point(config, grid.world)
        self.model = ParallelModel(config, grid, self.timers.phase, drawn_at(start, weights))
        self.rows = self.model.rows  # how the rows of a step are dealt to ranks
        self.state = fresh_state(config, sources, weights)
        resumed: Resumed | None = None
        if start.path is not None:
            resumed = load(self.model, self.state, config, start)
        elif weights is not None:
            start = dataclasses.replace(start, weights_only=True)
            resumed = load_weights(self.model, weights, self.state)
        if resumed is not None:
            self.state = resumed.state
            if not start.weights_only:
                self.saver.resumed(self.state.step, self.model.optimizer.updates, resumed.path)
            if damaged := damaged_tensors(saved_boxes(self.model), grid.world):
                message = (
                    f"{resumed.path} holds numbers that are not finite: {damaged}; --load an "
                    "older checkpoint"
                )
                raise ValueError(message)
        # of a checkpoint: it may be an older one than was counted with before
        done = self.state.step, self.state.consumed_samples
        last, self.end = whole_run(config.training, len(sources.train), *done)
        self.config = self.model.config = config = with_values(config, {"train_iters": last})
        self.health = Health(self.state.health)
        self.trace: Trace | None = None
        if (profiled := config.log.profile) is not None:
            steps = profiled_steps(profiled)
            self.trace = Trace(config.profile_path, steps, grid.rank, grid.rank == 0, self.timers)
        self.log = open_log(config, grid, self.state.step)
        lines = opening_lines(config, grid, sources, [chosen] if chosen else [], start, resumed)
        for line in (*lines, *self.saver.notes):
            self.log.say(line)
        self.images = image_loading(config, grid, self.rows, sources.decoder)
        self.leads_replica = (
            grid.tp.rank == self.rows.axis.rank == grid.pp.rank == 0
        )  # counts what all of it share
        one = cuda_peak(grid.device, config.training.dtype) if grid.device.type == "cuda" else None
        self.peak_flops = one * grid.world.size if one is not None else None

    def run(self) -> int:
        """Train to the end or until asked to stop; the exit status."""
        training = self.config.training
        save_interval = self.config.checkpoint.save_interval
        consumed = self.state.consumed_samples
        options = dataclasses.replace(loader_options(self.config, self.rows.packs), end=self.end)
        self.pace = Pace()
        try:
            with PackedLoader(
                self.sources.train, options, self.rows.data_rank, consumed, self.images, self._plan
            ) as loader:
                while (step := self.state.step) < training.train_iters:
                    if reason := self.train_step(loader):
                        self._end_trace()
                        self._save(REASONS[reason])
                        self.saver.finish(self.log.say)
                        return STOPPED
                    step += 1
                    last = step == training.train_iters
                    if training.eval_interval and (step % training.eval_interval == 0 or last):
                        self._validate()
                    if save_interval and step % save_interval == 0 and not last:
                        self._save("saved")
            return self._finish()
        except AnomalyError as reason:
            return self._end_at_anomaly(str(reason))
        except Exception as error:
            error.add_note(report_failure(error, f"step {self.state.step + 1}", self.grid.world))
            raise
        finally:
            self.saver.close()
            self.stop.release()
            self.log.close()

    def _finish(self) -> int:
        """Save the last step; a run that never made an update is no finished run."""
        self._end_trace()
        if self.model.optimizer.updates == 0:
            raise AnomalyError(f"none of {self.state.step} steps made an update")
        if skipped := self.health.skipped_in_a_row:
            self.log.note(self.state.step, f"the last {skipped} steps made no update")
        self._save("finished")
        self.saver.finish(self.log.say)
        return 0

    def train_step(self, loader: PackedLoader) -> int:
        """One step, from packs to the log, and 0; a number of REASONS, with nothing done, when some
        rank is to stop.
        """
        step = self.state.step + 1
        if self.trace:
            self.trace.before(step)
            self.timers.detailed = self.trace.running
        with self.timers.measure("step"):
            with self.timers.measure("data"):
                planned: list[PlannedRow] = loader.next_step()
                read = [row.batch for row in planned]
                batches, left_out = self._sound(read, step)
            with self.timers.measure(
                "plan"
            ):  # a batch that lost a document has another mask than the one planned
                pairs = zip(planned, batches, strict=True)
                rows = [row if row.batch is batch else self._plan(batch) for row, batch in pairs]
            with self.timers.phase("agreement"):
                report = self._rank_report(read, rows)
                agreed = agree_on_step(
                    batches, self.grid, report, replica=self.rows.data_rank.index
                )
            self.saver.settle(agreed.report.save_state, self.log.say)
            if agreed.report.stop_reason:
                return agreed.report.stop_reason
            numbers = StepNumbers(
                step, math.nan, 0.0, agreed.weight, agreed.report.image_documents, left_out
            )

            def check(loss: float, norm: float) -> Decision:
                return self.health.check(dataclasses.replace(numbers, loss=loss, grad_norm=norm))

            if agreed.weight:
                result = self.model.train(rows, step, agreed.denominator, agreed.tokens, check)
            else:  # no token counts: nothing is computed, nothing changes
                lr = learning_rate(step, self.config.training)
                result = StepResult(math.nan, 0.0, lr, check(math.nan, 0.0))
        before = self.state.consumed_samples
        self.state = dataclasses.replace(
            self.state, step=step, consumed_samples=loader.consumed_samples
        )
        self._report(result, agreed, before)
        if self.trace and self.trace.is_over(step):
            self._end_trace()
        if self.grid.device.type == "cpu" and step % STEPS_BETWEEN_TRIMS == 0:
            trim_heap()
        return 0

    def _plan(self, batch: PackedBatch) -> PlannedRow:
        """What the loader's threads make of a microbatch ahead of its step."""
        row = self.model.plan(batch)
        return (
            dataclasses.replace(row, flops=row_flops(row, self.config))
            if self.leads_replica
            else row
        )

    def _rank_report(self, read: Sequence[PackedBatch], rows: Sequence[PlannedRow]) -> RankReport:
        counts_images = self.leads_replica and self.config.data.on_bad_image == "skip"
        return RankReport(
            self.stop.reason,
            sum(row.flops for row in rows),
            peak_bytes(self.grid.device.type),
            self.timers.seconds("data") + self.timers.seconds("plan"),
            self.saver.save_state,
            image_documents(read) if counts_images else 0,
        )

    def _sound(self, batches: list[PackedBatch], step: int) -> tuple[list[PackedBatch], int]:
        """What was read without the documents of which some rank could not decode an image, and
        their number.
        """
        if self.images is None or self.images.on_bad_image != "skip":
            return batches, 0
        batches, reasons = without_bad_images(batches, self.grid, self.rows.data_rank.index)
        for reason in reasons:
            self.log.note(step, f"left out a document: {reason}")
        return batches, len(reasons)

    def _report(self, result: StepResult, agreed: StepAgreement, before: int) -> None:
        """All that is said of a step that began after `before` samples; AnomalyError when the run
        ends with it.
        """
        step, consumed = self.state.step, self.state.consumed_samples
        decision = result.decision
        taken = self.timers.take()  # seconds by phase; the timers begin again
        for line in self.model.backend.warnings():
            self.log.say(line)
        if decision.findings:
            what = "; ".join(decision.findings) + (
                "" if decision.update else ", all ranks skipped the update"
            )
            self.log.note(step, what + (f"; {result.suspects}" if result.suspects else ""))
        self.saver.keeps_all = (
            not decision.update
        )  # an older checkpoint may be what the run needs next
        seconds = taken["step"]
        left = self.config.training.train_iters - step  # steps to come
        self.log.step(
            StepRecord(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_per_second=agreed.tokens / seconds,
                mfu=agreed.report.flops / (seconds * self.peak_flops) if self.peak_flops else None,
                peak_memory=agreed.report.peak_bytes,
                data_wait=agreed.report.data_wait,
                seconds=seconds,
                consumed_samples=consumed,
                epoch=consumed / len(self.sources.train),
                seconds_left=self.pace.left(left),
                experts=result.experts,
            )
        )
        if isinstance(self.sources.train, PackBlend):
            self.log.figures(
                "blend", step, *blend_figures(self.sources.train, before, consumed, left == 0)
            )
        if self.timers.detailed:
            found = breakdown(taken, self.grid.world, self.grid.device)
            self.log.figures("timing", step, found.line(step), found.figures())
        if decision.end:
            raise AnomalyError(decision.end)

    def _validate(self) -> None:
        assert self.sources.valid is not None
        options = loader_options(self.config, self.rows.packs)
        count = self.config.training.eval_iters
        total, weight = 0.0, 0.0
        for read in validation_steps(
            self.sources.valid, options, self.rows.data_rank, count, self.images
        ):
            batches, _ = self._sound(read, self.state.step)
            agreed = agree_on_step(batches, self.grid, replica=self.rows.data_rank.index)
            total += self.model.evaluate(batches, agreed.denominator) * agreed.denominator
            weight += agreed.weight
        self.timers.take()  # its phases belong to no training step
        if weight == 0.0:
            self.log.say(f"step {self.state.step}: no token of --valid-data-path has a loss weight")
            return
        self.log.validation(self.state.step, total / weight)

    def _save(self, reason: str) -> None:
        state = dataclasses.replace(self.state, health=self.health.state())
        self.saver.save(self.model, state, self.log.say, reason)

    def _end_at_anomaly(self, reason: str) -> int:
        """Commit what was pending, say why the run ends and from where to go on; the exit
        status.
        """
        self._end_trace()
        self.saver.keeps_all = True
        self.saver.finish(self.log.say)
        newest = self.saver.newest
        way = (
            f"the newest checkpoint is {newest}" if newest else "there is no checkpoint of this run"
        )
        self.log.fail(self.state.step, f"{reason}. Nothing was saved after it; {way}")
        return FAILED

    def _end_trace(self) -> None:
        """Write the trace where one was begun, and say where it is."""
        if self.trace is None or not self.trace.running:
            return
        problems = [
            text
            for text in gather_objects(self.trace.finish(self.state.step), self.grid.world)
            if text
        ]
        if not problems:
            self.log.say(f"trace up to step {self.state.step}: {self.trace.folder}")
        for problem in problems:
            self.log.note(self.state.step, f"the trace could not be written: {problem}")
