"""Memory, waiting times and overlap of other frameworks, as terms that are added to our formulas.

With these terms, published runs of other frameworks test the formulas. Grids, parameters,
schedules, products and messages come from the package. Megatron needs no term, because it stores
the same state between steps as our `optim`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.dry_run.measured import block_memory
from megacp.dry_run.memory import stage_memory, stage_parameters
from megacp.dry_run.packs import PackSample
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.table import tokens_per_rank
from megacp.engine.models import costs
from megacp.engine.pipeline_parallel.schedules import Kind
from megacp.engine.pipeline_parallel.timeline import orders, timeline
from megacp.plan.hardware import GPUS_OF_A_MACHINE, Hardware, hardware
from megacp.plan.search import fullest
from megacp.plan.times import stage_parts, step_time

# Numbers that nanotron keeps per token: inputs and outputs of both norms, q, k and v (joined and
# separate), the output of attention, and the input of its projection; in the MLP gate, up, the
# activation and its product with up. A logit is stored in bfloat16, in float32, as a probability
# and as a gradient. The gathered inputs of both halves of a block remain while the host is ahead of
# the device.
KEPT_HIDDEN, KEPT_MLP, KEPT_LOGIT, KEPT_GATHERED = 12, 4, 12, 2
NARROW_GRADIENT = 2
"""Bytes of each parameter's gradient in addition to its float32 sum."""
BUCKET, WIDE, LOSS_PASSES = 12.5e6, 4, 5
"""Number of elements that nanotron reduces at once, the bytes of each, and the number of times that
its loss reads logits of this width.
"""
# Times in seconds that the code does not explain, read from runs with one row per microbatch.
# BLOCK: the host launches the kernels of a block, forward and backward. BLOCK_APART: the same by
# tp, if the stages are on several machines. WAIT: a tensor-parallel message waits for each machine
# after the first. Each half of the rows gives the same host times to within 5 %.
BLOCK, WAIT = 4.4e-3, 0.65e-3
BLOCK_APART = {1: 4.4e-3, 2: 8e-3, 4: 12e-3, 8: 20e-3, 16: 46e-3, 32: 114e-3}
FLASH_2 = 0.35
"""Fraction of an H100's peak that FlashAttention-2 reaches (FlashAttention-3, Shah et al. 2024).

torchtitan uses it.
"""

SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "vocab_size",
)
SHAPES = {
    "llama 1B": (16, 2048, 32, 32, 8192, 131_072),
    "llama 3B": (28, 3072, 32, 32, 8192, 131_072),
    "llama 8B": (32, 4096, 32, 32, 14336, 131_072),
    "llama 80B": (80, 8192, 64, 64, 28672, 131_072),
    "Llama 3.1 8B": (32, 4096, 32, 8, 14336, 128_256),
    "Llama 3.1 70B": (80, 8192, 64, 8, 28672, 128_256),
    "Llama 3.1 405B": (126, 16384, 128, 8, 53248, 128_256),
    "golden": (12, 512, 8, 8, 2048, 50_257),
    "golden of 6": (6, 512, 8, 8, 2048, 50_257),
}
ONE = PackSample()


@dataclass(frozen=True)
class Row:
    """A published run; a number that was not published is 0.

    `gib` is the peak, except for `golden` models, for which it is the memory between steps.
    """

    framework: str
    model: str
    gpus: int
    dp: int
    tp: int
    pp: int
    vp: int
    cp: int
    shard: str
    seq: int
    mbs: int
    gbs: int
    recompute: str
    note: str
    tok_s_gpu: float
    gib: float
    where: str

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.gbs * self.seq / self.gpus / self.tok_s_gpu

    @functools.cached_property
    def config(self) -> RunConfig:
        """megacp's config for the same training."""
        values: dict[str, Any] = dict(zip(SIZES, SHAPES[self.model], strict=True))
        golden, wide = "golden" in self.model, values["ffn_hidden_size"] > 10_000
        if golden and "swiglu" not in self.note:
            # its MLP has two matrices, and ours has three
            values["ffn_hidden_size"] = values["ffn_hidden_size"] * 2 // 3
        values |= {"seq_length": self.seq, "global_batch_size": self.gbs, "dtype": "bfloat16"}
        # torchtitan splits its batch into rows for the pipeline
        values |= {
            "micro_batch_size": 1 if self.framework == "torchtitan" and self.pp > 1 else self.mbs
        }
        values |= {"tensor_model_parallel_size": self.tp, "sequence_parallel": self.tp > 1}
        values |= {
            "pipeline_model_parallel_size": self.pp,
            "num_virtual_stages_per_pipeline_rank": self.vp or 1,
        }
        values |= {"context_parallel_size": self.cp, "recompute_granularity": self.recompute}
        values |= {
            "untie_embeddings_and_output_weights": wide or "untied" in self.note,
            "cross_entropy_chunk_tokens": 0,
        }
        values |= {
            "data_parallel_sharding_strategy": "optim_grads_params"
            if self.shard == "FSDP"
            else "optim"
        }
        # number of optimizer instances that share no state
        copies = {
            "ZeRO-0": self.dp * self.cp,
            "ZeRO-1 over half": 2,
        }
        return with_values(
            RunConfig(), values | {"num_distributed_optimizer_instances": copies.get(self.shard, 1)}
        )


def published(framework: str) -> list[Row]:
    """Return the rows of a framework from published.csv."""
    lines = Path(__file__).with_name("published.csv").read_text(encoding="utf-8").splitlines()
    kinds = {
        field.name: {"int": int, "float": float, "str": str}[str(field.type)]
        for field in dataclasses.fields(Row)
    }
    found = csv.DictReader(line for line in lines if not line.startswith("#"))
    rows = [
        Row(**{name: kind(row[name] or kind()) for name, kind in kinds.items()}) for row in found
    ]
    return [row for row in rows if row.framework == framework]


def cut(config: RunConfig) -> list[range]:
    """Return the layers of each stage as nanotron divides them.

    A stage is full when the layers so far cost more than its share of the total. The last stages
    may have only the head, or nothing.
    """
    model, stages = config.model, config.parallel.pipeline_model_parallel_size
    layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.ffn_hidden_size
    part = (model.num_layers * layer + model.hidden_size * model.vocab_size) / stages
    ends = [min(int(part * stage // layer) + 1, model.num_layers) for stage in range(1, stages)]
    return [range(*pair) for pair in itertools.pairwise((0, *ends, model.num_layers))]


def block_seconds(row: Row) -> float:
    """Return the seconds in which nanotron's host launches the kernels of a block, both ways."""
    return BLOCK_APART[row.tp] if row.pp > 1 and row.gpus > GPUS_OF_A_MACHINE else BLOCK


def peak(row: Row, here: Hardware) -> float:
    """Return the GiB of nanotron's fullest rank.

    It is on the first stage, which has the most microbatches, or on the last, which has logits.
    """
    config, stages, found = row.config, cut(row.config), []
    model, tokens, size = config.model, row.mbs * row.seq, config.training.element_bytes
    kept = (
        (KEPT_HIDDEN * model.hidden_size + KEPT_MLP * model.ffn_hidden_size)
        * tokens
        / row.tp
        * size
    )
    for stage in {0, row.pp - 1} if stages[-1] else {0}:
        chunks = [stages[stage]]
        memory = stage_memory(config, stage, chunks, row.gpus)
        held: float = memory.weights + memory.gradients + memory.optimizer + memory.messages
        held += memory.activations * kept / block_memory(config, 0).kept
        held += NARROW_GRADIENT * stage_parameters(config, chunks)
        ((parts, *_), *_) = stage_parts(config, row.gpus, here, ONE, [chunks])
        if sum(part.total - part.pp for part in parts) > block_seconds(row) * len(chunks[0]):
            held += (
                KEPT_GATHERED
                * tokens
                * model.hidden_size
                * (1 - 1 / row.tp)
                * size
                * len(chunks[0])
            )
        found.append(held + (stage == row.pp - 1) * KEPT_LOGIT * tokens * model.vocab_size / row.tp)
    return max(found) / 2**30


def step(row: Row, here: Hardware) -> float:
    """Return the seconds of a step of nanotron."""
    config, stages = row.config, cut(row.config)
    tokens, model, size = row.mbs * row.seq, config.model, config.training.element_bytes
    wait = 4 * WAIT * max(0, row.tp // GPUS_OF_A_MACHINE - 1)  # a block's messages, one direction
    send = (
        tokens * model.hidden_size * size / row.tp / here.link(row.pp, row.dp * row.tp)
        if row.pp > 1
        else 0.0
    )
    parts, *_ = stage_parts(
        config, row.gpus, here, ONE, [[layers or range(1)] for layers in stages]
    )
    # Backward hides no message of tensor parallelism, and stages wait for `send`. The loss also
    # reads the float32 logits.
    both_ways = [
        (forward, dataclasses.replace(backward, tp=forward.tp)) for forward, backward in parts
    ]
    seconds = [[part.total - part.pp for part in ways] for ways in both_ways]
    seconds[-1][0] += LOSS_PASSES * WIDE * tokens * model.vocab_size / row.tp / here.bandwidth
    times = []
    for layers, own in zip(stages, seconds, strict=True):
        # an empty stage was computed with one block, which is subtracted here
        block = [0.0 if layers else both / len(stages[0]) for both in seconds[0]]
        started = [block_seconds(row) * len(layers) * share for share in (1 / 3, 2 / 3)]
        there, back = (
            max(both - one + wait * len(layers), least) + send
            for both, one, least in zip(own, block, started, strict=True)
        )
        times.append({Kind.FORWARD: there, Kind.BACKWARD: back, Kind.WEIGHTS: 0.0})
    end = max(spans[-1].stop for spans in timeline(orders(config, row.gpus), 1, times))
    parameters = max(stage_parameters(config, [layers]) for layers in stages if layers)
    # ZeRO-0 sends float32 sums to all ranks during the last backward. Otherwise each rank gets a
    # part of the sums, and parameters return in bfloat16.
    alone = row.shard == "ZeRO-0"
    away = (row.dp - 1) * (WIDE / row.dp / here.ring(row.dp, row.tp) + here.latency / 4 / BUCKET)
    sums = (2 if alone else 1.5) * parameters * away - alone * times[0][Kind.BACKWARD]
    return (
        end
        + max(0.0, sums)
        + parameters / (1 if alone else row.dp) * (4 + 3) * WIDE / here.bandwidth
    )


@functools.cache
def nominal(row: Row) -> tuple[float, float]:
    """Return the seconds of a step of torchtitan or Megatron-Bridge, and the GiB of the fullest
    rank.

    Nothing is fitted to their runs.
    """
    config, here = row.config, hardware("h200" if "h200" in row.note else "h100", "infiniband")
    if "fp8" in row.note:
        here = dataclasses.replace(here, products=2 * here.products)
    attention = 0.0
    if row.framework == "torchtitan":
        flash = FLASH_2 * here.peak
        memory = here.bandwidth * (1 if "h200" in row.note else 2.4 / 3.35)  # an H100 with HBM2e
        here = dataclasses.replace(
            here, attention=dict.fromkeys(here.attention, (flash, flash)), bandwidth=memory
        )
        if row.recompute == "full":  # recomputes attention too, while ours keeps it
            area = row.gbs * config.model.num_layers * costs.causal_area(row.seq)
            attention = 4 * area * config.model.hidden_size / row.gpus / flash
    seconds = step_time(config, row.gpus, here, ONE).total + attention
    # ours overwrites a logit with its gradient, in two bytes
    logits = tokens_per_rank(config) * config.model.vocab_size / row.tp * (KEPT_LOGIT - 2)
    return seconds, (fullest(config, row.gpus).total + logits) / 2**30
