"""Bytes on one rank, term by term: weights, gradients, optimizer state, activations, attention work, head.

Every term knows the axis that shrinks it. Weights and gradients fall with tp and pp; optimizer state also with dp x cp
(ZeRO-1); activations with cp and tp (without sequence parallelism only those inside attention and MLP fall with tp).

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), table 2,
with the tensors that our blocks save. Per layer and token, in elements of the model's dtype (h hidden, f FFN, a
heads, g query groups, d head width; tp' is tp with sequence parallelism, else 1):

    inputs of both norms and their outputs       4 h / tp', and one wide number per norm and token
    q, k, v as one product                       (a + 2 g) d / tp     (a view of v keeps the product whole)
    q, k after the rotary embedding              (a + g) d / tp       (+ a + g wide numbers / tp with q/k norm)
    attention output, wide log-sum-exp           a d / tp, a / tp
    gate and up, SwiGLU's output                 3 f / tp
    dropout, when there is any                   2 h / tp' bytes

"Wide" is fp32, float64 in a float64 model. There is no S x S term: attention saves the log-sum-exp per row
(FlashAttention). `selective` computes the outputs of the norms and of SwiGLU again; `full` keeps one input per block,
and one block's activations while its backward runs. `--mlp-chunk-tokens` leaves of the MLP its input alone, and the
norm's output, gate, up and SwiGLU of one tile while its backward runs. A pipeline stage holds the activations of every
microbatch in flight: stages - stage under 1F1B (Narayanan et al. 2021), 2 (stages - stage - 1) + (chunks - 1) stages +
1 chunks when interleaved. Blocks of `--activation-offload` keep all of this on the host, except for the input that a
pipeline holds; on the device are two of them: one at work, and one on its way.

The estimate leaves out the framework itself, kernels' scratch space, fragmentation and messages in flight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.config.run import RunConfig
from megacp.planner import vision
from megacp.planner.costs import embedding_parameters, head_parameters, layer_parameters, vocabulary_rows

LOSS_WORK = 2**29
"""Most bytes of logits and their gradient under `--cross-entropy-chunk-tokens auto`."""
MATH_BLOCK = 1024
"""Query rows of one block of the `math` kernel."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each term on one rank of a pipeline stage."""

    weights: int
    gradients: int
    """Buckets, and the head's wide weight gradient while it is summed over chunks of tokens."""
    optimizer: int
    activations: int
    attention: int
    """Working space of one layer's attention with its exchange of keys and values over cp."""
    head: int
    """Logits or their gradient for a chunk of tokens, and the final norm; only on the last stage."""
    host: int = 0
    """Activations that wait in host memory; no part of the total."""

    @property
    def total(self) -> int:
        """Sum of all terms on the device."""
        return sum(dataclasses.astuple(self)) - self.host


def stage_parameters(config: RunConfig, stage: int, chunks: Sequence[range], *, trained: bool = False) -> int:
    """Parameters on one tp rank of a pipeline stage that holds the layers `chunks`; `trained`: without frozen ones.

    A tied embedding stands on the first and on the last stage (once where they are one stage); vision on the first.
    """
    model, v, tp = config.model, config.vision, config.parallel.tensor_model_parallel_size
    text = sum(len(layers) for layers in chunks) * layer_parameters(model, tp)
    if stage == 0:
        text += embedding_parameters(model, tp)
    if stage == config.parallel.pipeline_model_parallel_size - 1:
        shared = stage == 0 and not model.untie_embeddings_and_output_weights
        text += model.hidden_size if shared else head_parameters(model, tp)
    parts = [(text, v.freeze_text)]
    if stage == 0:
        parts.append((vision.tower_parameters(config, tp), v.freeze_vision))
        parts.append((vision.connector_parameters(config, tp), v.freeze_connector))
    return sum(count for count, frozen in parts if not (trained and frozen))


def tokens_per_rank(config: RunConfig) -> int:
    """Tokens of a microbatch's row on one cp rank."""
    row = config.training.micro_batch_size * config.data.seq_length
    return -(-row // config.parallel.context_parallel_size)  # dynamic: dp times the packs over dp times the ranks


def in_flight(config: RunConfig, stage: int, world_size: int) -> int:
    """Most chunk activations that a stage holds at once: forwards before their backward has begun."""
    p, microbatches = config.parallel, config.num_microbatches(world_size)
    chunks, stages = p.num_virtual_stages_per_pipeline_rank, p.pipeline_model_parallel_size
    before = stages - stage - 1
    warmup = before if chunks == 1 else 2 * before + (chunks - 1) * stages
    return min(warmup + 1, microbatches * chunks)


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


def offloaded_blocks(config: RunConfig, chunks: Sequence[range]) -> list[int]:
    """Blocks of each chunk of a stage that keep on the host what they save, by `--activation-offload`.

    A part of the stage's blocks is rounded up; the chunks share them evenly, earlier ones first.
    """
    asked, blocks = config.training.activation_offload, sum(map(len, chunks))
    wanted = min(blocks, math.ceil(asked * blocks - 1e-9) if asked < 1 else int(asked))
    counts = []
    for layers in chunks:
        counts.append(-(-wanted * len(layers) // blocks))
        wanted, blocks = wanted - counts[-1], blocks - len(layers)
    return counts


def layer_activations(config: RunConfig, granularity: str) -> int:
    """Bytes one layer keeps for the backward of one microbatch on one rank, under a recompute granularity."""
    model, p = config.model, config.parallel
    tp, size, tokens = p.tensor_model_parallel_size, config.training.element_bytes, tokens_per_rank(config)
    residual = residual_elements(config)
    if granularity == "full":
        return residual * size
    heads, groups, head_dim = model.num_attention_heads, model.query_groups, model.head_dim
    cheap = granularity != "selective"  # the outputs that selective recomputation makes again
    fused = heads + 2 * groups if model.qk_layernorm else groups  # inputs of the q/k norms, else v alone
    sharded = (fused + 2 * heads + groups) * head_dim  # and rotated q and k, and the output
    sharded += int((key_value_share(config) - 1) * 2 * groups * head_dim)
    sharded += heads * head_dim if heads_group(config) > 1 else 0  # the output on both sides of the swap
    tiled = config.training.mlp_chunk_tokens > 0
    sharded += (3 if cheap else 2) * model.ffn_hidden_size * (not tiled)
    wide_heads = heads + model.qk_layernorm * (heads + groups)
    rows = residual // model.hidden_size
    dropout_masks = 2 * residual if model.hidden_dropout > 0 else 0
    elements = (4 - tiled if cheap else 2) * residual + tokens * sharded // tp
    wide_elements = (2 - tiled) * rows + tokens * wide_heads // tp
    return elements * size + wide_elements * config.training.accumulation_bytes + dropout_masks


def heads_group(config: RunConfig) -> int:
    """Ranks that swap tokens for heads: cp under a2a, the first size under a2a+p2p, else 1."""
    p = config.parallel
    sizes = p.hierarchical_context_parallel_sizes or (1, p.context_parallel_size)
    return {"a2a": p.context_parallel_size, "a2a+p2p": sizes[0]}.get(p.cp_comm_type, 1)


def key_value_share(config: RunConfig) -> float:
    """K/V elements a rank keeps over those of its own tokens: above 1 where more ranks share heads than there are
    groups, as each then keeps a whole K/V head of more tokens.
    """
    groups = config.model.query_groups // config.parallel.tensor_model_parallel_size
    return max(1.0, heads_group(config) / groups)


def _key_copies(config: RunConfig) -> float:
    """How many times the K/V of a rank's own tokens are at hand during backward."""
    cp = config.parallel.context_parallel_size
    ring = {"p2p": cp, "a2a": 1, "a2a+p2p": cp // heads_group(config)}
    ranks = ring.get(config.parallel.cp_comm_type)
    return cp if ranks is None else min(ranks, 2) * key_value_share(config)


def attention_work(config: RunConfig) -> int:
    """Bytes that one layer's attention needs while its backward runs: K/V of others and gradients.

    p2p holds the K/V at hand and the next, with their gradients likewise; all_gather holds the whole row's, and so may
    kv_exchange under a mask that needs all of them; a2a holds the row's keys for its own heads. The kernel `flex`,
    which `auto` takes on CUDA, computes the output again and holds it and its gradient, each also in the wide dtype;
    `math`, which `auto` takes there for float64, the scores, weights and their gradients of one block of queries.
    """
    model, p = config.model, config.parallel
    tp, size, wide = p.tensor_model_parallel_size, config.training.element_bytes, config.training.accumulation_bytes
    tokens, cp = tokens_per_rank(config), p.context_parallel_size
    key_values = 2 * tokens * model.query_groups * model.head_dim // tp
    copies = _key_copies(config)
    queries = tokens * model.num_attention_heads * model.head_dim // tp
    kernel, double = config.training.attention_kernel, config.training.dtype == "float64"
    scores = part = 0
    if kernel == "flex" or (kernel == "auto" and not double):
        part = 2 * queries * (size + wide)
    if kernel == "math" or (kernel == "auto" and double):
        keys = tokens * (1 if p.cp_comm_type == "p2p" else cp)
        scores = 3 * (model.num_attention_heads // tp) * min(MATH_BLOCK, tokens) * keys * wide
    # under a2a the output's gradient and that of the queries exist on both sides
    swapped = queries * (size + wide) if heads_group(config) > 1 else 0
    return int(copies * key_values * (size + wide)) + queries * wide + swapped + scores + part


def _logit_bytes(config: RunConfig) -> int:
    """Bytes of one token's logits on a rank: softmax and gradient take their place, halves have a wide copy beside."""
    model, t = config.model, config.training
    copy = t.accumulation_bytes if t.accumulation_bytes > t.element_bytes else 0
    rows = vocabulary_rows(model, model.vocab_size, config.parallel.tensor_model_parallel_size)
    return rows * (t.element_bytes + copy)


def loss_chunk_tokens(config: RunConfig) -> int:
    """Tokens whose logits exist at once; 0 for all of a row. `auto` takes all where they fit into `LOSS_WORK`, else the
    largest power of two of them that does.
    """
    asked, each = config.training.cross_entropy_chunk_tokens, _logit_bytes(config)
    if asked != "auto":
        return asked
    if tokens_per_rank(config) * each <= LOSS_WORK:
        return 0
    return 1 << max(LOSS_WORK // each, 1).bit_length() - 1


def _loss_in_chunks(config: RunConfig) -> bool:
    return 0 < loss_chunk_tokens(config) < tokens_per_rank(config)


def head_work(config: RunConfig) -> int:
    """Bytes of the last stage's head for one microbatch: final norm in and out, the gradient of the latter, logits of a
    chunk with what takes their place. Sequence parallelism gathers the norm's output and has its gradient for all tp.

    The table's own gradient is none of it: `head_gradient`.
    """
    model, p = config.model, config.parallel
    tp, size, tokens = p.tensor_model_parallel_size, config.training.element_bytes, tokens_per_rank(config)
    residual, whole = tokens * model.hidden_size * size // (tp if p.sequence_parallel else 1), 0
    if p.sequence_parallel and tp > 1:
        whole = tokens * model.hidden_size * size
    chunk = loss_chunk_tokens(config) if _loss_in_chunks(config) else tokens
    return 2 * residual + (2 * whole or residual) + chunk * _logit_bytes(config)


def head_gradient(config: RunConfig) -> int:
    """Bytes of the table's gradient while chunks add to it, in the dtype of sums so that no chunk rounds it.

    0 for a frozen table and where there is one chunk: then it is as any other weight's gradient on its way to a bucket,
    which the estimate leaves out. It cannot go to the bucket at once, because backward may scale the loss.
    """
    if config.vision.freeze_text or not _loss_in_chunks(config):
        return 0
    rows = vocabulary_rows(config.model, config.model.vocab_size, config.parallel.tensor_model_parallel_size)
    return rows * config.model.hidden_size * config.training.accumulation_bytes


def stage_memory(config: RunConfig, stage: int, chunks: Sequence[range], world_size: int) -> RankMemory:
    """Bytes on one rank of a pipeline stage that holds the layers `chunks` (one range for each model chunk)."""
    p, granularity = config.parallel, config.training.recompute_granularity
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    parameters, trained = (stage_parameters(config, stage, chunks, trained=only) for only in (False, True))
    shards = config.data_parallel_size(world_size) * p.context_parallel_size
    state = 2 * wide + (wide if config.training.dtype == "bfloat16" else 0)
    held, layer = in_flight(config, stage, world_size), layer_activations(config, granularity)
    counts = offloaded_blocks(config, chunks)
    staying = max(len(layers) - count for layers, count in zip(chunks, counts, strict=True))
    received = residual_elements(config) * size if any(counts) and (stage, len(chunks)) != (0, 1) else 0
    activations = held * (staying * layer + received) + min(2, max(counts)) * layer + tile_work(config)
    if granularity != "none":
        activations += layer_activations(config, "none") - layer_activations(config, granularity)
    if stage == 0:
        first = in_flight_rows(config, world_size)
        activations += first * vision.vision_activations(config, size, wide)
    last = stage == p.pipeline_model_parallel_size - 1
    return RankMemory(
        weights=parameters * size,
        gradients=trained * wide + (head_gradient(config) if last else 0),
        optimizer=-(-trained // shards) * state,
        activations=activations,
        attention=attention_work(config),
        head=head_work(config) if last else 0,
        host=held * (max(counts) * layer - received),
    )
