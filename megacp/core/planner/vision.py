"""Parameters, FLOPs and activations of the vision tower and the connector, and the cost of a run's stages with them.

Both stand on the first pipeline stage and are counted there, so a stage with a large tower gets fewer decoder layers.
Work is counted per crop and per pooled token, the two numbers by which images are dealt to cp ranks.

Symbols: h hidden size, f FFN, a heads, g groups, d head width. Per patch a block of the tower keeps, in elements of the
model's dtype: inputs and outputs of both norms 4 h, with two wide numbers a norm; q, k and v as one product (a + 2 g) d
/ tp; attention output a d / tp and its wide log-sum-exp a / tp; the MLP before and after GELU 2 f / tp. `selective`
computes the outputs of norms and GELU again; `full` keeps a block's input. Per pooled token of w patches the connector
keeps the patches 2 w h and their mean 2 h; k and v 2 w g d / tp; q and the output 2 a d / tp; the projector's input h
and its MLP 3 f / tp.
"""

from __future__ import annotations

from megacp.core.config.checks import packs_in_a_row
from megacp.core.config.run import RunConfig
from megacp.core.planner.costs import (
    Flops,
    causal_area,
    head_flops,
    layer_flops,
    model_flops,
    model_parameters,
    pair_flops,
    pair_parameters,
)

WINDOW = 4
"""Patches of a planned pooled token: 2 x 2, as images have."""


def _connector_ffn(config: RunConfig) -> int:
    return config.vision.connector_ffn_hidden_size or config.model.ffn_hidden_size


def _block_weights(config: RunConfig) -> int:
    """Weights of the linears of one block of the tower."""
    v = config.vision
    attention = v.vision_head_dim * 2 * (v.vision_num_attention_heads + v.vision_num_attention_heads)
    return v.vision_hidden_size * (attention + 2 * v.vision_ffn_hidden_size)


def tower_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the vision tower on one tp rank; 0 without one."""
    v = config.vision
    sharded = _block_weights(config) + v.vision_ffn_hidden_size
    sharded += v.vision_head_dim * (v.vision_num_attention_heads + 2 * v.vision_num_attention_heads)
    block = sharded // tp + 6 * v.vision_hidden_size  # two norms of two tensors, two biases after a sum
    embedding = v.vision_hidden_size * (v.patch_dim + 1 + v.patches_per_crop)
    return v.vision_num_layers * block + embedding if v.vision_num_layers else 0


def _pool_weights(config: RunConfig) -> tuple[int, int]:
    """Weights of the connector that meet a pooled token once, and those that meet each of its patches."""
    v = config.vision
    wide, heads = 2 * v.vision_hidden_size, v.vision_head_dim * v.vision_num_attention_heads
    projector = _connector_ffn(config) * (2 * v.vision_hidden_size + config.model.hidden_size)
    once = wide * heads + heads * v.vision_hidden_size + projector
    return once, wide * 2 * v.vision_head_dim * v.vision_num_attention_heads


def connector_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the connector on one tp rank; 0 without a tower."""
    v = config.vision
    biases = v.vision_head_dim * (v.vision_num_attention_heads + 2 * v.vision_num_attention_heads)
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
    patches, heads = v.patches_per_crop, v.vision_num_attention_heads * v.vision_head_dim
    weights = v.vision_num_layers * _block_weights(config) + v.vision_hidden_size * v.patch_dim
    return Flops(2.0 * patches * weights, 4.0 * v.vision_num_layers * patches**2 * heads)


def pooled_flops(config: RunConfig, window: int = WINDOW) -> Flops:
    """The connector's forward over one pooled token of `window` patches."""
    v = config.vision
    if not v.vision_num_layers:
        return Flops(0.0, 0.0)
    once, each = _pool_weights(config)
    heads = v.vision_num_attention_heads * v.vision_head_dim
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


def block_activations(config: RunConfig, granularity: str) -> tuple[int, int]:
    """Elements of the model's dtype and wide ones that a block of the tower keeps per patch on one rank."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    if granularity == "full":
        return v.vision_hidden_size, 0
    cheap = granularity != "selective"
    heads, groups = v.vision_num_attention_heads, v.vision_num_attention_heads
    sharded = (2 * heads + 2 * groups) * v.vision_head_dim + (2 if cheap else 1) * v.vision_ffn_hidden_size
    return (4 if cheap else 2) * v.vision_hidden_size + sharded // tp, 4 + heads // tp


def connector_activations(config: RunConfig) -> int:
    """Elements that the connector keeps per pooled token of `WINDOW` patches on one rank."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    heads = 2 * v.vision_num_attention_heads + 2 * WINDOW * v.vision_num_attention_heads
    sharded = heads * v.vision_head_dim + 3 * _connector_ffn(config)
    return (2 * WINDOW + 3) * v.vision_hidden_size + sharded // tp


def vision_activations(config: RunConfig, size: int, wide: int, world_size: int) -> int:
    """Bytes that vision keeps for the backward of one microbatch on a rank of the first stage; `size` and `wide` are
    those of the model's dtype and of statistics. A frozen tower keeps nothing.
    """
    v, granularity = config.vision, config.training.recompute_granularity
    factor, sharers = encoders(config, world_size)
    packs = config.training.micro_batch_size * factor
    crops, pooled = (-(-packs * count // sharers) for count in planned_images(config))
    total = 0
    frozen = config.frozen_parts
    if not {"vision", "connector"} <= set(frozen):
        total += pooled * connector_activations(config) * size
    if "vision" not in frozen and crops:
        patches = crops * v.patches_per_crop
        kept = v.vision_num_layers * _bytes(config, granularity, size, wide)
        if granularity != "none":  # one block while its backward runs
            kept += _bytes(config, "none", size, wide) - _bytes(config, granularity, size, wide)
        total += patches * (kept + (v.patch_dim + 2 * v.vision_hidden_size) * size)
    return total


def _bytes(config: RunConfig, granularity: str, size: int, wide: int) -> int:
    elements, statistics = block_activations(config, granularity)
    return elements * size + statistics * wide
