"""Training loop: read packs, run steps, log, validate, save checkpoints and stop cleanly.

All ranks must agree on every decision to stop, save, validate or skip a step. Therefore, each
decision depends only on numbers that are equal on all ranks.
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
"""Number of steps between calls that return free heap memory on a CPU rank. A call takes
milliseconds; without it, a small run grows by several MiB per step."""


class Trainer:
    """One rank of a run. `config` has been checked; `weights` come from --load-hf."""

    def __init__(
        self, config: RunConfig, grid: ProcessGrid, sources: Sources, weights: Weights | None = None
    ) -> None:
        self.stop = StopSignal(config.training.exit_duration)
        self.saver = Saver(config, grid.world)
        try:
            self._begin(config, grid, sources, weights)
        except BaseException:  # release the lock of --save and restore the signal handlers
            self.saver.close()
            self.stop.release()
            raise

    def _begin(
        self, config: RunConfig, grid: ProcessGrid, sources: Sources, weights: Weights | None
    ) -> None:
        """Build the model, load its initial weights and state, and open the log.

        Raise ValueError on all ranks if any rank has loaded values that are not finite.
        """
        # `auto` values depend on the first rows, so they are resolved before the model is built
        config, chosen = resolve_auto(config, lambda: first_rows(config, sources))
        self.config, self.grid, self.sources = config, grid, sources
        clock = EventClock(grid.device) if grid.device.type == "cuda" else None
        self.timers = Timers(clock)
        start = starting_point(config, grid.world)
        self.model = ParallelModel(config, grid, self.timers.phase, drawn_at(start, weights))
        self.rows = self.model.rows  # distributes the rows of a step to ranks
        self.state = fresh_state(config, sources, weights)
        # three kinds of start: a checkpoint, the weights of --load-hf, or random weights
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
            damaged = damaged_tensors(saved_boxes(self.model), grid.world)
            if damaged:
                message = (
                    f"{resumed.path} contains values that are not finite: {damaged}; use --load "
                    "with an earlier checkpoint"
                )
                raise ValueError(message)
        # Recompute the length of the run from the loaded progress. The flags were resolved earlier,
        # possibly with a newer checkpoint than the loaded one.
        done = self.state.step, self.state.consumed_samples
        last, self.end = whole_run(config.training, len(sources.train), *done)
        self.config = self.model.config = config = with_values(config, {"train_iters": last})
        self.health = Health(self.state.health)
        self.trace: Trace | None = None
        profiled = config.log.profile
        if profiled is not None:
            steps = profiled_steps(profiled)
            self.trace = Trace(config.profile_path, steps, grid.rank, grid.rank == 0, self.timers)
        # open the log only now, because it needs the loaded step and the resolved config
        self.log = open_log(config, grid, self.state.step)
        chosen_lines = [chosen] if chosen else []
        lines = opening_lines(config, grid, sources, chosen_lines, start, resumed)
        for line in (*lines, *self.saver.notes):
            self.log.say(line)
        self.images = image_loading(config, grid, self.rows, sources.decoder)
        # whether this rank reports the numbers that all ranks of its replica share
        self.leads_replica = grid.tp.rank == self.rows.axis.rank == grid.pp.rank == 0
        self.peak_flops: float | None = None
        if grid.device.type == "cuda":
            peak_of_device = cuda_peak(grid.device, config.training.dtype)
            if peak_of_device is not None:
                self.peak_flops = peak_of_device * grid.world.size

    def run(self) -> int:
        """Train until the last step or a request to stop; return the exit status."""
        training = self.config.training
        save_interval = self.config.checkpoint.save_interval
        consumed = self.state.consumed_samples
        # --train-epochs may end in the middle of a step: the loader pads the last one
        options = dataclasses.replace(loader_options(self.config, self.rows.packs), end=self.end)
        self.pace = Pace()  # estimates the remaining time, and starts after everything is loaded
        try:
            with PackedLoader(
                self.sources.train, options, self.rows.data_rank, consumed, self.images, self._plan
            ) as loader:
                while (step := self.state.step) < training.train_iters:
                    # all ranks have the same reason to stop, and the step has not begun training
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
            # report all ranks' reasons, because another rank's failure may have caused this error
            error.add_note(report_failure(error, f"step {self.state.step + 1}", self.grid.world))
            raise
        finally:
            self.saver.close()
            self.stop.release()
            self.log.close()

    def _finish(self) -> int:
        """Save the last step, and return the exit status.

        Raise AnomalyError if the run has never made an update.
        """
        self._end_trace()
        if self.model.optimizer.updates == 0:
            raise AnomalyError(f"none of the {self.state.step} steps made an update")
        if skipped := self.health.skipped_in_a_row:
            self.log.note(self.state.step, f"the last {skipped} steps made no update")
        self._save("finished")
        self.saver.finish(self.log.say)
        return 0

    def train_step(self, loader: PackedLoader) -> int:
        """Run one step, from reading packs to logging, and return 0.

        If any rank has a reason to stop, return its number in REASONS without training.
        """
        step = self.state.step + 1
        if self.trace:  # --profile: detailed timings only for the profiled steps
            self.trace.before(step)
            self.timers.detailed = self.trace.running
        with self.timers.measure("step"):
            with self.timers.measure("data"):
                planned: list[PlannedRow] = loader.next_step()
                read = [row.batch for row in planned]
                batches, left_out = self._sound(read, step)
            with self.timers.measure("plan"):
                # If documents were dropped from a batch, its mask has changed, so plan it again.
                rows = []
                for row, batch in zip(planned, batches, strict=True):
                    rows.append(row if row.batch is batch else self._plan(batch))
            # All ranks exchange the loss denominator and their reasons to stop. From now on, every
            # decision on the step is the same on all ranks.
            with self.timers.phase("agreement"):
                report = self._rank_report(read, rows)
                replica = self.rows.data_rank.index
                agreed = agree_on_step(batches, self.grid, report, replica=replica)
            self.saver.settle(agreed.report.save_state, self.log.say)
            if agreed.report.stop_reason:
                return agreed.report.stop_reason
            numbers = StepNumbers(
                step=step,
                loss=math.nan,
                grad_norm=0.0,
                weight=agreed.weight,
                image_documents=agreed.report.image_documents,
                left_out=left_out,
            )

            # called once, between the backward pass and the update
            def check(loss: float, norm: float) -> Decision:
                return self.health.check(dataclasses.replace(numbers, loss=loss, grad_norm=norm))

            if agreed.weight:
                result = self.model.train(rows, step, agreed.denominator, agreed.tokens, check)
            else:  # no token has a loss weight: skip the computation and change nothing
                lr = learning_rate(step, self.config.training)
                result = StepResult(math.nan, 0.0, lr, check(math.nan, 0.0))
        before = self.state.consumed_samples
        consumed = loader.consumed_samples
        self.state = dataclasses.replace(self.state, step=step, consumed_samples=consumed)
        self._report(result, agreed, before)
        if self.trace and self.trace.is_over(step):
            self._end_trace()
        if self.grid.device.type == "cpu" and step % STEPS_BETWEEN_TRIMS == 0:
            trim_heap()
        return 0

    def _plan(self, batch: PackedBatch) -> PlannedRow:
        """Return the plan of a microbatch. The loader's threads call this before the step."""
        row = self.model.plan(batch)
        if not self.leads_replica:  # another rank of this replica counts the FLOPs
            return row
        return dataclasses.replace(row, flops=row_flops(row, self.config))

    def _rank_report(self, read: Sequence[PackedBatch], rows: Sequence[PlannedRow]) -> RankReport:
        """Return this rank's report for the exchange before a step."""
        images = 0
        if self.leads_replica and self.config.data.on_bad_image == "skip":
            images = image_documents(read)
        return RankReport(
            stop_reason=self.stop.reason,
            flops=sum(row.flops for row in rows),
            peak_bytes=peak_bytes(self.grid.device.type),
            data_wait=self.timers.seconds("data") + self.timers.seconds("plan"),
            save_state=self.saver.save_state,
            image_documents=images,
        )

    def _sound(self, batches: list[PackedBatch], step: int) -> tuple[list[PackedBatch], int]:
        """Return the batches without documents that have bad images, and the number of these.

        A document is dropped if any rank of its replica could not decode one of its images. The
        number counts dropped documents on all replicas.
        """
        if self.images is None or self.images.on_bad_image != "skip":
            return batches, 0
        batches, reasons = without_bad_images(batches, self.grid, self.rows.data_rank.index)
        for reason in reasons:
            self.log.note(step, f"dropped a document: {reason}")
        return batches, len(reasons)

    def _report(self, result: StepResult, agreed: StepAgreement, before: int) -> None:
        """Log a step. The run had consumed `before` samples when the step began.

        Raise AnomalyError if the decision on the step ends the run.
        """
        step = self.state.step
        consumed = self.state.consumed_samples
        decision = result.decision
        taken = self.timers.take()  # seconds by phase; this call also resets the timers
        for line in self.model.backend.warnings():
            self.log.say(line)
        if decision.findings:
            note = "; ".join(decision.findings)
            if not decision.update:
                note += ", all ranks skipped the update"
            if result.suspects:
                note += f"; {result.suspects}"
            self.log.note(step, note)
        # after a skipped update, the user may need a checkpoint that --keep-last would remove
        self.saver.keeps_all = not decision.update
        seconds = taken["step"]  # wall time, including data and planning
        left = self.config.training.train_iters - step  # remaining steps
        mfu = None
        if self.peak_flops:
            mfu = agreed.report.flops / (seconds * self.peak_flops)
        self.log.step(
            StepRecord(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_per_second=agreed.tokens / seconds,
                mfu=mfu,
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
            words, figures = blend_figures(self.sources.train, before, consumed, left == 0)
            self.log.figures("blend", step, words, figures)
        if self.timers.detailed:
            found = breakdown(taken, self.grid.world, self.grid.device)
            self.log.figures("timing", step, found.line(step), found.figures())
        if decision.end:  # raise last, so that the log contains this step
            raise AnomalyError(decision.end)

    def _validate(self) -> None:
        """Evaluate --eval-iters steps of validation packs, and log the mean loss."""
        assert self.sources.valid is not None
        options = loader_options(self.config, self.rows.packs)
        count = self.config.training.eval_iters
        replica = self.rows.data_rank
        total = 0.0
        weight = 0.0
        for read in validation_steps(self.sources.valid, options, replica, count, self.images):
            batches, _ = self._sound(read, self.state.step)
            agreed = agree_on_step(batches, self.grid, replica=replica.index)
            # `evaluate` divides by the step's denominator; undo this to weight all tokens equally
            total += self.model.evaluate(batches, agreed.denominator) * agreed.denominator
            weight += agreed.weight
        self.timers.take()  # discard validation times, which do not belong to a training step
        if weight == 0.0:
            self.log.say(f"step {self.state.step}: no token of --valid-data-path has a loss weight")
            return
        self.log.validation(self.state.step, total / weight)

    def _save(self, reason: str) -> None:
        state = dataclasses.replace(self.state, health=self.health.state())
        self.saver.save(self.model, state, self.log.say, reason)

    def _end_at_anomaly(self, reason: str) -> int:
        """Commit the pending checkpoint, log why the run ends, and return the exit status.

        The log line includes the newest checkpoint, from which the user can resume.
        """
        self._end_trace()
        self.saver.keeps_all = True  # the user may have to resume from an earlier checkpoint
        self.saver.finish(self.log.say)
        newest = self.saver.newest
        if newest:
            origin = f"the newest checkpoint is {newest}"
        else:
            origin = "there is no checkpoint of this run"
        self.log.fail(self.state.step, f"{reason}. Nothing was saved afterwards; {origin}")
        return FAILED

    def _end_trace(self) -> None:
        """Write the running trace, if any, and log its folder or any rank's problems."""
        if self.trace is None or not self.trace.running:
            return
        of_ranks = gather_objects(self.trace.finish(self.state.step), self.grid.world)
        problems = [text for text in of_ranks if text]
        if not problems:
            self.log.say(f"trace up to step {self.state.step}: {self.trace.folder}")
        for problem in problems:
            self.log.note(self.state.step, f"the trace could not be written: {problem}")
