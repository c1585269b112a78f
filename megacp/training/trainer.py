"""The training loop: packs in, steps, lines out, validation, checkpoints, and an orderly end when asked to stop.

Key property: every decision that all ranks must take alike (stop, save, validate) follows from numbers that all ranks
hold. Rejected: callbacks and hooks, whose order nobody can read.
"""

from __future__ import annotations

import dataclasses
import os

import torch

from megacp.batch import PackedBatch
from megacp.config.run import RunConfig, flatten
from megacp.context_parallel.auto import resolve_auto
from megacp.context_parallel.shard import mask_metadata
from megacp.context_parallel.stopwatch import Stopwatch
from megacp.data.loader import PackedLoader, validation_steps
from megacp.distributed.clock import clock_of
from megacp.distributed.collectives import barrier
from megacp.distributed.grid import ProcessGrid
from megacp.distributed.last_words import last_words
from megacp.distributed.launch import trim_heap
from megacp.monitor.flops import cpu_machine_peak, cpu_peak, gpu_peak, utilisation
from megacp.monitor.log import LogTargets, RunLog, StepRecord
from megacp.monitor.memory import peak_bytes
from megacp.monitor.timers import Timers
from megacp.planner.costs import model_flops
from megacp.planner.report import human_count
from megacp.planner.vision import run_parameters, vision_flops
from megacp.training.images import image_loading, shard_strategies, without_bad_images
from megacp.training.loss import RankNews, StepAgreement, agree
from megacp.training.saving import Saver
from megacp.training.sources import Sources, first_rows, loader_options
from megacp.training.state import Progress, Resumed, Start, load, starting_point
from megacp.training.step import StepResult, Trainee
from megacp.training.stopping import REASONS, STOPPED, StopSignal

STEPS_BETWEEN_TRIMS = 10
"""Optimizer steps after which a CPU rank gives free heap back: milliseconds, and without it a small run grows by MiB a
step."""


WATCHED_STEPS = range(1, 5)
"""Steps after the first one of a run in which core attention is timed, where a prediction chose its transport."""


def step_flops(batches: list[PackedBatch], config: RunConfig) -> float:
    """FLOPs of training on these rows, attention counted by the allowed pairs of their masks, vision by its images."""
    total = 0.0
    for batch in batches:
        area = int(mask_metadata(batch).cost.sum())
        text = model_flops(config.model, int((batch.document >= 0).sum()), area)
        total += text.passing if config.vision.freeze_text else text.training
        if batch.vision is not None:
            images = batch.vision
            total += vision_flops(config, images.num_images, images.num_features, images.pooling.shape[1])
    return total


class Trainer:
    """One rank of a run. `config` is resolved and checked."""

    def __init__(self, config: RunConfig, grid: ProcessGrid, sources: Sources) -> None:
        self.stop = StopSignal(config.training.exit_duration)
        self.saver = Saver(config, grid.world)
        try:
            self._prepare(config, grid, sources)
        except BaseException:
            self.saver.close()
            self.stop.release()
            raise

    def _prepare(self, config: RunConfig, grid: ProcessGrid, sources: Sources) -> None:
        config, self.choice = resolve_auto(config, grid, lambda: first_rows(config, sources))
        self.config, self.grid, self.sources = config, grid, sources
        self.watch = Stopwatch(grid.device) if self.choice else None
        self.trainee = Trainee(config, grid, self.watch)
        self.progress = Progress(
            data_fingerprint=sources.fingerprint,
            seed=config.training.seed,
            tokenizer_sha256=sources.tokenizer_sha256,
            image_rules=sources.image_rules,
        )
        start = starting_point(config, grid.world)
        resumed = load(self.trainee, self.progress, config, start) if start.path is not None else None
        self.saver.distrusted = resumed.rejected if resumed is not None else ()
        if resumed is not None and not start.weights_only:
            self.progress = resumed.progress
            self.saver.resumed(self.progress.step, resumed.path)
        self.first_step = self.progress.step + 1
        self.log = self._open_log()
        for line in self._opening_lines(start, resumed):
            self.log.say(line)
        self.timers = Timers(clock_of(grid.device))
        self.rows = self.trainee.rows
        self.images = image_loading(config, grid, self.rows, sources.decoder)
        self.known_strategies: set[str] = set()
        self.leads_replica = grid.tp.rank == self.rows.axis.rank == grid.pp.rank == 0
        self.peak_flops = self._peak_flops()

    def run(self) -> int:
        """Train to the end or until asked to stop; the exit status."""
        try:
            return self._run()
        except Exception as error:
            error.add_note(last_words(error, f"step {self.progress.step + 1}", self.grid.world))
            raise
        finally:
            self.saver.close()
            self.stop.release()
            self.log.close()

    def _run(self) -> int:
        training, checkpoint = self.config.training, self.config.checkpoint
        options, consumed = loader_options(self.config, self.rows.packs), self.progress.consumed_samples
        with PackedLoader(self.sources.train, options, self.rows.place, consumed, self.images) as loader:
            while self.progress.step < training.train_iters:
                if wish := self._train_step(loader):
                    self._save(REASONS[wish])
                    self.saver.finish(self.log.say)
                    return STOPPED
                step = self.progress.step
                if training.eval_interval and (step % training.eval_interval == 0 or step == training.train_iters):
                    self._validate()
                if checkpoint.save_interval and step % checkpoint.save_interval == 0 and step < training.train_iters:
                    self._save("saved")
        self._save("finished")
        self.saver.finish(self.log.say)
        return 0

    def _train_step(self, loader: PackedLoader) -> int:
        """One step, and 0; when some rank wishes to stop, the wish, before anything of the step was done."""
        with self.timers.measure("step"):
            with self.timers.measure("data"):
                batches = self._sound(loader.next_step(), self.progress.step + 1)
            news = RankNews(
                self.stop.wish,
                step_flops(batches, self.config) if self.leads_replica else 0.0,
                peak_bytes(self.grid.device.type),
                self.timers.seconds("data"),
                self.saver.news,
            )
            agreed = agree(batches, self.grid, news, replica=self.rows.place.index)
            self.saver.settle(agreed.news.saving, self.log.say)
            if agreed.news.stop:
                return agreed.news.stop
            step = self.progress.step + 1
            if self.watch:
                self.watch.running = step - self.first_step in WATCHED_STEPS
            result = self.trainee.train(batches, step, agreed.denominator)
        self.progress = dataclasses.replace(self.progress, step=step, consumed_samples=loader.consumed_samples)
        self._report(result, agreed, self.timers.take()["step"])
        if self.watch and self.watch.running:
            self._report_attention(step)
        if self.grid.device.type == "cpu" and step % STEPS_BETWEEN_TRIMS == 0:
            trim_heap()
        return 0

    def _sound(self, batches: list[PackedBatch], step: int) -> list[PackedBatch]:
        """What was read, less the documents whose images some rank could not decode; tells how images are dealt."""
        for strategy in sorted(shard_strategies(batches) - self.known_strategies):
            self.known_strategies.add(strategy)
            self.log.say(f"image shards of the context-parallel ranks: {strategy}")
        if self.images is None or self.images.on_bad_image != "skip":
            return batches
        batches, reasons = without_bad_images(batches, self.grid, self.rows.place.index)
        for reason in reasons:
            self.log.note(step, f"left out a document: {reason}")
        return batches

    def _report(self, result: StepResult, agreed: StepAgreement, seconds: float) -> None:
        for line in self.trainee.backend.news():
            self.log.say(line)
        if result.skipped:
            what = f"gradient norm {result.grad_norm}, all ranks skipped the update; {result.suspects}"
            self.log.note(self.progress.step, what)
        self.log.step(
            StepRecord(
                step=self.progress.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_per_second=agreed.tokens / seconds,
                mfu=utilisation(agreed.news.flops, seconds, self.peak_flops),
                peak_memory=agreed.news.peak_bytes,
                data_wait=agreed.news.data_wait,
                seconds=seconds,
                consumed_samples=self.progress.consumed_samples,
            )
        )

    def _report_attention(self, step: int) -> None:
        """After the last step that is watched: measured core attention beside the predicted."""
        assert self.watch is not None and self.choice is not None
        self.watch.running = False
        if step == self.config.training.train_iters or step - self.first_step == WATCHED_STEPS[-1]:
            measured = self.watch.slowest(self.grid.world)
            self.log.attention(step, self.choice.compared(measured), self.choice.figures(measured))

    def _validate(self) -> None:
        assert self.sources.valid is not None
        options = loader_options(self.config, self.rows.packs)
        count = self.config.training.eval_iters
        steps = validation_steps(self.sources.valid, options, self.rows.place, count, self.images)
        total, weight = 0.0, 0.0
        for read in steps:
            batches = self._sound(read, self.progress.step)
            agreed = agree(batches, self.grid, replica=self.rows.place.index)
            total += self.trainee.evaluate(batches, agreed.denominator) * agreed.denominator
            weight += agreed.weight
        if weight == 0.0:
            self.log.say(f"step {self.progress.step}: no token of --valid-data-path has a loss weight")
            return
        self.log.validation(self.progress.step, total / weight)

    def _save(self, reason: str) -> None:
        self.saver.save(self.trainee, self.progress, self.log.say, reason)

    def _opening_lines(self, start: Start, resumed: Resumed | None) -> list[str]:
        """What runs where, what it starts from, and what is not as it was."""
        lines = [self._heading(), *(self.choice.lines() if self.choice else ()), *self.saver.notes]
        lines += [start.note] if start.note else []
        if resumed is not None:
            resumes = f"resumed from {resumed.path} after step {self.progress.step}"
            fresh = f"weights of {resumed.path}; this run starts at step 0 with a fresh optimizer"
            lines.append(fresh if start.weights_only else resumes)
            lines += [f"changed since the checkpoint: {change}" for change in resumed.changed]
        return lines

    def _open_log(self) -> RunLog:
        targets = LogTargets()
        if self.grid.rank == 0:
            log = self.config.log
            targets = LogTargets(True, self.config.log_path, log.tensorboard_dir, log.wandb_project, log.log_interval)
        try:
            return RunLog(targets, self.config.training.train_iters, self.progress.step, flatten(self.config))
        except OSError as error:
            raise ValueError(f"the log cannot be written: {error}") from error

    def _heading(self) -> str:
        """One line: what runs where."""
        shape, training = self.grid.shape, self.config.training
        return (
            f"{shape.world_size} ranks = pp {shape.pp} x dp {shape.dp} x cp {shape.cp} x tp {shape.tp} on "
            f"{self.grid.device.type}, {human_count(run_parameters(self.config))} parameters in "
            f"{training.dtype}, {training.global_batch_size} packs of up to {self.config.data.seq_length} tokens a step"
        )

    def _peak_flops(self) -> float | None:
        """FLOP/s of all devices of the run together; on CPU measured by rank 0 while the others wait."""
        dtype, peak = self.config.training.dtype, None
        if self.grid.device.type == "cuda":
            one = gpu_peak(torch.cuda.get_device_name(self.grid.device), dtype)
            peak = one * self.grid.world.size if one is not None else None
        elif self.grid.rank == 0:
            threads, cores = torch.get_num_threads(), os.cpu_count() or 1
            peak = cpu_machine_peak(cpu_peak(dtype), self.grid.world.size, threads, cores)
        barrier(self.grid.world)
        return peak
