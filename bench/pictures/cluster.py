"""What `balanced` and dynamic context parallelism are worth on a mixed dataset, by drawn steps of large clusters.

`python -m bench.pictures.cluster` draws the steps (minutes) and writes the figures beside this file; the picture is of
them. Every second pack has images and videos, the others texts of a long tail.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from bench.mixed_rows import mixed_row
from bench.pictures import style
from megacp.attention.ops.mask import Metadata
from megacp.dry_run.packs import sample_of
from megacp.engine.checks import require
from megacp.engine.config.cli import parse
from megacp.engine.config.run import Value, with_values
from megacp.engine.rows.shard import mask_metadata
from megacp.plan.cluster import Trouble, simulate
from megacp.plan.hardware import hardware

FIGURES = Path(__file__).with_suffix(".json")
SIZES = Path(__file__).parents[2] / "examples" / "molmo2_8b.yaml"
PACKS, WORLDS = 48, (1024, 2048, 4096, 8192, 16_384)
LENGTHS = {36_864: 4, 131_072: 16}
"""Tokens of a pack, and cp ranks that share it, beside two of tp."""
TROUBLE = Trouble(slow_ranks=1e-4, slow_factor=1.2)
EXCHANGE: dict[str, Value] = {"cp_layout": "balanced", "cp_comm_type": "kv_exchange"}
VARIANTS: dict[str, tuple[str, dict[str, Value]]] = {
    "contiguous, p2p": (style.GREY, {"cp_layout": "contiguous"}),
    "zigzag, p2p": (style.SKY, {"cp_layout": "zigzag"}),
    "balanced, p2p": (style.BLUE, {"cp_layout": "balanced"}),
    "balanced, kv_exchange": (style.PURPLE, EXCHANGE),
    "the same, dynamic": (style.GREEN, {**EXCHANGE, "dynamic_context_parallel": True}),
}


def _texts(tokens: int, seed: int) -> Metadata:
    """Documents of a long tail: half have under 1,800 tokens, few fill the pack."""
    lengths = np.clip(np.random.default_rng(seed).lognormal(7.5, 1.5, tokens // 32), 32, tokens).astype(int)
    return Metadata.of_documents(np.repeat(np.arange(len(lengths)), lengths)[:tokens])


def measure() -> dict[str, list[list[float]]]:
    """Mean, 95th and 99th of 100 steps, in seconds, for each number of GPUs, by tokens and variant."""
    found: dict[str, list[list[float]]] = {}
    for tokens, cp in LENGTHS.items():
        config = parse(["--config", str(SIZES), "--seq-length", str(tokens), "--dry-run"], "cluster")
        sizes: dict[str, Value] = {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": cp,
            "recompute_granularity": "selective",
        }
        config = with_values(config, {**sizes, "vision_planned_crops": tokens // 288})  # half of the tokens
        packs = [_texts(tokens, n) if n % 2 else mask_metadata(mixed_row(tokens, n)) for n in range(PACKS)]
        sample = sample_of(config, packs)
        for name, (_, flags) in VARIANTS.items():
            found[f"{tokens:,} tokens, {name}"] = rows = []
            for world in WORLDS:
                # two packs a replica; optimizer states in groups of 256 ranks, since a ring of thousands takes seconds
                spread = {"global_batch_size": world // cp, "num_distributed_optimizer_instances": world // 512}
                run = with_values(config, {**flags, **spread})
                require(run, world)
                steps = simulate(run, world, hardware("h100", "infiniband"), sample, TROUBLE)
                rows.append([round(float(x), 4) for x in (steps.mean(), *np.percentile(steps, (95, 99)))])
    return found


def draw_cluster() -> Figure:
    """Bars of mean steps; whiskers go to the step under which 99 of 100 are."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    figure, panels = plt.subplots(1, len(LENGTHS), figsize=(13.6, 5.6))
    places = np.arange(len(WORLDS))
    for axes, (tokens, cp) in zip(panels, LENGTHS.items(), strict=True):
        for number, (name, (color, _)) in enumerate(VARIANTS.items()):
            mean, _, tail = np.array(figures[f"{tokens:,} tokens, {name}"]).T
            axes.bar(places + 0.16 * number, mean, 0.15, color=color, yerr=[0 * tail, tail - mean], label=name)
        axes.set_xticks(places + 0.32, [f"{world:,}" for world in WORLDS], fontsize=12)
        axes.set_title(f"packs of {tokens:,} tokens, tp 2, cp {cp}", fontsize=13)
        axes.set_xlabel("H100 GPUs, two packs a replica in each step", fontsize=12)
        style.quiet(("top", "right"), axes)
    panels[0].set_ylabel("seconds of a step", fontsize=12)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=5, frameon=False, fontsize=12)
    style.title(figure, "A step of an 8B model on a mixed dataset: the mean, and 99 of 100", 0.96)
    figure.subplots_adjust(left=0.055, right=0.985, top=0.86, bottom=0.2)
    return figure


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
