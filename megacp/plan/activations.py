"""Activations and work of blocks on one rank: what a microbatch keeps for its backward, and what one block needs then.

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), table 2,
with the tensors that our blocks save. Per layer and token, in elements of the model's dtype (h hidden, f FFN, a
heads, g query groups, d head width; tp' is tp with sequence parallelism, else 1):

    inputs of both norms and their outputs       4 h / tp', and one wide number per norm and token
    q, k, v as one product                       (a + 2 g) d / tp     (a view of v keeps the product whole)
    q, k after the rotary embedding              (a + g) d / tp       (+ a + g wide numbers / tp with q/k norm,
                                                                       2 with one over all heads)
    attention output, wide log-sum-exp           a d / tp, a / tp
    gate and up, SwiGLU's output                 3 f / tp
    dropout, when there is any                   2 h / tp' bytes

Norms after attention and MLP keep as much: inputs of the products, and their outputs as inputs of the norms; but
`selective` finds none of these to compute again. Norms in both places keep the inputs of all four. A layer without
rotary embedding keeps q and k as they are. A frozen product keeps no input, unless a low-rank pair beside it does,
which adds its rank a token.

"Wide" is fp32, float64 in a float64 model. There is no S x S term: attention saves the log-sum-exp per row
(FlashAttention). `selective` computes the outputs of the norms and of SwiGLU again; `full` keeps one input per block,
and one block's activations while its backward runs. `--mlp-chunk-tokens` leaves of the MLP its input alone, and the
norm's output, gate, up and SwiGLU of one tile while its backward runs. A pipeline stage holds the activations of every
microbatch in flight: stages - stage under 1F1B (Narayanan et al. 2021), 2 (stages - stage - 1) + (chunks - 1) stages +
1 chunks when interleaved. `zero_bubble` adds inputs and output gradients of the products whose weight gradients
wait, `stage` times (a microbatch and chunk each):

    qkv, output, gate and up, down               2 h / tp' + 2 h + (2 a + 2 g) d / tp + 3 f / tp

Blocks of `--activation-offload` keep all of this on the host, except for the input that a
pipeline holds; on the device are at least two blocks at once: one at work, and one on its way.
"""

from __future__ import annotations

import math

from megacp.core.config.model import ModelConfig
from megacp.core.config.run import RunConfig
from megacp.core.layers.gated_delta import CHUNK
from megacp.core.layers.stack import layers_of
from megacp.core.models.costs import WINDOW, connector_ffn, encoders, planned_images, tokens_per_rank
from megacp.core.pipeline_parallel.schedules import defers

MATH_BLOCK = 1024
"""Query rows of one block of the `math` kernel."""


def in_flight(config: RunConfig, stage: int, world_size: int) -> int:
    """Most chunk activations that a stage holds at once: forwards before their backward has begun."""
    p, microbatches = config.parallel, config.num_microbatches(world_size)
    chunks, stages = p.num_virtual_stages_per_pipeline_rank, p.pipeline_model_parallel_size
    before = stages - stage - 1
    warmup = before if chunks == 1 else 2 * before + (chunks - 1) * stages
    return min(warmup + 1, microbatches * chunks)


def deferred_backwards(config: RunConfig, stage: int, world_size: int) -> int:
    """Most backwards of a chunk whose weight gradients a stage defers."""
    p = config.parallel
    if p.pipeline_schedule != "zero_bubble" or not defers(stage, p.num_virtual_stages_per_pipeline_rank):
        return 0
    return min(stage, config.num_microbatches(world_size) * p.num_virtual_stages_per_pipeline_rank)


def layer_deferred(config: RunConfig, layer: int = 0) -> int:
    """Bytes that the weight gradients of one layer keep while they wait."""
    model, p, tokens = config.model, config.parallel, tokens_per_rank(config)
    mixer = layers_of(model)[layer].mixer.linears(model)
    heads = mixer["output"].inputs + sum(linear.outputs for linear in mixer.values() if linear.cut == "rows")
    sharded = tokens * (heads + 3 * model.ffn_hidden_size) // p.tensor_model_parallel_size
    elements = 2 * residual_elements(config) + 2 * tokens * model.hidden_size + sharded
    return elements * config.training.element_bytes * ("text" not in config.frozen_parts)


def in_flight_rows(config: RunConfig, world_size: int) -> int:
    """Most microbatches between forward and backward of their first chunk on the first stage."""
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank
    held, microbatches = in_flight(config, 0, world_size), config.num_microbatches(world_size)
    # interleaved, the chunks of a stage take turns in groups of as many microbatches as there are stages
    return min(held if chunks == 1 else 2 * config.parallel.pipeline_model_parallel_size, microbatches)


def residual_elements(config: RunConfig) -> int:
    """Elements of a block's input on one rank."""
    p = config.parallel
    sharers = p.tensor_model_parallel_size if p.sequence_parallel else 1
    return tokens_per_rank(config) * config.model.hidden_size // sharers


def tile_work(config: RunConfig) -> int:
    """Bytes of one tile of the MLP while its backward runs; 0 where the MLP runs over the row at once."""
    model, p, t = config.model, config.parallel, config.training
    tp = p.tensor_model_parallel_size
    tokens = min(t.mlp_chunk_tokens, tokens_per_rank(config))
    rows = tokens // (tp if p.sequence_parallel else 1)
    elements = rows * model.hidden_size + 3 * tokens * model.ffn_hidden_size // tp
    return elements * t.element_bytes + rows * t.accumulation_bytes


def layer_activations(config: RunConfig, granularity: str, layer: int = 0) -> int:
    """Bytes one layer keeps for the backward of one microbatch on one rank, under a recompute granularity."""
    model, p = config.model, config.parallel
    tp, size, tokens = p.tensor_model_parallel_size, config.training.element_bytes, tokens_per_rank(config)
    residual = residual_elements(config)
    if granularity == "full":
        return residual * size
    heads, groups, head_dim = model.num_attention_heads, model.query_groups, model.head_dim
    cheap = granularity != "selective"  # the outputs that selective recomputation makes again
    gated = model.attention_output_gate
    # inputs of the q/k norms and the gate, else v alone
    fused = heads * (1 + gated) + 2 * groups if gated or model.qk_layernorm != "off" else groups
    sharded = (fused + (2 + gated * cheap) * heads + groups) * head_dim  # rotated q and k, the output, and gated
    sharded += int((key_value_share(config) - 1) * 2 * groups * head_dim)
    if heads_group(config) > 1:
        sharded += heads * head_dim  # the output on both sides of the swap
    wide_heads = heads + (model.qk_layernorm == "head") * (heads + groups)
    if layers_of(model)[layer].has_state:
        sharded, wide_heads = _state_columns(model, layer, cheap)
    tiled = config.training.mlp_chunk_tokens > 0
    sharded += (3 if cheap else 2) * model.ffn_hidden_size * (not tiled)
    rows, after, both = residual // model.hidden_size, *(model.norm_position == word for word in ("after", "both"))
    dropout_masks = 2 * residual if model.hidden_dropout > 0 else 0
    norms = 4 if after else 2 * both + (4 - tiled if cheap else 2)
    elements = norms * residual + tokens * sharded // tp
    # what the first products of pairs give, `rank` a token and pair; their dropout makes anew what they are given
    dropped, asked = 0, set(model.lora_linears)
    kept = [name for name in model.lora_linears if not (tiled and name in ("gate", "up", "down"))]
    elements += model.lora_rank * sum(rows if name in ("output", "down") else tokens for name in kept)
    if model.lora_dropout > 0:
        columns = sum(not asked.isdisjoint(linears) for linears in (("q", "k", "v"), ("gate", "up")))
        narrow = sum(layers_of(model)[layer].linears(model)[name].inputs for name in asked & {"output", "down"})
        dropped = columns * residual + tokens // tp * narrow  # its masks have as many bytes
    elements += dropped - sum(_left_out(config, granularity))
    wide_elements = (2 + 2 * both - (tiled and not after)) * rows + tokens * wide_heads // tp
    if layers_of(model)[layer].has_state:
        wide_elements += _states(config) + 2 * model.linear_num_value_heads // tp  # and the rates of its heads
    else:
        wide_elements += 2 * tokens * (model.qk_layernorm == "all_heads")
    return elements * size + wide_elements * config.training.accumulation_bytes + dropout_masks + dropped


def _state_columns(model: ModelConfig, layer: int, cheap: bool) -> tuple[int, int]:
    """Elements and wide ones that a gated delta rule keeps per token: the product of its projection, what the
    convolution gives, the rates of writing, what is read, and that normed and gated; the logs of the decay and what
    they are made of, and a scale for each head.
    """
    linears, heads = layers_of(model)[layer].mixer.linears(model), model.linear_num_value_heads
    projected, channels = (sum(linears[name].outputs for name in names) for names in ("qkvzba", "qkv"))
    return projected + channels + heads + (1 + cheap) * linears["output"].inputs, 4 * heads


def _states(config: RunConfig) -> int:
    """Elements of the states before all chunks of a rank, as if documents and ranks ended where chunks do."""
    model, heads = config.model, config.model.linear_num_value_heads // config.parallel.tensor_model_parallel_size
    chunks = -(-tokens_per_rank(config) // CHUNK)
    return chunks * heads * model.linear_key_head_dim * model.linear_value_head_dim


def _read_again(config: RunConfig, *linears: str) -> bool:
    """Whether the backward of a product with these tensors reads its input: a frozen one does for a low-rank pair, but
    for one with dropout, which reads what is left of it.
    """
    pairs = set(config.model.lora_linears) if config.model.lora_dropout == 0 else set()
    return "text" not in config.frozen_parts or not pairs.isdisjoint(linears)


def _left_out(config: RunConfig, granularity: str) -> tuple[int, int]:
    """Elements that attention and the MLP of a layer do not keep, because nothing reads a product's input again."""
    model, residual = config.model, residual_elements(config)
    cheap, tiled = granularity != "selective", config.training.mlp_chunk_tokens > 0
    kept = cheap or model.norm_position == "after"  # the inputs of qkv, gate and up
    wide = tokens_per_rank(config) * model.ffn_hidden_size // config.parallel.tensor_model_parallel_size
    attention = residual * (kept and not _read_again(config, "q", "k", "v"))
    mlp = residual * (kept and not _read_again(config, "gate", "up"))
    return attention, (mlp + wide * (cheap and not _read_again(config, "down"))) * (not tiled)


def heads_group(config: RunConfig) -> int:
    """Ranks that swap tokens for heads: cp under a2a, the first size under a2a+p2p, else 1."""
    p = config.parallel
    sizes = p.hierarchical_context_parallel_sizes or (1, p.context_parallel_size)
    return {"a2a": p.context_parallel_size, "a2a+p2p": sizes[0]}.get(p.cp_comm_type, 1)


def key_value_share(config: RunConfig) -> float:
    """K/V elements a rank keeps over those of its own tokens: above 1 where several ranks share a group, as each then
    keeps its whole K/V head of more tokens.
    """
    tp, ranks = config.parallel.tensor_model_parallel_size, heads_group(config)
    groups = config.model.query_groups // tp
    return math.lcm(groups, ranks) / groups


def attention_work(config: RunConfig) -> int:
    """Bytes that one layer's attention needs while its backward runs: K/V of others and gradients.

    p2p holds the K/V at hand and the next, with their gradients likewise; all_gather holds the whole row's, and so may
    kv_exchange under a mask that needs all of them; a2a holds the row's keys for its own heads. The kernel `flex`,
    which `auto` takes on CUDA, has what one part among several adds to the queries' gradient, also in the wide dtype,
    and no sums where a rank has all keys; `math`, which `auto` takes there for float64, the scores, weights and their
    gradients of one block of queries.
    """
    model, p = config.model, config.parallel
    tp, size, wide = p.tensor_model_parallel_size, config.training.element_bytes, config.training.accumulation_bytes
    tokens, cp = tokens_per_rank(config), p.context_parallel_size
    key_values = 2 * tokens * model.query_groups * model.head_dim // tp
    ring = {"p2p": cp, "a2a": 1, "a2a+p2p": cp // heads_group(config)}.get(p.cp_comm_type)
    copies = cp if ring is None else min(ring, 2) * key_value_share(config)  # of the K/V of a rank's own tokens
    queries = tokens * model.num_attention_heads * model.head_dim // tp
    kernel, double = config.training.attention_kernel, config.training.dtype == "float64"
    scores = part = 0
    flex = kernel in ("flex", "flex_flash") or (kernel == "auto" and not double)
    if flex and (cp == 1 or p.cp_comm_type == "a2a"):
        wide = size  # one call, which adds nothing up
    elif flex:
        part = queries * (size + wide)
    if kernel == "math" or (kernel == "auto" and double):
        keys = tokens * (1 if p.cp_comm_type == "p2p" else cp)
        scores = 3 * (model.num_attention_heads // tp) * min(MATH_BLOCK, tokens) * keys * wide
    # under a2a the output's gradient and that of the queries exist on both sides
    swapped = queries * (size + wide) if heads_group(config) > 1 else 0
    return int(copies * key_values * (size + wide)) + queries * wide + swapped + scores + part


def product_work(config: RunConfig) -> int:
    """Bytes that the MLP's backward needs at its highest, beyond what the block keeps.

    There SwiGLU's gradient becomes that of gate and up (2 f a token / tp), from the gradient of its output (f). The
    gradient of the block (h) stands beside.

    Its output (f) is gone by then. Over tiles (`tile_work`) the input's gradient stands beside, and sums of the three
    weights' gradients, wide and once more in the model's dtype.
    """
    model, p, t = config.model, config.parallel, config.training
    tp, tokens, residual = p.tensor_model_parallel_size, tokens_per_rank(config), residual_elements(config)
    if t.mlp_chunk_tokens:
        tile = min(t.mlp_chunk_tokens, tokens)
        weights = 3 * model.hidden_size * model.ffn_hidden_size // tp * (t.accumulation_bytes + t.element_bytes)
        widest = 2 * tile * model.ffn_hidden_size // tp
        return (
            tile_work(config)
            + (2 * residual + widest) * t.element_bytes
            + weights * ("text" not in config.frozen_parts)
        )
    # selective keeps no output of SwiGLU that could go, nor does a frozen product
    held = 2 if t.recompute_granularity != "selective" and _read_again(config, "down") else 3
    whole = tokens * model.hidden_size if p.sequence_parallel and tp > 1 else 0  # gathered for the last product
    return (residual + whole + held * tokens * model.ffn_hidden_size // tp) * t.element_bytes


def state_work(config: RunConfig) -> int:
    """Bytes that a gated delta rule needs while its backward runs, for all chunks of C tokens at once: C x C of what is
    solved or seen, rows of keys and values, maps, states, and gradients; the factors are fitted to measured peaks.
    """
    model, heads = config.model, config.model.linear_num_value_heads // config.parallel.tensor_model_parallel_size
    keys, values, chunk = model.linear_key_head_dim, model.linear_value_head_dim, CHUNK
    each = chunk * (3 * chunk + 15 * keys + 8 * values) + 10 * keys * keys // 3 + 3 * keys * values
    return -(-tokens_per_rank(config) // chunk) * heads * each * config.training.accumulation_bytes


def block_work(config: RunConfig, layer: int = 0) -> int:
    """Bytes of one block while its backward runs, beyond what it keeps: what is computed again, and the larger of the
    works of its MLP and of its attention, which begins when the MLP's activations are gone.
    """
    granularity, size = config.training.recompute_granularity, config.training.element_bytes
    again, whole = 0, layer_activations(config, "none", layer)
    if granularity == "full":
        again = whole - layer_activations(config, granularity, layer)
    gone = 0
    if not config.training.mlp_chunk_tokens:
        wide = tokens_per_rank(config) * config.model.ffn_hidden_size // config.parallel.tensor_model_parallel_size
        kept = (2 if granularity == "selective" else 3) * wide + residual_elements(config)
        gone = (kept - _left_out(config, granularity)[1]) * size
    core = state_work(config) if layers_of(config.model)[layer].has_state else attention_work(config)
    attention = core + residual_elements(config) * size - gone
    return again + max(product_work(config), attention)


def block_activations(config: RunConfig, granularity: str) -> tuple[int, int]:
    """Elements of the model's dtype and wide ones that a block of the tower keeps per patch on one rank."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    if granularity == "full":
        return v.vision_hidden_size, 0
    cheap = granularity != "selective"
    heads = v.vision_num_attention_heads
    sharded = 4 * v.vision_hidden_size + (2 if cheap else 1) * v.vision_ffn_hidden_size
    return (4 if cheap else 2) * v.vision_hidden_size + sharded // tp, 4 + heads // tp


def vision_activations(config: RunConfig, size: int, wide: int, world_size: int) -> tuple[int, int]:
    """Bytes that vision keeps for the backward of one microbatch on a rank of the first stage, and those of one block's
    backward; `size` and `wide` are those of the model's dtype and of statistics. A frozen tower keeps nothing.
    """
    v, granularity = config.vision, config.training.recompute_granularity
    factor, sharers = encoders(config, world_size)
    packs = config.training.micro_batch_size * factor
    crops, pooled = (-(-packs * count // sharers) for count in planned_images(config))
    total = work = 0
    frozen = config.frozen_parts
    if not {"vision", "connector"} <= set(frozen):
        sharded, whole = (2 + 2 * WINDOW) * v.vision_hidden_size + 3 * connector_ffn(config), 2 * WINDOW + 3
        if v.vision_family == "qwen3_5":  # features and those normed and joined, the MLP's two
            sharded, whole = 2 * WINDOW * v.vision_hidden_size, 2 * WINDOW
        sharded //= config.parallel.tensor_model_parallel_size
        total += pooled * (whole * v.vision_hidden_size + sharded) * size  # of a window of patches each
    if "vision" not in frozen and crops:
        patches = crops * v.crop_patches
        kept = v.vision_num_layers * _bytes(config, granularity, size, wide)
        work = patches * (_bytes(config, "none", size, wide) - _bytes(config, granularity, size, wide))
        work += patches * (v.vision_ffn_hidden_size // config.parallel.tensor_model_parallel_size) * size
        total += patches * (kept + (v.patch_dim + 2 * v.vision_hidden_size) * size)
    return total, work


def _bytes(config: RunConfig, granularity: str, size: int, wide: int) -> int:
    elements, statistics = block_activations(config, granularity)
    return elements * size + statistics * wide
