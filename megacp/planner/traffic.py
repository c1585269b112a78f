"""Bytes that one rank sends in one training step over each axis: what `make bench` puts beside the measured bytes.

Key property: pure arithmetic on the config, equal to the byte to what the collectives count (tested on real ranks), as
long as parameters need no padding in their buckets: sizes that are multiples of 64 x dp x cp. Rejected: asymptotic
terms, which cannot tell a doubled message from a formula that forgot one.

Symbols: t tokens of a row on this rank (the padded row / cp), h hidden size, s bytes of an element of `--dtype`, w of a
gradient (fp32 or wider). A collective over n ranks on a tensor of B bytes, gathered or before its reduction, sends
(n - 1) / n x B from each rank. Payload only: no headers, nothing of what gloo itself sends around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacp.config.run import RunConfig
from megacp.planner.costs import embedding_parameters
from megacp.planner.memory import BYTES, accumulation_bytes, stage_parameters

SMALL_ALL_REDUCE = 16_384
"""Elements up to which a gloo all-reduce is an all-gather and a local sum (as in distributed/collectives)."""
_AGREEMENT = 8
"""Float64 numbers that each rank tells all others before a step."""


@dataclass(frozen=True)
class StageTraffic:
    """Bytes sent in one step by a rank of one pipeline stage."""

    tp: int
    cp: int
    pp: int
    dp_cp: int
    """Gradients and updated parameters, over dp x cp together."""
    embedding: int
    """Between the two copies of a tied embedding."""
    world: int
    """What all ranks agree on."""

    @property
    def total(self) -> int:
        """Sum over the axes."""
        return self.tp + self.cp + self.pp + self.dp_cp + self.embedding + self.world


def stage_traffic(
    config: RunConfig, world_size: int, stage: int, chunks: Sequence[range], rows: Sequence[int]
) -> StageTraffic:
    """Bytes of a rank of `stage` that holds the layers `chunks`, for microbatches of `rows` padded tokens each.

    Without recomputation, or with `selective` (which repeats no message); ValueError for `full`.
    """
    if config.training.recompute_granularity == "full":
        raise ValueError("--recompute-granularity full repeats messages of the forward pass: no formula knows it")
    return StageTraffic(
        tp=tensor_bytes(config, world_size, chunks, rows),
        cp=context_bytes(config, chunks, rows),
        pp=pipeline_bytes(config, chunks, rows),
        dp_cp=gradient_bytes(config, world_size, stage, chunks),
        embedding=embedding_bytes(config, world_size, stage),
        world=world_bytes(world_size),
    )


def all_reduce_bytes(elements: int, size: int, element_bytes: int) -> int:
    """An all-reduce: small ones send the whole tensor to every peer, (n - 1) B; large ones 2 (n - 1) / n B."""
    if elements <= SMALL_ALL_REDUCE:
        return (size - 1) * elements * element_bytes
    return 2 * elements * (size - 1) // size * element_bytes


def tensor_bytes(config: RunConfig, world_size: int, chunks: Sequence[range], rows: Sequence[int]) -> int:
    """Over tp, with V = (tp - 1) / tp x t h s for one row.

    With sequence parallelism a layer has two column linears (forward a gather, backward a gather and a reduce-scatter:
    3 V each) and two row linears (a reduce-scatter, backward a gather: 2 V each): 10 V. The embedding is a
    reduce-scatter and its gather: 2 V; the head a column linear: 3 V. Gradients of the norms (and of row linears'
    biases) are partial over tp: one all-reduce of this rank's slice of them. Without sequence parallelism a layer has
    four all-reduces of t h elements, the embedding and the head one each, and no norm is partial (per-head q/k norms
    are).
    The loss exchanges two wide numbers a token with every peer: (tp - 1) 2 t w.
    """
    model, p = config.model, config.parallel
    tp, size, wide = p.tensor_model_parallel_size, BYTES[config.training.dtype], accumulation_bytes(config)
    if tp == 1:
        return 0
    layers = sum(len(chunk) for chunk in chunks)
    first = any(chunk.start == 0 for chunk in chunks)
    last = any(chunk.stop == model.num_layers for chunk in chunks)
    total = 0
    for row in rows:
        tokens = row // p.context_parallel_size
        if p.sequence_parallel:
            volume = tokens * model.hidden_size // tp * (tp - 1) * size
            total += (10 * layers + 2 * first + 3 * last) * volume
        else:
            total += (4 * layers + first + last) * all_reduce_bytes(tokens * model.hidden_size, tp, size)
        total += last * (tp - 1) * 2 * tokens * wide
    partial = layers * model.qk_layernorm * 2 * model.head_dim
    if p.sequence_parallel:
        partial += model.hidden_size * (layers * (2 + model.add_attention_output_bias + model.add_mlp_bias) + last)
    shard = partial // (config.data_parallel_size(world_size) * p.context_parallel_size)
    return total + all_reduce_bytes(shard, tp, wide)


def context_bytes(config: RunConfig, chunks: Sequence[range], rows: Sequence[int]) -> int:
    """Over cp, with E = 2 t (groups / tp) d elements of K and V on this rank, per layer and row.

    p2p: K/V go cp - 1 steps round the ring in forward and again in backward, their gradients cp steps (the last one
    brings them home): 2 (cp - 1) E s + cp E w. all_gather: gathered in forward and in backward, gradients
    reduce-scattered: 2 (cp - 1) E s + (cp - 1) E w.
    """
    model, p = config.model, config.parallel
    cp, size, wide = p.context_parallel_size, BYTES[config.training.dtype], accumulation_bytes(config)
    if cp == 1:
        return 0
    layers = sum(len(chunk) for chunk in chunks)
    width = 2 * model.query_groups * model.head_dim // p.tensor_model_parallel_size
    elements = width * sum(row // cp for row in rows)
    home = {"p2p": cp, "all_gather": cp - 1}[p.cp_comm_type]
    return layers * elements * (2 * (cp - 1) * size + home * wide)


def pipeline_bytes(config: RunConfig, chunks: Sequence[range], rows: Sequence[int]) -> int:
    """Over pp: hidden states t h s (/ tp with sequence parallelism) of each row, forward from every chunk but the
    model's last, their gradients backward from every chunk but the model's first.
    """
    model, p = config.model, config.parallel
    if p.pipeline_model_parallel_size == 1:
        return 0
    ways = sum((chunk.start > 0) + (chunk.stop < model.num_layers) for chunk in chunks)
    parts = p.context_parallel_size * (p.tensor_model_parallel_size if p.sequence_parallel else 1)
    hidden = sum(row // parts * model.hidden_size for row in rows)
    return ways * hidden * BYTES[config.training.dtype]


def gradient_bytes(config: RunConfig, world_size: int, stage: int, chunks: Sequence[range]) -> int:
    """Over dp x cp (R ranks) for n parameters on this rank: gradients are reduce-scattered, (R - 1) / R n w, and
    updated parameters gathered, (R - 1) / R n s. Once a step, however many microbatches it has.
    """
    ranks = config.data_parallel_size(world_size) * config.parallel.context_parallel_size
    share = stage_parameters(config, stage, chunks) // ranks
    return (ranks - 1) * share * (BYTES[config.training.dtype] + accumulation_bytes(config))


def embedding_bytes(config: RunConfig, world_size: int, stage: int) -> int:
    """Between first and last stage of a tied model: one all-reduce of the 1 / R slice of the embedding's gradient."""
    model, p = config.model, config.parallel
    last = p.pipeline_model_parallel_size - 1
    if model.untie_embeddings_and_output_weights or last == 0 or stage not in (0, last):
        return 0
    ranks = config.data_parallel_size(world_size) * p.context_parallel_size
    shard = embedding_parameters(model, p.tensor_model_parallel_size) // ranks
    return all_reduce_bytes(shard, 2, accumulation_bytes(config))


def world_bytes(world_size: int) -> int:
    """To each of the other ranks, in float64: what is agreed on before the step, the gradient norm, the loss."""
    return (world_size - 1) * (_AGREEMENT + 2) * 8
