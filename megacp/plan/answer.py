"""The text of a plan: the best layouts, where memory and time of the first go, what would change it, its flags."""

from __future__ import annotations

import json
from collections.abc import Sequence

import yaml

from megacp.core.config.run import RunConfig, with_values
from megacp.core.layers.table import Share
from megacp.core.models import costs
from megacp.core.storage.wording import human_count
from megacp.plan.hardware import Hardware
from megacp.plan.memory import PHASES
from megacp.plan.packs import PackSample
from megacp.plan.report import table
from megacp.plan.search import Candidate, fullest
from megacp.plan.times import StepTime

BEST = 5
"""Layouts that are shown."""
_BAR = 50
"""Characters of a whole bar."""


def tokens_a_second(layout: Candidate, world_size: int) -> float:
    """Tokens/s of one GPU."""
    config = layout.config
    return config.training.global_batch_size * config.data.seq_length / layout.time.total / world_size


def utilisation(layout: Candidate, world_size: int, hardware: Hardware, sample: PackSample) -> float:
    """FLOPs of the model, attention's backward counted twice its forward, over what the GPUs could do meanwhile."""
    config = layout.config
    packs, length = config.training.global_batch_size, config.data.seq_length
    areas = [area for area in costs.layer_areas(config.model, length) if area]
    mean = int(packs * sample.area * sum(areas) / max(1, len(areas)))
    flops = costs.text_flops(config, packs * length, mean)
    flops += packs * costs.vision_flops(config, *costs.planned_images(config), published=True)
    return flops / layout.time.total / world_size / hardware.peak


def words(config: RunConfig, world_size: int) -> str:
    """A layout in a line."""
    p, t = config.parallel, config.training
    axes = {name: getattr(config.grid_shape(world_size), name) for name in ("dp", "tp", "pp", "cp", "ep")}
    found = [f"{name} {size}" for name, size in axes.items() if size > 1] or ["one rank"]
    if p.num_virtual_stages_per_pipeline_rank > 1:
        found.append(f"{p.num_virtual_stages_per_pipeline_rank} chunks")
    found += ["zero bubble"] * (p.pipeline_schedule == "zero_bubble")
    found += [str(p.cp_comm_type)] * (p.context_parallel_size > 1)
    if p.data_parallel_sharding_strategy == "optim_grads_params":
        copies = p.num_distributed_optimizer_instances
        found.append("all sharded" + f" in {copies} copies" * (copies > 1))
    found.append(f"{t.recompute_granularity} recompute" if t.recompute_granularity != "none" else "no recompute")
    found += [f"offload {t.activation_offload:g}"] * (t.activation_offload > 0)
    found += [f"micro batch {t.micro_batch_size}"] * (t.micro_batch_size > 1)
    return ", ".join(found)


def bound_by(time: StepTime) -> str:
    """What a step spends most on beside its work."""
    others = {name: seconds for name, seconds in vars(time).items() if name != "compute"}
    name = max(others, key=lambda term: others[term])
    return f"{name} {others[name] / time.total:.0%}"


def bar(parts: dict[str, float], whole: float, unit: str) -> list[str]:
    """A line for each part that is a hundredth of the whole."""
    shown = {name: value for name, value in parts.items() if value >= whole / 100}
    return [
        f"  {name:<12}{'#' * round(_BAR * value / whole):<{_BAR}} {value:.3g} {unit}" for name, value in shown.items()
    ]


def longest_row(layout: Candidate, world_size: int, hardware: Hardware) -> int:
    """Tokens of the longest row, of those twice and half as long, that still fits under this layout."""
    tokens, fits = layout.config.data.seq_length, layout.gib <= hardware.memory
    while True:
        trial = tokens * 2 if fits else tokens // 2
        config = with_values(layout.config, {"seq_length": trial})
        if (fullest(config, world_size).total <= hardware.memory * 2**30) != fits or Share(config).rows < 2:
            return tokens if fits else trial
        tokens = trial


def flags(layout: Candidate) -> str:
    """What was chosen, as YAML that `--config` takes."""
    defaults = vars(RunConfig().parallel) | vars(RunConfig().training)
    chosen = {name: value for name, value in layout.chosen.items() if value != defaults[name]}
    return yaml.safe_dump(chosen, sort_keys=False) if chosen else "{}\n"


def as_json(found: Sequence[Candidate], world_size: int, hardware: Hardware, sample: PackSample) -> str:
    """The first layouts as JSON: flags, seconds and bytes by term."""
    shown = [
        {
            "flags": dict(one.chosen),
            "seconds": vars(one.time) | {"total": one.time.total},
            "bytes": vars(one.memory) | {"total": one.memory.total},
            "fits": one.verdict(hardware),
            "tokens_per_second_per_gpu": tokens_a_second(one, world_size),
            "utilisation": utilisation(one, world_size, hardware, sample),
        }
        for one in found[:BEST]
    ]
    return json.dumps(shown, indent=2) + "\n"


def plan_text(found: Sequence[Candidate], world_size: int, hardware: Hardware, sample: PackSample) -> str:
    """The plan, of layouts in the order of `search`."""
    best, fitting = found[0], [layout for layout in found if layout.gib <= hardware.memory]
    config = best.config
    size = human_count(costs.run_parameters(config))
    lines = [
        f"{len(found):,} legal layouts of {size} parameters on {world_size:,} GPUs of {hardware.memory:g} GiB, "
        f"{len(fitting):,} fit; rows of {config.data.seq_length:,} tokens with {sample.area:.2f} of the attention of a "
        "causal document",
        f"Nominal times: no machine was measured ({hardware.source})",
        "",
    ]
    head = ["", "layout", "s/step", "tokens/s/GPU", "MFU", "GiB", "fits", "lost to"]
    body = [
        [
            str(place),
            words(one.config, world_size),
            f"{one.time.total:.3g}",
            f"{tokens_a_second(one, world_size):,.0f}",
            f"{utilisation(one, world_size, hardware, sample):.0%}",
            f"{one.gib:.1f}",
            one.verdict(hardware),
            bound_by(one.time),
        ]
        for place, one in enumerate(found[:BEST], 1)
    ]
    lines += [table([head, *body], left=2), ""]
    if not fitting:
        lines.append(f"None fits: the first row needs least. {smallest_change(found, world_size, hardware)}")
    peaks = best.memory.peaks
    phase = max(peaks, key=lambda name: peaks[name])
    held = {name: count / 2**30 for name, count in vars(best.memory).items()}
    lines += [f"Memory of the fullest rank under 1, in {phase}, of {hardware.memory:g} GiB:"]
    lines += bar({name: held[name] for name in PHASES[phase]}, hardware.memory, "GiB")
    lines += ["", f"A step under 1, of {best.time.total:.3g} s:"]
    lines += bar(vars(best.time), best.time.total, "s")
    lines += ["", f"Longest row under 1: {longest_row(best, world_size, hardware):,} tokens", "", flags(best).rstrip()]
    return "\n".join(lines) + "\n"


def smallest_change(found: Sequence[Candidate], world_size: int, hardware: Hardware) -> str:
    """How many GPUs as these hold one of the layouts, by more data-parallel ranks; else the row that fits."""
    smallest = {one.config.parallel.data_parallel_sharding_strategy: one.config for one in reversed(found)}
    for factor in (2, 4, 8, 16):
        for config in smallest.values():
            larger = with_values(config, {"global_batch_size": config.training.global_batch_size * factor})
            if fullest(larger, world_size * factor).total <= hardware.memory * 2**30:
                return f"On {world_size * factor:,} GPUs this fits: {words(larger, world_size * factor)}."
    return f"On these GPUs its rows may have {longest_row(found[0], world_size, hardware):,} tokens."
