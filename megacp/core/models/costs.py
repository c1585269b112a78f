"""Parameters and FLOPs of the decoder, the vision tower and the connector, and what follows from them.

The same few products give the parameter table of the dry run, the cut of the pipeline, the deal of images and the FLOPs
of the logged utilisation. So they cannot disagree. A multiply-add counts as two FLOPs. `6 x parameters x tokens` would
forget attention, most of the work of long rows, and count the embedding, which multiplies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.core.config.checks import packs_in_a_row
from megacp.core.config.model import VOCABULARY_MULTIPLE, ModelConfig
from megacp.core.config.run import RunConfig

MATMUL_BACKWARD = 2.0
"""Backward of a linear over its forward: the gradients of input and weight."""
ATTENTION_BACKWARD = 2.5
"""Backward of core attention over its forward: five products against two (FlashAttention-2, Dao 2023)."""
WINDOW = 4
"""Patches of a planned pooled token: 2 x 2, as images have."""
LOSS_WORK = 2**29
"""Most bytes of logits and their gradient under `--cross-entropy-chunk-tokens auto`."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass: linear layers and core attention, kept apart because their backward costs differ."""

    matmul: float
    attention: float

    @property
    def forward(self) -> float:
        """Forward alone."""
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """Forward and backward, nothing computed twice."""
        return (1 + MATMUL_BACKWARD) * self.matmul + (1 + ATTENTION_BACKWARD) * self.attention

    @property
    def passing(self) -> float:
        """Forward and the gradient of the input alone: frozen weights with trained ones before them."""
        return MATMUL_BACKWARD * self.matmul + (1 + ATTENTION_BACKWARD) * self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def times(self, factor: float) -> Flops:
        """The FLOPs of `factor` such passes."""
        return Flops(self.matmul * factor, self.attention * factor)


def causal_area(tokens: int) -> int:
    """Allowed (query, key) pairs of one causal document: n (n + 1) / 2."""
    return tokens * (tokens + 1) // 2


def attention_weights(model: ModelConfig) -> int:
    """Weights of the q, k, v and output projections of a layer."""
    return model.hidden_size * model.head_dim * 2 * (model.num_attention_heads + model.query_groups)


def mlp_weights(model: ModelConfig) -> int:
    """Weights of the gate, up and down projections of a layer."""
    return 3 * model.hidden_size * model.ffn_hidden_size


def layer_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one decoder block on one tp rank: sharded linears, replicated norms and row biases."""
    sharded = attention_weights(model) + mlp_weights(model)
    sharded += model.add_qkv_bias * model.head_dim * (model.num_attention_heads + 2 * model.query_groups)
    sharded += model.add_mlp_bias * 2 * model.ffn_hidden_size
    replicated = model.hidden_size * (2 + model.add_attention_output_bias + model.add_mlp_bias)
    if model.qk_layernorm == "all_heads":
        sharded += model.head_dim * (model.num_attention_heads + model.query_groups)
    elif model.qk_layernorm == "head":
        replicated += 2 * model.head_dim
    return sharded // tp + replicated


def pair_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of the low-rank pairs of one decoder block on one tp rank; 0 without them.

    Of a linear that is cut by rows, A is whole on each rank; of one that is cut by columns, B.
    """
    total = 0
    for name in model.lora_linears:
        inputs, outputs = model.linear_sizes[name]
        cut = inputs if name in ("output", "down") else outputs
        total += model.lora_rank * (inputs + outputs - cut + cut // tp)
    return total


def vocabulary_rows(model: ModelConfig, rows: int, tp: int = 1) -> int:
    """Rows of a table of `rows` on each tp rank, padding included; 0 while the vocabulary is unknown."""
    return -(-rows // (tp * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE


def embedding_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of the embedding on one tp rank, padded rows included."""
    return vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size


def head_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of the final norm and the head on one tp rank, whether the head's weight is tied or not."""
    return model.hidden_size + vocabulary_rows(model, model.vocab_size, tp) * model.hidden_size


def model_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model as a checkpoint counts them: no padding, a tied weight once."""
    rows = model.embedding_rows + model.untie_embeddings_and_output_weights * model.vocab_size
    layer = layer_parameters(model) + pair_parameters(model)
    return model.num_layers * layer + (1 + rows) * model.hidden_size


def layer_flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """One block's forward over `tokens` tokens with `area` allowed (query, key) pairs."""
    weights = attention_weights(model) + mlp_weights(model)
    return Flops(2.0 * tokens * weights, 4.0 * area * model.num_attention_heads * model.head_dim)


def head_flops(model: ModelConfig, tokens: int) -> Flops:
    """The output head's forward."""
    return Flops(2.0 * tokens * model.hidden_size * model.vocab_size, 0.0)


def pair_flops(model: ModelConfig, tokens: int) -> Flops:
    """The forward of all low-rank pairs."""
    return Flops(2.0 * tokens * model.num_layers * pair_parameters(model), 0.0)


def model_flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """The whole model's forward over `tokens` tokens, without pairs; `area` is summed over their documents."""
    return layer_flops(model, tokens, area).times(model.num_layers) + head_flops(model, tokens)


def connector_ffn(config: RunConfig) -> int:
    """Width of the projector between pooled patches and text."""
    return config.vision.connector_ffn_hidden_size or config.model.ffn_hidden_size


def _block_weights(config: RunConfig) -> int:
    """Weights of the linears of one block of the tower."""
    v = config.vision
    attention = 4 * v.vision_hidden_size
    return v.vision_hidden_size * (attention + 2 * v.vision_ffn_hidden_size)


def tower_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the vision tower on one tp rank; 0 without one."""
    v = config.vision
    sharded = _block_weights(config) + v.vision_ffn_hidden_size
    sharded += 3 * v.vision_hidden_size
    block = sharded // tp + 6 * v.vision_hidden_size  # two norms of two tensors, two biases after a sum
    embedding = v.vision_hidden_size * (v.patch_dim + 1 + v.patches_per_crop)
    return v.vision_num_layers * block + embedding if v.vision_num_layers else 0


def _pool_weights(config: RunConfig) -> tuple[int, int]:
    """Weights of the connector that meet a pooled token once, and those that meet each of its patches."""
    v = config.vision
    wide, heads = 2 * v.vision_hidden_size, v.vision_hidden_size
    projector = connector_ffn(config) * (2 * v.vision_hidden_size + config.model.hidden_size)
    once = wide * heads + heads * v.vision_hidden_size + projector
    return once, wide * 2 * v.vision_hidden_size


def connector_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the connector on one tp rank; 0 without a tower."""
    v = config.vision
    biases = 3 * v.vision_hidden_size
    sharded = sum(_pool_weights(config)) + biases
    return sharded // tp + v.vision_hidden_size if v.vision_num_layers else 0


def run_parameters(config: RunConfig) -> int:
    """Parameters of the whole model as a checkpoint counts them."""
    return model_parameters(config.model) + tower_parameters(config) + connector_parameters(config)


def trained_parameters(config: RunConfig) -> int:
    """Those of them that are not frozen."""
    pairs, frozen = config.model.num_layers * pair_parameters(config.model), config.frozen_parts
    own = {
        "text": model_parameters(config.model) - pairs,
        "vision": tower_parameters(config),
        "connector": connector_parameters(config),
    }
    return pairs + sum(count for name, count in own.items() if name not in frozen)


def crop_flops(config: RunConfig) -> Flops:
    """The tower's forward over one crop."""
    v = config.vision
    if not v.vision_num_layers:
        return Flops(0.0, 0.0)
    patches, heads = v.patches_per_crop, v.vision_hidden_size
    weights = v.vision_num_layers * _block_weights(config) + v.vision_hidden_size * v.patch_dim
    return Flops(2.0 * patches * weights, 4.0 * v.vision_num_layers * patches**2 * heads)


def pooled_flops(config: RunConfig, window: int = WINDOW) -> Flops:
    """The connector's forward over one pooled token of `window` patches."""
    v = config.vision
    if not v.vision_num_layers:
        return Flops(0.0, 0.0)
    once, each = _pool_weights(config)
    heads = v.vision_hidden_size
    return Flops(2.0 * (once + window * each), 4.0 * window * heads)


def vision_flops(config: RunConfig, crops: int, pooled: int, window: int = WINDOW) -> float:
    """FLOPs of training on so many crops and pooled tokens of one row, without those that frozen parts leave out."""
    frozen = config.frozen_parts
    tower, connector = crop_flops(config).times(crops), pooled_flops(config, window).times(pooled)
    passing = connector.forward if "vision" in frozen else connector.passing
    below = tower.forward if "vision" in frozen else tower.training
    return below + (passing if "connector" in frozen else connector.training)


def text_flops(config: RunConfig, tokens: int, area: int) -> float:
    """FLOPs of training of the decoder: a frozen one passes gradients through, low-rank pairs beside it are trained."""
    flops = model_flops(config.model, tokens, area)
    return (flops.passing if "text" in config.frozen_parts else flops.training) + pair_flops(
        config.model, tokens
    ).training


def planned_images(config: RunConfig) -> tuple[int, int]:
    """Planned crops and pooled tokens of one pack: `--vision-planned-crops`, or a full row of them."""
    v, length = config.vision, config.data.seq_length
    if not v.vision_num_layers:
        return 0, 0
    pooled = (-(-v.patches_per_side // 2)) ** 2  # tokens of a crop with windows of 2 x 2 patches
    crops = v.vision_planned_crops or -(-length // pooled)
    return crops, min(length, crops * pooled)


def encoders(config: RunConfig, world_size: int) -> tuple[int, int]:
    """For each pack of a microbatch: packs whose images some ranks encode together, and how many ranks these are.

    With dynamic context parallelism and `--vision-shards replicate` each rank encodes the packs of all dp ranks alone.
    """
    p = config.parallel
    replicates = p.vision_shards == "replicate"
    return (packs_in_a_row(config, world_size), 1) if replicates else (1, p.context_parallel_size)


def run_stage_costs(config: RunConfig, world_size: int) -> tuple[list[float], float, float]:
    """Costs that cut a pipeline into stages, for one causal pack: FLOPs of training of each decoder layer, of embedding
    and vision, and of final norm, head and loss. Text is dealt over cp ranks; vision that is not counts as often more.

    The embedding multiplies nothing; it is counted as one operation per element written, forward and backward.
    """
    model, tokens = config.model, config.data.seq_length
    parts = (layer_flops(model, tokens, causal_area(tokens)), head_flops(model, tokens))
    layer, head = (part.passing if "text" in config.frozen_parts else part.training for part in parts)
    layer += pair_flops(model, tokens).training / model.num_layers
    factor, sharers = encoders(config, world_size)
    seeing = vision_flops(config, *planned_images(config)) * factor * config.parallel.context_parallel_size / sharers
    first = 2.0 * tokens * model.hidden_size + seeing
    return [layer] * model.num_layers, first, head


def tokens_per_rank(config: RunConfig) -> int:
    """Tokens of a microbatch's row on one cp rank."""
    row = config.training.micro_batch_size * config.data.seq_length
    return -(-row // config.parallel.context_parallel_size)  # dynamic: dp times the packs over dp times the ranks


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


def logit_bytes(config: RunConfig) -> int:
    """Bytes of one token's logits on a rank: softmax and gradient take their place, halves have a wide copy beside."""
    model, t = config.model, config.training
    copy = t.accumulation_bytes if t.accumulation_bytes > t.element_bytes else 0
    rows = vocabulary_rows(model, model.vocab_size, config.parallel.tensor_model_parallel_size)
    return rows * (t.element_bytes + copy)


def loss_chunk_tokens(config: RunConfig) -> int:
    """Tokens whose logits exist at once; 0 for all of a row. `auto` takes all where they fit into `LOSS_WORK`, else the
    largest power of two of them that does.
    """
    asked, each = config.training.cross_entropy_chunk_tokens, logit_bytes(config)
    if asked != "auto":
        return asked
    if tokens_per_rank(config) * each <= LOSS_WORK:
        return 0
    return 1 << max(LOSS_WORK // each, 1).bit_length() - 1
