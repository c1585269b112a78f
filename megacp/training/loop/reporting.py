"""Reports of a run: its log, its opening lines, FLOPs for the MFU, and timings across ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacp.attention.context_parallel.balance import row_area
from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import Axis, ProcessGrid
from megacp.engine.config.run import RunConfig, flatten
from megacp.engine.config.training import TrainingConfig
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

# AdamW changes a weight by up to the rate per step, and few weights are larger than this.
_LARGEST_LR = 0.1


def row_flops(row: PlannedRow, config: RunConfig) -> float:
    """Return the FLOPs for training on a row.

    Attention FLOPs depend on the allowed pairs in the row's mask, and vision FLOPs on its images.
    """
    metadata = row.share.plan.metadata
    images = row.batch.vision
    mix = mix_of(config.model)
    layers = max(1, sum(mix.values()))
    area = row_area(metadata, mix).sum() / layers  # allowed pairs, averaged over layers
    # `leave` is 0 for padding
    total = text_flops(config, int((metadata.leave > 0).sum()), int(area))
    if images is not None:
        total += vision_flops(
            config, images.num_crops, images.num_features, images.pooling.shape[1], published=True
        )
    return total


def open_log(config: RunConfig, grid: ProcessGrid, step: int) -> RunLog:
    """Open this rank's log of a run that has completed `step` steps.

    Raise ValueError on all ranks if rank 0 cannot open its log.
    """
    targets = LogTargets()  # other ranks write nothing
    if grid.rank == 0:
        log = config.log
        targets = LogTargets(
            True,
            config.log_path,
            log.tensorboard_dir,
            log.wandb_project,
            log.trackio_project,
            log.log_interval,
        )
    opened = list[RunLog]()  # a list, because `opens` cannot return a value

    def opens() -> None:
        try:
            opened.append(RunLog(targets, config.training.train_iters, step, flatten(config)))
        except OSError as error:
            raise ValueError(f"the log of --log-file cannot be written: {error}") from error

    on_all_ranks(grid.world, opens, ValueError)
    return opened[0]


def heading(config: RunConfig, grid: ProcessGrid) -> str:
    """Return a line that describes the grid, the device, the model and the batch."""
    shape = grid.shape
    training = config.training
    parallel = config.parallel
    sharing = shape.dp * shape.cp // parallel.num_distributed_optimizer_instances
    sharded = parallel.sharding.shared  # "parameters", "gradients" or ""
    shared = f" ({sharing} of dp x cp ranks shard {sharded})" if sharded and sharing > 1 else ""
    ranks = counted(shape.world_size, "rank")
    layout = f"pp {shape.pp} x dp {shape.dp} x cp {shape.cp} x tp {shape.tp}{shared}"
    # ep is not a factor of the number of ranks: it divides the ranks of a stage a second time
    if config.model.num_experts:
        layout += f", ep {parallel.expert_model_parallel_size}"
    parameters = f"{human_count(run_parameters(config))} parameters{_trained(config)}"
    batch = counted(training.global_batch_size, "pack")
    return (
        f"{ranks} = {layout} on {grid.device.type}, {parameters} in {training.dtype}, "
        f"{batch} of up to {config.data.seq_length} tokens per step"
    )


def rate_warning(training: TrainingConfig) -> list[str]:
    """Return a line about a learning rate that only a mistake explains, or no line."""
    if training.lr <= _LARGEST_LR:
        return []
    return [
        f"warning: with --lr {training.lr:g}, AdamW will probably diverge; usual are 1e-6 to 1e-4 "
        "to fine-tune, 1e-4 to 1e-3 with --lora-rank, and 1e-4 to 1e-2 for random weights"
    ]


def opening_lines(
    config: RunConfig,
    grid: ProcessGrid,
    sources: Sources,
    chosen: Sequence[str],
    start: Start,
    resumed: Resumed | None,
) -> list[str]:
    """Return log lines about the layout, the data, the starting point and changed flags."""
    lines = [heading(config, grid), *rate_warning(config.training)]
    lines += [*parts_without_pairs(config), *chosen]
    source = sources.train
    answers = answers_told(sources.answer_forms)
    if answers:
        lines.append(answers)
    if isinstance(source, PackBlend):
        first = 0  # the number of the dataset's first pack in the blend
        for one, dataset in zip(source.shares(0), source.datasets, strict=True):
            stop = first + len(dataset)
            words = f"{stop - first:,} packs, numbers {first} to {stop - 1}"
            lines.append(f"blend: {one.name} provides {one.share:.4%} of the samples; {words}")
            first = stop
    lines += filter(None, (thoughts_told(sources.chat_template), start.note))
    if resumed is None:
        # Training only the adapters of a random model is allowed, but rarely intended.
        rank = config.model.lora_rank
        if rank:
            lines.append(
                f"--lora-rank {rank}: the frozen model has random weights, because neither "
                "--load-hf nor --load is set"
            )
        return lines
    step = resumed.state.step
    last = config.training.train_iters
    if start.weights_only:  # --finetune or --load-hf
        lines.append(f"weights from {resumed.path}; this run starts at step 0 with a new optimizer")
    else:
        lines.append(f"resumed from {resumed.path} after step {step}")
    lines += [f"changed since the checkpoint: {change}" for change in resumed.changed]
    if last <= step:
        lines.append(
            f"--train-iters {last} is not greater than the checkpoint's step {step}: there are no "
            "steps left to train"
        )
    return lines


def blend_figures(
    source: PackBlend, before: int, consumed: int, is_last: bool
) -> tuple[str, dict[str, float]]:
    """Return each dataset's share and epoch after `consumed` samples, as a log line and as figures.

    The line is empty unless a dataset has begun an epoch since sample `before`, or `is_last` is
    set.
    """
    shares = source.shares(consumed)
    earlier = source.shares(before)
    begins_epoch = any(
        int(now.epoch) > int(was.epoch) for now, was in zip(shares, earlier, strict=True)
    )
    figures: dict[str, float] = {}
    for one in shares:  # unlike the line, figures are returned for every step
        figures[f"{one.name}/share"] = one.share
        figures[f"{one.name}/epoch"] = one.epoch
    if not begins_epoch and not is_last:
        return "", figures
    words = ", ".join(f"{one.name} {one.share:.2%}, epoch {one.epoch:.2f}" for one in shares)
    return f"blend: after {consumed:,} samples {words}", figures


def _trained(config: RunConfig) -> str:
    """Return the number of trained parameters in parentheses; "" if no part is frozen."""
    if not config.frozen_parts:
        return ""
    pairs = ""
    if config.model.lora_rank:
        pairs = f" in LoRA adapters of {describe_pairs(config.model)}"
    return f" ({human_count(trained_parameters(config))} trained{pairs})"


def breakdown(taken: dict[str, float], world: Axis, device: torch.device) -> Breakdown:
    """Return the seconds per phase on all ranks; `taken` is this rank's share. Collective."""
    names = (*COMPUTING, *WAITING)
    seconds = [taken.get(name, 0.0) for name in names]
    row = torch.tensor([seconds], dtype=torch.float64, device=device)  # [1, phases]
    table = all_gather(row, world).cpu()  # [world, phases]
    by_phase = dict(zip(names, table.T.tolist(), strict=True))
    return Breakdown({name: of_ranks for name, of_ranks in by_phase.items() if any(of_ranks)})
