"""Which sizes must be multiples of which: one table, and one sentence that names the values that would work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megacp.core.config.run import RunConfig, flag, flatten

_TP = "tensor_model_parallel_size"
_MODEL = (
    ("num_attention_heads", _TP),
    ("num_query_groups", _TP),
    ("num_attention_heads", "num_query_groups"),
    ("ffn_hidden_size", _TP),
)
_TOWER = (
    ("vision_image_size", "vision_patch_size"),
    ("vision_ffn_hidden_size", _TP),
    ("connector_ffn_hidden_size", _TP),
    ("vision_num_attention_heads", _TP),
    ("vision_num_query_groups", _TP),
    ("vision_num_attention_heads", "vision_num_query_groups"),
    ("connector_num_attention_heads", _TP),
    ("connector_num_query_groups", _TP),
    ("connector_num_attention_heads", "connector_num_query_groups"),
)
"""The first field is a multiple of the second; a field of None is derived from another one that has a row."""


class Multiple(NamedTuple):
    """`number` must be a multiple of `divisor`; the others are words of the message, `{near}` the next multiples."""

    name: str
    number: int
    of: str
    divisor: int
    advice: str = "use {near}"


def multiple_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """What is no multiple of what it has to be."""
    for row in _rows(config, world):
        if row.number % row.divisor > 0:
            below, above = row.number // row.divisor * row.divisor, -(-row.number // row.divisor) * row.divisor
            near = f"{below} or {above}" if below else f"{above}"
            yield f"{row.name} is no multiple of {row.of}: {row.advice.format(near=near)}"


def _rows(config: RunConfig, world: int) -> Iterator[Multiple]:
    values, m = flatten(config), config.model
    yield from _over_the_grid(config, world)
    if m.kv_channels is None:
        of = f"--num-attention-heads {m.num_attention_heads}"
        advice = "use {near}, or give the width of a head with --kv-channels"
        yield Multiple(f"--hidden-size {m.hidden_size}", m.hidden_size, of, m.num_attention_heads, advice)
    for name, by in _MODEL + (_TOWER if config.vision.vision_num_layers > 0 else ()):
        number, divisor = values[name], values[by]
        if isinstance(number, int) and isinstance(divisor, int):  # neither None nor out of range
            yield Multiple(f"{flag(name)} {number}", number, f"{flag(by)} {divisor}", divisor)


def _over_the_grid(config: RunConfig, world: int) -> Iterator[Multiple]:
    p, t = config.parallel, config.training
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    ranks, dp = config.model_ranks, config.data_parallel_size(world)
    advice = (
        "start {near} ranks, or change --tensor-model-parallel-size, --pipeline-model-parallel-size or "
        "--context-parallel-size"
    )
    yield Multiple(f"a world of {world} ranks", world, f"tp {tp} x pp {pp} x cp {cp} = {ranks}", ranks, advice)
    if world % ranks == 0:
        packs = t.micro_batch_size * dp
        of = f"--micro-batch-size {t.micro_batch_size} x dp {dp} = {packs} (dp = {world} ranks / {ranks})"
        yield Multiple(f"--global-batch-size {t.global_batch_size}", t.global_batch_size, of, packs)
    chunks = 2 if p.cp_layout not in ("contiguous", "balanced") and cp > 1 else 1
    factors = [f"2 (chunks a rank of --cp-layout {p.cp_layout})"] if chunks == 2 else []
    factors.append(f"--context-parallel-size {cp}")
    sharded = tp if p.sequence_parallel else 1
    factors += [f"--tensor-model-parallel-size {tp} (--sequence-parallel)"] if sharded > 1 else []
    of, length = f"{' x '.join(factors)} = {chunks * cp * sharded}", config.data.seq_length
    yield Multiple(f"--seq-length {length}", length, of, chunks * cp * sharded)
