"""Bytes that one rank sends in one training step over each axis: what `make bench` puts beside the measured bytes.

The formulas are arithmetic on the config and equal the collectives' counters to the byte (tested on real ranks). They
hold while parameters need no padding in their buckets: sizes that are multiples of 64 x dp x cp.

Symbols: t tokens of a row on this rank (the padded row / cp), h hidden size. An element of `--dtype` has s bytes, one
of a gradient w (fp32 or wider). A collective over n ranks sends (n - 1) / n x B from each rank. B is the size of its
tensor, gathered or before its reduction. Only payload is counted, neither headers nor what gloo adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.core.config.run import RunConfig
from megacp.core.context_parallel.sizes import Exchanged, layer_bytes
from megacp.core.pipeline_parallel.schedules import Kind, schedule, training_schedule_name, with_parameters
from megacp.core.planner.costs import embedding_parameters
from megacp.core.planner.states import chunk_parts, shares_parameters, sharing_ranks, stage_parameters

_AGREEMENT = 10
"""Float64 numbers that each rank tells all others before a step."""
SMALL_ALL_REDUCE = 16_384
"""Elements up to which a gloo all-reduce is an all-gather and a local sum (as in distributed/collectives)."""


@dataclass(frozen=True)
class StageTraffic:
    """Bytes sent in one step by a rank of one pipeline stage."""

    tp: int
    cp: int
    pp: int
    dp_cp: int
    """Gradients and updated parameters, over dp x cp together; keys and values too when rows are dealt so."""
    embedding: int
    """Between the two copies of a tied embedding."""
    world: int
    """Agreements of all ranks: token counts, gradient norm, loss."""


@dataclass(frozen=True)
class RowImages:
    """The images of one row, counted for one rank."""

    crops: int
    pooled: int
    """Pooled tokens that are encoded here."""
    window: int
    """Patches of a pooled token."""
    arriving: int
    """Features of tokens that are held here."""
    sent: int
    """Features that go to other ranks."""
    received: int
    """Features that come from other ranks."""
    largest: int
    """Most features that one rank encodes."""


@dataclass(frozen=True)
class ContextPlace:
    """The inputs of one rank's bytes over cp besides the config."""

    rank: int = 0
    """On the cp axis: heads may be dealt unevenly."""
    exchanged: tuple[Exchanged, ...] | None = None
    """Of kv_exchange, for each row of the step: the K/V rows that its plan makes this rank send and receive."""
    images: tuple[RowImages, ...] = ()
    """For each row of the step that may hold images."""


FIRST = ContextPlace()


def stage_traffic(
    config: RunConfig,
    world_size: int,
    stage: int,
    chunks: Sequence[range],
    rows: Sequence[int],
    context: ContextPlace = FIRST,
) -> StageTraffic:
    """Bytes of a rank of `stage` that holds the layers `chunks`, for microbatches of `rows` padded tokens each.

    `context` is its place on the cp axis (default: the first). Without recomputation, or with `selective` (which
    repeats no message); ValueError for `full`, and for low-rank pairs over tiles or without one on q, k or v.
    """
    pairs, tile = config.model.lora_linears, config.training.mlp_chunk_tokens
    if pairs and (tile or set(pairs).isdisjoint(("q", "k", "v"))):
        raise ValueError(
            f"--lora-targets {','.join(pairs)}, --mlp-chunk-tokens {tile}: formulas count low-rank pairs with one on "
            "q, k or v, and without tiles"
        )
    if config.training.recompute_granularity == "full":
        raise ValueError("--recompute-granularity full repeats messages of the forward pass, which no formula counts")
    dynamic = config.parallel.dynamic_context_parallel
    if dynamic:  # a row is dealt over dp x cp: as many tokens on a rank as of its share over cp
        rows = [row // config.data_parallel_size(world_size) for row in rows]
    over_context = context_bytes(config, chunks, rows, context)
    images = context.images if stage == 0 else ()
    ranks = config.parallel.context_parallel_size * (config.data_parallel_size(world_size) if dynamic else 1)
    over_context += vision_context_bytes(config, images, ranks)
    return StageTraffic(
        tp=tensor_bytes(config, world_size, chunks, rows) + vision_tensor_bytes(config, images),
        cp=0 if dynamic else over_context,
        pp=pipeline_bytes(config, chunks, rows),
        dp_cp=gradient_bytes(config, world_size, stage, chunks) + (over_context if dynamic else 0),
        embedding=embedding_bytes(config, world_size, stage),
        world=world_bytes(world_size),
    )


def tensor_bytes(config: RunConfig, world_size: int, chunks: Sequence[range], rows: Sequence[int]) -> int:
    """Over tp, with V = (tp - 1) / tp x t h s for one row.

    With sequence parallelism a layer has two column linears (forward a gather, backward a gather and a reduce-scatter:
    3 V each) and two row linears (a reduce-scatter, backward a gather: 2 V each): 10 V. The embedding is a
    reduce-scatter and its gather: 2 V; the head a gather and a reduce-scatter: 2 V. Gradients of the norms (and of row
    linears' biases) are partial over tp: one all-reduce of this rank's slice of them. Without sequence parallelism a
    layer has four all-reduces of t h elements, the embedding and the head one each. No norm is partial then, but
    per-head q/k norms are. With `--mlp-chunk-tokens` the products see tiles: gathered once more in backward (1 V a
    layer), or one of the MLP's all-reduces for each tile. The loss exchanges two wide numbers a token with every peer,
    chunk by chunk: (tp - 1) 2 t w. A q/k norm over all heads sums a wide number a token for q and
    for k, each way.

    Beside low-rank pairs nothing else is trained: a column linear does not gather again (8 V a layer), the embedding
    has no backward, and the first layer's q, k and v send no gradient back. See also `pair_bytes`.
    """
    model, p = config.model, config.parallel
    tp, size, wide = p.tensor_model_parallel_size, config.training.element_bytes, config.training.accumulation_bytes
    if tp == 1:
        return 0
    layers = sum(len(chunk) for chunk in chunks)
    first = any(chunk.start == 0 for chunk in chunks)
    last = any(chunk.stop == model.num_layers for chunk in chunks)
    tile, pairs = config.training.mlp_chunk_tokens, bool(model.lora_linears)
    ends = 0 if pairs else first  # with pairs the embedding's message makes up for the first layer's missing one
    total = 0
    for row in rows:
        tokens = row // p.context_parallel_size
        if p.sequence_parallel:
            volume = tokens * model.hidden_size // tp * (tp - 1) * size
            total += ((8 if pairs else 10 + (tile > 0)) * layers + 2 * ends + 2 * last) * volume
        else:
            whole = all_reduce_bytes(tokens * model.hidden_size, tp, size)
            tiles = [min(tile, tokens - start) for start in range(0, tokens, tile)] if tile else [tokens]
            tiled = sum(all_reduce_bytes(rows * model.hidden_size, tp, size) for rows in tiles)
            total += (2 * layers + ends + last) * whole + 2 * layers * tiled
        total += last * (tp - 1) * 2 * tokens * wide + layers * pair_bytes(config, tokens)
        if model.qk_layernorm and model.qk_layernorm_scope == "all_heads":  # q and k, forward and backward
            total += 4 * layers * all_reduce_bytes(tokens, tp, wide)
    partial = layers * 2 * model.head_dim * (model.qk_layernorm and model.qk_layernorm_scope == "head")
    if p.sequence_parallel:
        partial += model.hidden_size * (layers * (2 + model.add_attention_output_bias + model.add_mlp_bias) + last)
    if "text" in config.frozen_parts:
        partial = layers * partial_of_pairs(config)
    return total + all_reduce_bytes(partial // sharing_ranks(config, world_size), tp, wide)


def pair_bytes(config: RunConfig, tokens: int) -> int:
    """Over tp, of the pairs of a layer: r columns a token and pair, gathered and reduced, or all-reduced one way."""
    model, p = config.model, config.parallel
    tp, size, asked = p.tensor_model_parallel_size, config.training.element_bytes, set(model.lora_linears)
    groups = [len(asked & set(names)) for names in (("q", "k", "v"), ("gate", "up"), ("output",), ("down",))]
    if p.sequence_parallel:
        return 2 * sum(groups) * model.lora_rank * tokens // tp * (tp - 1) * size
    return sum(all_reduce_bytes(tokens * count * model.lora_rank, tp, size) for count in groups if count)


def partial_of_pairs(config: RunConfig) -> int:
    """Elements of a layer's pairs whose gradients are partial over tp: A of column linears, B of row linears."""
    model, sizes = config.model, config.model.linear_sizes
    rows = [sizes[name][1 if name in ("output", "down") else 0] for name in model.lora_linears]
    return model.lora_rank * sum(rows) * config.parallel.sequence_parallel


def context_bytes(config: RunConfig, chunks: Sequence[range], rows: Sequence[int], place: ContextPlace = FIRST) -> int:
    """Over cp: for each layer and row the bytes that its transport sends (`layer_bytes`)."""
    exchanged = place.exchanged or [None] * len(rows)
    sent = (layer_bytes(config, row, place.rank, counts) for row, counts in zip(rows, exchanged, strict=True))
    return sum(len(chunk) for chunk in chunks) * sum(layer.total for layer in sent)


def pipeline_bytes(config: RunConfig, chunks: Sequence[range], rows: Sequence[int]) -> int:
    """Over pp: every chunk but the model's last sends hidden states, every chunk but its first sends gradients. Either
    is t h s bytes for each row (/ tp with sequence parallelism).
    """
    model, p = config.model, config.parallel
    if p.pipeline_model_parallel_size == 1:
        return 0
    ways = sum((chunk.start > 0) + (chunk.stop < model.num_layers) for chunk in chunks)
    parts = p.context_parallel_size * (p.tensor_model_parallel_size if p.sequence_parallel else 1)
    hidden = sum(row // parts * model.hidden_size for row in rows)
    return ways * hidden * config.training.element_bytes


def gradient_bytes(config: RunConfig, world_size: int, stage: int, chunks: Sequence[range]) -> int:
    """Over dp x cp (W ranks that share) for n trained of all N parameters here: a reduce-scatter of gradients sends
    (W - 1) / W n w, a gather of parameters (W - 1) / W n s.

    optim: one of either a step, however many microbatches it has. optim_grads: a reduce-scatter every microbatch.
    optim_grads_params: likewise, and gathers of all N, frozen ones too, as often as `_gathered_parameters` counts.
    Several instances add one all-reduce of this rank's n / W gradients over the copies.
    """
    p, ranks = config.parallel, sharing_ranks(config, world_size)
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    share = stage_parameters(config, chunks, trained=True) // ranks
    microbatches = config.num_microbatches(world_size)
    sums = 1 if p.data_parallel_sharding_strategy == "optim" else microbatches
    gathered = stage_parameters(config, chunks, trained=True)
    if shares_parameters(config, world_size):
        gathered = _gathered_parameters(config, stage, chunks, microbatches)
    copies = all_reduce_bytes(share, p.num_distributed_optimizer_instances, wide)
    return (ranks - 1) * (share * wide * sums + gathered // ranks * size) + copies


def _gathered_parameters(config: RunConfig, stage: int, chunks: Sequence[range], microbatches: int) -> int:
    """Parameters of all gathers of a step under full sharding: a pipeline's schedule says when, else each forward, and
    the backward of what was freed between.
    """
    p = config.parallel
    stages, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    of_chunk = [chunk_parts(config, layers) for layers in chunks]
    if stages == 1:
        return microbatches * sum(part.parameters * (1 + part.gathered_again) for parts in of_chunk for part in parts)
    actions = with_parameters(schedule(training_schedule_name(virtual), stage, stages, microbatches, virtual))
    times = Counter(action.chunk for action in actions if action.kind is Kind.UNSHARD)
    return sum(times[chunk] * part.parameters for chunk, parts in enumerate(of_chunk) for part in parts)


def embedding_bytes(config: RunConfig, world_size: int, stage: int) -> int:
    """Between first and last stage of a tied model: one all-reduce of the 1 / W slice of the embedding's gradient; none
    of a frozen table.
    """
    model, p = config.model, config.parallel
    last = p.pipeline_model_parallel_size - 1
    shared = not (model.untie_embeddings_and_output_weights or "text" in config.frozen_parts)
    if not shared or last == 0 or stage not in (0, last):
        return 0
    shard = embedding_parameters(model, p.tensor_model_parallel_size) // sharing_ranks(config, world_size)
    return all_reduce_bytes(shard, 2, config.training.accumulation_bytes)


def world_bytes(world_size: int) -> int:
    """To each of the other ranks, in float64: what is agreed on before the step, the gradient norm, the loss."""
    return (world_size - 1) * (_AGREEMENT + 2) * 8


def all_reduce_bytes(elements: int, size: int, element_bytes: int) -> int:
    """An all-reduce: small ones send the whole tensor to every peer, (n - 1) B; large ones 2 (n - 1) / n B."""
    if elements <= SMALL_ALL_REDUCE:
        return (size - 1) * elements * element_bytes
    return 2 * elements * (size - 1) // size * element_bytes


def vision_tensor_bytes(config: RunConfig, rows: Sequence[RowImages]) -> int:
    """Over tp, every message an all-reduce. Symbols of a row: c crops of N patches and m pooled tokens of w patches are
    encoded here, k features arrive; h is the tower's hidden size, H the language model's.

    A block of the tower reduces c N h elements twice forward (row linears) and twice backward (column linears). The
    connector reduces m h and m H forward and m h backward. Above a trained tower it also reduces 2 m h (1 + w).
    Sequence parallelism adds k H where features meet tokens. Frozen parts with nothing trained below have no backward.
    """
    v, p = config.vision, config.parallel
    tp, size = p.tensor_model_parallel_size, config.training.element_bytes
    if tp == 1:
        return 0
    frozen = config.frozen_parts
    tower, connector = "vision" not in frozen, not {"vision", "connector"} <= set(frozen)
    narrow, wide = v.vision_hidden_size, config.model.hidden_size
    total = 0
    for row in rows:
        patches = row.crops * v.patches_per_crop * narrow
        messages = [patches] * (2 * v.vision_num_layers * (1 + tower))
        messages += [row.pooled * narrow, row.pooled * wide] + [row.pooled * narrow] * connector
        messages += [2 * row.pooled * narrow, 2 * row.pooled * row.window * narrow] * tower
        encoded = messages if row.crops and row.pooled else []
        added = [row.arriving * wide] * (connector and p.sequence_parallel)
        total += sum(all_reduce_bytes(elements, tp, size) for elements in (*encoded, *added))
    return total


def vision_context_bytes(config: RunConfig, rows: Sequence[RowImages], ranks: int) -> int:
    """Over the ranks that hold a row's tokens: features out, their gradients back unless all below is frozen."""
    size = config.training.element_bytes * config.model.hidden_size
    trained = not {"vision", "connector"} <= set(config.frozen_parts)
    if config.parallel.vision_shards == "replicate":
        return 0
    if config.parallel.vision_feature_exchange == "all_gather":
        return sum((1 + trained) * (ranks - 1) * row.largest * size for row in rows)
    return sum((row.sent + trained * row.received) * size for row in rows)
