"""What a run reports of itself: its log, its first lines, the FLOPs of its MFU, the slowest rank of
a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megacp.attention.context_parallel.balance import row_area
from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import Axis, ProcessGrid
from megacp.engine.config.run import RunConfig, flatten
from megacp.engine.models.costs import run_parameters, text_flops, trained_parameters, vision_flops
from megacp.engine.models.pair_words import describe_pairs, parts_without_pairs
from megacp.engine.rows.mix import mix_of
from megacp.engine.step.rows import PlannedRow
from megacp.engine.timers import COMPUTING, WAITING, Breakdown
from megacp.storage.wording import counted, human_count
from megacp.training.checkpoint.outcome import on_all_ranks
from megacp.training.data.blend import PackBlend
from megacp.training.data.manifest import answers_told, thoughts_told
from megacp.training.loop.sources import Sources
from megacp.training.loop.state import Resumed, Start
from megacp.training.monitor.log import LogTargets, RunLog


def row_flops(row: PlannedRow, config: RunConfig) -> float:
    """FLOPs of training on a row, attention counted by the allowed pairs of its mask, vision by its
    images.
    """
    metadata, images = row.share.plan.metadata, row.batch.vision
    mix = mix_of(config.model)
    area = row_area(metadata, mix).sum() / max(1, sum(mix.values()))  # of the mean layer
    total = text_flops(config, int((metadata.leave > 0).sum()), int(area))
    if images is not None:
        total += vision_flops(
            config, images.num_crops, images.num_features, images.pooling.shape[1], published=True
        )
    return total


def open_log(config: RunConfig, grid: ProcessGrid, step: int) -> RunLog:
    """The log of this rank of a run that has done `step` steps; ValueError on all ranks when rank 0
    cannot open it.
    """
    targets = LogTargets()  # of other ranks: nowhere
    if grid.rank == 0:
        log = config.log
        projects = log.wandb_project, log.trackio_project
        targets = LogTargets(
            True, config.log_path, log.tensorboard_dir, *projects, log.log_interval
        )
    opened = list[RunLog]()

    def opens() -> None:
        try:
            opened.append(RunLog(targets, config.training.train_iters, step, flatten(config)))
        except OSError as error:
            raise ValueError(f"the log cannot be written: {error}") from error

    on_all_ranks(grid.world, opens, ValueError)
    return opened[0]


def heading(config: RunConfig, grid: ProcessGrid) -> str:
    """One line: what runs where."""
    shape, training, parallel = grid.shape, config.training, config.parallel
    ranks = shape.dp * shape.cp // parallel.num_distributed_optimizer_instances
    what = parallel.sharding.shared
    shared = f" (each {ranks} of dp x cp share {what})" if what and ranks > 1 else ""
    batch = counted(training.global_batch_size, "pack")
    ranks_in_all = counted(shape.world_size, "rank")
    return (
        f"{ranks_in_all} = pp {shape.pp} x dp {shape.dp} x cp {shape.cp} x tp {shape.tp}{shared} "
        "on "
        f"{grid.device.type}, {human_count(run_parameters(config))} parameters{_trained(config)} "
        "in "
        f"{training.dtype}, {batch} of up to {config.data.seq_length} tokens a step"
    )


def opening_lines(
    config: RunConfig,
    grid: ProcessGrid,
    sources: Sources,
    chosen: Sequence[str],
    start: Start,
    resumed: Resumed | None,
) -> list[str]:
    """What runs where, what it starts from, and what is not as it was."""
    lines = [heading(config, grid), *parts_without_pairs(config), *chosen]
    source = sources.train
    if told := answers_told(sources.answer_forms):
        lines.append(told)
    if isinstance(source, PackBlend):
        firsts = [
            0,
            *itertools.accumulate(len(one) for one in source.datasets),
        ]  # [datasets + 1]: pack numbers
        for one, first, stop in zip(source.shares(0), firsts, firsts[1:], strict=False):
            words = f"{stop - first:,} packs, numbers {first} to {stop - 1}"
            lines.append(f"blend: {one.name} gives {one.share:.4%} of the samples; {words}")
    lines += filter(None, (thoughts_told(sources.chat_template), start.note))
    if resumed is None:
        rank = config.model.lora_rank
        random = (
            f"--lora-rank {rank}: no --load-hf and no --load, so the frozen model is a random one"
        )
        return [*lines, random] if rank else lines
    step, last = resumed.state.step, config.training.train_iters
    fresh = f"weights of {resumed.path}; this run starts at step 0 with a fresh optimizer"
    lines.append(fresh if start.weights_only else f"resumed from {resumed.path} after step {step}")
    lines += [f"changed since the checkpoint: {change}" for change in resumed.changed]
    if last <= step:
        lines.append(
            f"--train-iters {last} is not above step {step} of the checkpoint: nothing is trained"
        )
    return lines


def blend_figures(
    source: PackBlend, before: int, consumed: int, is_last: bool
) -> tuple[str, dict[str, float]]:
    """Shares and epochs after `consumed` samples, in words where a dataset began an epoch since
    `before`.
    """
    shares = source.shares(consumed)
    begun = [
        int(now.epoch) > int(was.epoch)
        for now, was in zip(shares, source.shares(before), strict=True)
    ]
    figures: dict[str, float] = {}
    for one in shares:
        figures |= {f"{one.name}/share": one.share, f"{one.name}/epoch": one.epoch}
    words = ", ".join(f"{one.name} {one.share:.2%}, epoch {one.epoch:.2f}" for one in shares)
    return (f"blend: after {consumed:,} samples {words}" if any(begun) or is_last else ""), figures


def _trained(config: RunConfig) -> str:
    """How many of them are trained, where some are frozen."""
    pairs = ""
    if config.model.lora_rank:
        pairs = f" in low-rank pairs of {describe_pairs(config.model)}"
    return (
        f" ({human_count(trained_parameters(config))} trained{pairs})"
        if config.frozen_parts
        else ""
    )


def breakdown(taken: dict[str, float], world: Axis, device: torch.device) -> Breakdown:
    """The seconds by phase of all ranks, from those of this one. Collective over `world`."""
    names = (*COMPUTING, *WAITING)
    row = torch.tensor(
        [[taken.get(name, 0.0) for name in names]], dtype=torch.float64, device=device
    )
    columns = all_gather(row, world).cpu().T.tolist()  # [1, phases] -> [world, phases] -> by phase
    return Breakdown(
        {name: of_ranks for name, of_ranks in zip(names, columns, strict=True) if any(of_ranks)}
    )
