"""The text of a dry run: grid, stages, memory of a rank, messages and work of a step.

The text is as long for 4,096 ranks as for 8: rows that only continue a pattern are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megacp.distributed.shape import AXES
from megacp.dry_run import in_flight, memory
from megacp.dry_run.measured import block_memory
from megacp.dry_run.messages import StageMessages, step_messages, uncounted
from megacp.dry_run.packs import PackSample, sample_packs
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.moe import exchange_bytes, expert_rows, most_load, planned_load
from megacp.engine.layers.stack import layers_of
from megacp.engine.layers.table import (
    ATTENTION_BACKWARD,
    PUBLISHED_BACKWARD,
    Flops,
    tokens_per_rank,
)
from megacp.engine.models import costs
from megacp.engine.models.pair_words import describe_pairs, parts_without_pairs
from megacp.engine.pipeline_parallel.schedules import Kind
from megacp.engine.pipeline_parallel.timeline import bubble, orders, timeline
from megacp.storage.wording import human_bytes, human_count

_SHOWN = 6
"""Rows at each end of a table that is too long."""


def describe(config: RunConfig, world_size: int) -> str:
    """The dry run of a checked configuration on `world_size` ranks."""
    stages = costs.stage_layers(config, world_size)
    sample = sample_packs(config)
    parts = [
        _heading(config, world_size),
        _grid(config, world_size),
        _stages(config, world_size, stages),
        _memory(config, world_size, stages),
    ]
    if world_size > 1:
        parts.append(_messages(config, world_size, sample))
    parts.append(_step(config, world_size, sample))
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns, the first `left` of them to the left, the others to the right; the first row
    is the head.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        padded[:left] = [
            text.ljust(width) for text, width in zip(row[:left], widths[:left], strict=True)
        ]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def _section(title: str, rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A title and its table; of a long one the first and the last rows."""
    head, *body = rows
    if len(body) > 2 * _SHOWN + 2:
        body[_SHOWN:-_SHOWN] = [[f"... {len(body) - 2 * _SHOWN} more", *[""] * (len(head) - 1)]]
    return f"{title}\n{table([head, *body], left)}"


def _heading(config: RunConfig, world_size: int) -> str:
    m, t = config.model, config.training
    shape = config.grid_shape(world_size)
    product = " x ".join(f"{name} {getattr(shape, name)}" for name in reversed(AXES))
    lines = [
        f"Dry run: {world_size:,} ranks = {product}",
        f"Model: {human_count(costs.run_parameters(config))} parameters, {m.num_layers} layers, "
        f"hidden {m.hidden_size}, ffn {m.ffn_hidden_size}, {m.num_attention_heads} heads / "
        f"{m.query_groups} query "
        f"groups of {m.head_dim}, vocabulary {m.vocab_size:,}, {t.dtype}",
    ]
    v = config.vision
    if v.vision_num_layers:
        parts = (costs.tower_parameters(config), costs.connector_parameters(config))
        lines.append(
            f"Vision: {human_count(parts[0])} parameters, {v.vision_num_layers} layers, hidden "
            f"{v.vision_hidden_size}, "
            f"crops of {v.vision_image_size} pixels in {v.patches_per_crop} patches; connector "
            f"{human_count(parts[1])}; planned for {costs.planned_images(config)[0]:,} crops a pack"
        )
    if m.num_experts:
        experts = sum(costs.expert_parameters(m, layer) for layer in range(m.num_layers))
        active = (
            costs.run_parameters(config)
            - experts * (m.num_experts - m.moe_router_topk) // m.num_experts
        )
        lines.append(
            f"Experts: {m.moe_router_topk} of {m.num_experts} for a token, {human_count(active)} "
            "parameters active, "
            f"a rank has {m.num_experts // config.parallel.expert_model_parallel_size} of a layer"
        )
        lines += _expert_load(config)
    if m.lora_rank:
        lines.append(
            f"Trained: {human_count(costs.trained_parameters(config))} parameters in low-rank "
            "pairs of "
            f"{describe_pairs(m)}; all else is frozen"
        )
        lines += parts_without_pairs(config)
    if config.parallel.chooses_transport or config.parallel.chooses_layout:
        lines.append(
            "Note: auto chooses --cp-comm-type or --cp-layout when a run starts, on its machine "
            "and rows."
        )
    if m.vocab_size == 0:
        lines.append(
            "Note: --vocab-size is 0 (the dataset's tokenizer decides): embedding and head count "
            "as 0 below."
        )
    return "\n".join(lines)


def _expert_load(config: RunConfig) -> list[str]:
    """Rows of a rank's experts, what a block with them holds at work, and what it sends."""
    ep, loads = config.parallel.expert_model_parallel_size, []
    layer = next(i for i, layer in enumerate(layers_of(config.model)) if layer.is_routed)
    for load, name in (
        (1.0, "even"),
        (planned_load(config), "planned"),
        (most_load(config), "at the worst"),
    ):
        loaded = with_values(config, {"moe_planned_imbalance": load})
        held = block_memory(loaded, layer).backward
        loads.append(f"{expert_rows(loaded):,} ({human_bytes(held)}) {name}")
    if ep == 1:
        return [f"Rows of its experts in a layer: {loads[0]}; no exchange"]
    machine = "leaves a machine of 8" if 8 % ep else "stays in a machine of 8"
    sent = f"a layer sends {human_bytes(exchange_bytes(config))} a microbatch, which {machine}"
    return [f"Rows of its experts in a layer: {', '.join(loads)}; {sent}"]


def _grid(config: RunConfig, world_size: int) -> str:
    rows = [["axis", "size", "stride", "group of rank 0"]]
    shape, stride = config.grid_shape(world_size), 1
    groups = {name: shape.members(0, (name,)) for name in AXES}
    groups |= zip(("ep", "edp"), shape.experts(0), strict=True) if shape.ep else ()
    for name, members in groups.items():
        shown = members if len(members) <= 8 else [*members[:4], "...", members[-1]]
        stride = 1 if name == "ep" else stride
        rows.append([name, str(len(members)), str(stride), " ".join(map(str, shown))])
        stride *= len(members)
    width = max(len(row[3]) for row in rows)
    return _section(
        "Grid (tp varies fastest, pp slowest)", [[*row[:3], row[3].ljust(width)] for row in rows]
    )


def _stages(config: RunConfig, world_size: int, stages: Sequence[Sequence[range]]) -> str:
    rows = [["stage", "layers", "also", "parameters/rank", "in flight"]]
    last = len(stages) - 1
    for stage, chunks in enumerate(stages):
        layers = ", ".join(
            f"{part.start}" if len(part) == 1 else f"{part.start}-{part.stop - 1}"
            for part in chunks
        )
        seeing = ["vision"] * (stage == 0 and config.vision.vision_num_layers > 0)
        also = ["embedding"] * (stage == 0) + seeing + ["norm, head"] * (stage == last)
        count = memory.stage_parameters(config, chunks)
        held = in_flight.most_held(config, stage, world_size).in_flight
        rows.append([str(stage), layers, " + ".join(also), f"{count:,}", str(held)])
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank
    kind = "1F1B" if virtual == 1 else f"interleaved 1F1B, {virtual} chunks a stage"
    if config.parallel.defers_weight_gradients:
        kind += ", deferred weight gradients"
    return _section(
        f"Pipeline stages ({kind}; in flight: activations of a chunk held at once)", rows, left=3
    )


def _memory(config: RunConfig, world_size: int, stages: Sequence[Sequence[range]]) -> str:
    """The terms that are anywhere above zero; below them the phases of the fullest stage."""
    terms = [
        memory.stage_memory(config, stage, chunks, world_size)
        for stage, chunks in enumerate(stages)
    ]
    names = [field.name for field in dataclasses.fields(memory.RankMemory) if field.name != "host"]
    names = [name for name in names if any(getattr(of_stage, name) for of_stage in terms)]
    names += ["total"] + ["host"] * (config.training.activation_offload > 0)
    rows = [["stage", *(name.replace("_", " ") for name in names)]]
    for stage, of_stage in enumerate(terms):
        rows.append([str(stage), *(human_bytes(getattr(of_stage, name)) for name in names)])
    fullest = max(range(len(terms)), key=lambda stage: terms[stage].total)
    full = terms[fullest]
    phases = {name: count for name, count in full.peaks.items() if name != "vision" or full.vision}
    peaks = ", ".join(f"{phase} {human_bytes(count)}" for phase, count in phases.items())
    granularity = config.training.recompute_granularity
    title = (
        f"Memory of one rank (estimate; recompute {granularity}; total: its largest phase, not "
        "the sum)"
    )
    return f"{_section(title, rows)}\n\n  phases of stage {fullest}: {peaks}"


def _messages(config: RunConfig, world_size: int, sample: PackSample) -> str:
    """Return the bytes that a rank of each stage sends, by the axes that send any."""
    found = step_messages(config, world_size, sample)
    axes = [field.name for field in dataclasses.fields(StageMessages)]
    axes = [axis for axis in axes if any(getattr(of_stage, axis) for of_stage in found)]
    rows = [["stage", *axes, "total"]]
    for stage, of_stage in enumerate(found):
        sent = [getattr(of_stage, axis) for axis in axes]
        rows.append([str(stage), *map(human_bytes, [*sent, of_stage.total])])
    text = _section("Messages of one rank in a step (bytes sent over each axis)", rows)
    if missing := uncounted(config):
        text += f"\n  not counted: {', '.join(missing)}"
    return text


def _bubble(config: RunConfig, world_size: int, flops: Flops) -> float:
    """Idle time over work of equal stages, under the schedule that a run executes; `flops` are any
    part's forward.
    """
    lists = orders(config, world_size)
    times = {
        Kind.FORWARD: flops.forward,
        Kind.BACKWARD: flops.matmul + ATTENTION_BACKWARD * flops.attention,
        Kind.WEIGHTS: flops.matmul,
    }
    return bubble(
        timeline(lists, config.parallel.num_virtual_stages_per_pipeline_rank, [times] * len(lists))
    )


def step_work(config: RunConfig, sample: PackSample) -> tuple[float, float]:
    """FLOPs of a step of text and of vision as MFU is published: attention's backward counts twice
    its forward.
    """
    packs, length = config.training.global_batch_size, config.data.seq_length
    seeing = packs * costs.vision_flops(config, *costs.planned_images(config), published=True)
    return costs.text_flops(config, packs * length, _mean_area(config, sample)), seeing


def _mean_area(config: RunConfig, sample: PackSample) -> int:
    """Allowed pairs of the packs of a step, of a layer with attention."""
    areas = [area for area in costs.layer_areas(config.model, config.data.seq_length) if area]
    return int(config.training.global_batch_size * sample.area * sum(areas) / max(1, len(areas)))


def _step(config: RunConfig, world_size: int, sample: PackSample) -> str:
    t, length = config.training, config.data.seq_length
    tokens = t.global_batch_size * length
    text, seeing = step_work(config, sample)
    flops = costs.model_flops(config.model, tokens, _mean_area(config, sample))
    share = flops.attention * (1 + PUBLISHED_BACKWARD) / text
    plural = "s" if t.micro_batch_size > 1 else ""
    rows = [
        ["packs", f"{t.global_batch_size:,} of {length:,} tokens = {human_count(tokens)} tokens"],
        [
            "microbatches",
            f"{config.num_microbatches(world_size):,} a rank, {t.micro_batch_size} pack{plural} "
            "each",
        ],
        ["tokens on a rank", f"{tokens_per_rank(config):,} a microbatch"],
        [
            "model FLOPs",
            f"{human_count(text, 'FLOP')} ({share:.0%} attention, {sample.area:.2f} of a whole "
            "pack's)",
        ],
        *(
            [["vision FLOPs", f"{human_count(seeing, 'FLOP')} (all packs with the planned crops)"]]
            if seeing
            else []
        ),
        ["a rank's share", f"{human_count((text + seeing) / world_size, 'FLOP')}"],
        ["pipeline bubble", f"{_bubble(config, world_size, flops):.1%} of the ideal time"],
        ["the whole run", f"{t.train_iters:,} steps, {human_count(tokens * t.train_iters)} tokens"],
    ]
    return "One step\n" + "\n".join(f"  {name:<16}  {text}" for name, text in rows)
