"""The report of a dry run: grid, pipeline stages, memory per rank, messages and FLOPs per step.

The report for 4,096 ranks is as long as the report for 8 ranks: long tables omit their middle rows.
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
from megacp.storage.wording import counted, human_bytes, human_count

# Rows shown at each end of a table that is too long.
_SHOWN = 6


def describe(config: RunConfig, world_size: int) -> str:
    """Return the dry-run report of a checked configuration on `world_size` ranks."""
    stages = costs.stage_layers(config, world_size)
    sample = sample_packs(config)
    parts = [
        _heading(config, world_size),
        _grid(config, world_size),
        _stages(config, world_size, stages),
        _memory(config, world_size, stages),
    ]
    # a single rank sends no messages
    if world_size > 1:
        parts.append(_messages(config, world_size, sample))
    parts.append(_step(config, world_size, sample))
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as text with aligned columns; the first row is the header.

    The first `left` columns are left-aligned, the remaining columns right-aligned.
    """
    # each column is as wide as its longest text
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = []
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            padded.append(text.ljust(width) if column < left else text.rjust(width))
        line = "  " + "  ".join(padded)
        lines.append(line.rstrip())
    return "\n".join(lines)


def _section(title: str, rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a title and its table. A long table keeps only its first and last rows."""
    head, *body = rows
    # replace the middle rows only if this saves at least two lines
    if len(body) > 2 * _SHOWN + 2:
        hidden = len(body) - 2 * _SHOWN
        empty_cells = [""] * (len(head) - 1)
        body[_SHOWN:-_SHOWN] = [[f"... {hidden} more", *empty_cells]]
    return f"{title}\n{table([head, *body], left)}"


def _heading(config: RunConfig, world_size: int) -> str:
    m = config.model
    shape = config.grid_shape(world_size)
    # the axes in the order of ranks, from slowest to fastest
    product = " x ".join(f"{name} {getattr(shape, name)}" for name in reversed(AXES))
    parameters = human_count(costs.run_parameters(config))
    heads = f"{m.num_attention_heads} heads / {m.query_groups} query groups of {m.head_dim}"
    lines = [
        f"Dry run: {world_size:,} ranks = {product}",
        f"Model: {parameters} parameters, {m.num_layers} layers, hidden {m.hidden_size}, "
        f"ffn {m.ffn_hidden_size}, {heads}, vocabulary {m.vocab_size:,}, {config.training.dtype}",
    ]
    if config.vision.vision_num_layers:
        lines.append(_vision_line(config))
    if m.num_experts:
        lines.append(_expert_line(config))
        lines += _expert_load(config)
    if m.lora_rank:
        trained = human_count(costs.trained_parameters(config))
        lines.append(
            f"Trained: {trained} parameters in LoRA adapters of {describe_pairs(m)}; all other "
            "parameters are frozen"
        )
        lines += parts_without_pairs(config)
    # a dry run has neither the GPUs nor the rows that the choice depends on
    if config.parallel.chooses_transport or config.parallel.chooses_layout:
        lines.append(
            "Note: auto chooses --cp-comm-type or --cp-layout when the run starts, based on its "
            "hardware and rows."
        )
    if m.vocab_size == 0:
        lines.append(
            "Note: --vocab-size is 0 (the dataset's tokenizer sets it): embedding and head count "
            "as 0 below."
        )
    return "\n".join(lines)


def _vision_line(config: RunConfig) -> str:
    v = config.vision
    tower = human_count(costs.tower_parameters(config))
    connector = human_count(costs.connector_parameters(config))
    crops, _ = costs.planned_images(config)
    return (
        f"Vision: {tower} parameters, {v.vision_num_layers} layers, hidden {v.vision_hidden_size}, "
        f"crops of {v.vision_image_size} pixels in {v.patches_per_crop} patches; connector "
        f"{connector}; planned for {crops:,} crops per pack"
    )


def _expert_line(config: RunConfig) -> str:
    m = config.model
    experts = sum(costs.expert_parameters(m, layer) for layer in range(m.num_layers))
    # a token passes only moe_router_topk of the experts
    unused = experts * (m.num_experts - m.moe_router_topk) // m.num_experts
    active = costs.run_parameters(config) - unused
    on_rank = m.num_experts // config.parallel.expert_model_parallel_size
    return (
        f"Experts: {m.moe_router_topk} of {m.num_experts} per token, {human_count(active)} active "
        f"parameters; a rank has {on_rank} experts per layer"
    )


def _expert_load(config: RunConfig) -> list[str]:
    """Return a line with the rows of a rank's experts, the memory of a block, and the bytes sent.

    The memory is the peak of the block's backward pass. Rows and memory are given for an even load,
    the planned load and the worst load.
    """
    ep = config.parallel.expert_model_parallel_size
    loads = []
    # the first routed layer represents all of them
    layer = next(i for i, layer in enumerate(layers_of(config.model)) if layer.is_routed)
    cases = (
        (1.0, "even"),
        (planned_load(config), "planned"),
        (most_load(config), "in the worst case"),
    )
    for load, name in cases:
        loaded = with_values(config, {"moe_planned_imbalance": load})
        peak = block_memory(loaded, layer).backward
        loads.append(f"{expert_rows(loaded):,} ({human_bytes(peak)}) {name}")
    # without expert parallelism a rank has all experts, so the load is always even
    if ep == 1:
        return [f"Expert rows per rank and layer: {loads[0]}; no exchange"]
    # ep varies fastest among the ranks, so its groups fit into machines of 8 if ep divides 8
    reach = "between machines of 8 GPUs" if 8 % ep else "within a machine of 8 GPUs"
    sent = f"a layer sends {human_bytes(exchange_bytes(config))} per microbatch {reach}"
    return [f"Expert rows per rank and layer: {', '.join(loads)}; {sent}"]


def _grid(config: RunConfig, world_size: int) -> str:
    rows = [["axis", "size", "stride", "group of rank 0"]]
    shape = config.grid_shape(world_size)
    groups = {name: shape.members(0, (name,)) for name in AXES}
    if shape.ep:
        groups |= zip(("ep", "edp"), shape.experts(0), strict=True)
    stride = 1
    for name, members in groups.items():
        # a large group shows its first four ranks and its last rank
        shown = members if len(members) <= 8 else [*members[:4], "...", members[-1]]
        # ep and edp divide the same ranks a second time, starting at stride 1
        if name == "ep":
            stride = 1
        rows.append([name, str(len(members)), str(stride), " ".join(map(str, shown))])
        stride *= len(members)
    # pad the last column, which `table` would align to the right
    width = max(len(row[3]) for row in rows)
    padded = [[*row[:3], row[3].ljust(width)] for row in rows]
    return _section("Grid (tp varies fastest, pp slowest)", padded)


def _stages(config: RunConfig, world_size: int, stages: Sequence[Sequence[range]]) -> str:
    rows = [["stage", "layers", "also", "parameters/rank", "in flight"]]
    last = len(stages) - 1
    for stage, chunks in enumerate(stages):
        layers = ", ".join(map(_layer_numbers, chunks))
        also = []
        if stage == 0:
            also.append("embedding")
            if config.vision.vision_num_layers > 0:
                also.append("vision")
        if stage == last:
            also.append("norm, head")
        count = memory.stage_parameters(config, chunks)
        held = in_flight.most_held(config, stage, world_size).in_flight
        rows.append([str(stage), layers, " + ".join(also), f"{count:,}", str(held)])
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank
    kind = "1F1B" if virtual == 1 else f"interleaved 1F1B, {virtual} chunks per stage"
    if config.parallel.defers_weight_gradients:
        kind += ", deferred weight gradients"
    title = f"Pipeline stages ({kind}; in flight: sets of chunk activations held at once)"
    return _section(title, rows, left=3)


def _layer_numbers(layers: range) -> str:
    if len(layers) == 1:
        return f"{layers.start}"
    return f"{layers.start}-{layers.stop - 1}"


def _memory(config: RunConfig, world_size: int, stages: Sequence[Sequence[range]]) -> str:
    """Return the table of memory terms, then a line with the phases of the fullest stage.

    The table omits terms that are zero on all stages.
    """
    terms = []
    for stage, chunks in enumerate(stages):
        terms.append(memory.stage_memory(config, stage, chunks, world_size))
    names = []
    for field in dataclasses.fields(memory.RankMemory):
        # host memory is not part of the total and follows it
        if field.name != "host" and _any_nonzero(terms, field.name):
            names.append(field.name)
    names.append("total")
    if config.training.activation_offload > 0:
        names.append("host")
    rows = [["stage", *(name.replace("_", " ") for name in names)]]
    for stage, of_stage in enumerate(terms):
        rows.append([str(stage), *(human_bytes(getattr(of_stage, name)) for name in names)])
    # the first of the stages with the highest peak
    fullest = max(range(len(terms)), key=lambda stage: terms[stage].total)
    full = terms[fullest]
    # a stage without a vision tower has no vision phase
    phases = {name: count for name, count in full.peaks.items() if name != "vision" or full.vision}
    peaks = ", ".join(f"{phase} {human_bytes(count)}" for phase, count in phases.items())
    title = (
        f"Memory of one rank (estimate; recompute {config.training.recompute_granularity}; "
        "total: its largest phase, not the sum)"
    )
    return f"{_section(title, rows)}\n\n  phases of stage {fullest}: {peaks}"


def _any_nonzero(stages: Sequence[object], name: str) -> bool:
    return any(getattr(of_stage, name) for of_stage in stages)


def _messages(config: RunConfig, world_size: int, sample: PackSample) -> str:
    """Return the table of bytes that a rank of each stage sends on each axis.

    The table omits axes without messages.
    """
    found = step_messages(config, world_size, sample)
    axes = []
    for field in dataclasses.fields(StageMessages):
        if _any_nonzero(found, field.name):
            axes.append(field.name)
    rows = [["stage", *axes, "total"]]
    # one row per pipeline stage, with bytes for each axis and their sum
    for stage, of_stage in enumerate(found):
        sent = [getattr(of_stage, axis) for axis in axes]
        rows.append([str(stage), *map(human_bytes, [*sent, of_stage.total])])
    text = _section("Messages of one rank in a step (bytes sent on each axis)", rows)
    if missing := uncounted(config):
        text += f"\n  not counted: {', '.join(missing)}"
    return text


def _bubble(config: RunConfig, world_size: int, flops: Flops) -> float:
    """Return idle time divided by busy time for equal stages under the run's schedule.

    `flops` are the forward FLOPs of any part of the model; only their ratios matter.
    """
    lists = orders(config, world_size)
    # relative times: the gradients of inputs and of weights each cost as much as the forward
    # pass's matrix products
    times = {
        Kind.FORWARD: flops.forward,
        Kind.BACKWARD: flops.matmul + ATTENTION_BACKWARD * flops.attention,
        Kind.WEIGHTS: flops.matmul,
    }
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank
    return bubble(timeline(lists, chunks, [times] * len(lists)))


def step_work(config: RunConfig, sample: PackSample) -> tuple[float, float]:
    """Return the FLOPs of a step, for text and for vision, as counted for published MFU values.

    Attention's backward pass counts twice as much as its forward pass.
    """
    packs = config.training.global_batch_size
    tokens = packs * config.data.seq_length
    crops, pooled = costs.planned_images(config)
    seeing = packs * costs.vision_flops(config, crops, pooled, published=True)
    return costs.text_flops(config, tokens, _mean_area(config, sample)), seeing


def _mean_area(config: RunConfig, sample: PackSample) -> int:
    """Return the number of allowed (query, key) pairs in a step, averaged over attention layers."""
    areas = [area for area in costs.layer_areas(config.model, config.data.seq_length) if area]
    return int(config.training.global_batch_size * sample.area * sum(areas) / max(1, len(areas)))


def _step(config: RunConfig, world_size: int, sample: PackSample) -> str:
    t = config.training
    length = config.data.seq_length
    packs = t.global_batch_size
    tokens = packs * length
    text, seeing = step_work(config, sample)
    # forward FLOPs, separately for linear layers and attention
    flops = costs.model_flops(config.model, tokens, _mean_area(config, sample))
    # forward and backward FLOPs of attention, as a share of all text FLOPs
    share = flops.attention * (1 + PUBLISHED_BACKWARD) / text
    microbatches = config.num_microbatches(world_size)
    work = human_count(text, "FLOP")
    run_tokens = human_count(tokens * t.train_iters)
    rows = [
        ["packs", f"{packs:,} of {length:,} tokens = {human_count(tokens)} tokens"],
        ["microbatches", f"{microbatches:,} per rank, {counted(t.micro_batch_size, 'pack')} each"],
        ["tokens on a rank", f"{tokens_per_rank(config):,} per microbatch"],
        ["model FLOPs", f"{work} ({share:.0%} attention, mask area {sample.area:.2f} of causal)"],
    ]
    if seeing:
        seeing_work = human_count(seeing, "FLOP")
        rows.append(["vision FLOPs", f"{seeing_work} (all packs with the planned crops)"])
    idle = _bubble(config, world_size, flops)
    rows += [
        ["a rank's share", human_count((text + seeing) / world_size, "FLOP")],
        ["pipeline bubble", f"{idle:.1%} of the ideal time"],
        ["the whole run", f"{counted(t.train_iters, 'step')}, {run_tokens} tokens"],
    ]
    return "One step\n" + "\n".join(f"  {name:<16}  {text}" for name, text in rows)
