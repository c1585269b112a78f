"""Parameters, FLOPs and activations of the vision tower and the connector, and the cost of a run's stages with them.

Key property: both stand on the first pipeline stage and are counted there, so a stage with a large tower gets fewer
decoder layers. Work is counted per crop and per pooled token, the two numbers by which images are dealt to cp ranks.
Rejected: a tower as so many more decoder layers, which hides that its rows are patches and not tokens.

What a block of the tower keeps per patch, in elements of the model's dtype (h width, f FFN, a heads, g groups, d head
width): inputs of both norms and their outputs 4 h with two wide numbers each; q, k and v as one product (a + 2 g) d /
tp; attention output a d / tp and its wide log-sum-exp a / tp; the MLP before and after GELU 2 f / tp. `selective` makes
the outputs of norms and GELU again; `full` keeps a block's input. The connector keeps per pooled token of w patches:
the patches 2 w h and their mean 2 h; k and v 2 w g d / tp; q and the output 2 a d / tp; the projector's input h and
3 f / tp.
"""

from __future__ import annotations

from megacp.config.run import RunConfig
from megacp.planner.costs import (
    Flops,
    causal_area,
    embedding_parameters,
    head_flops,
    head_parameters,
    layer_flops,
    layer_parameters,
    model_parameters,
)

WINDOW = 4
"""Patches of a pooled token that is planned for: 2 x 2, as images have."""


def _connector_ffn(config: RunConfig) -> int:
    return config.vision.connector_ffn_hidden_size or config.model.ffn_hidden_size


def _block_weights(config: RunConfig) -> int:
    """Weights of the linears of one block of the tower."""
    v = config.vision
    attention = v.vision_head_dim * 2 * (v.vision_num_attention_heads + v.vision_groups)
    return v.vision_hidden_size * (attention + 2 * v.vision_ffn_hidden_size)


def tower_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the vision tower on one tp rank; 0 without one."""
    v = config.vision
    sharded = _block_weights(config) + v.vision_ffn_hidden_size
    sharded += v.vision_head_dim * (v.vision_num_attention_heads + 2 * v.vision_groups)
    block = sharded // tp + 6 * v.vision_hidden_size  # two norms of two tensors, two biases after a sum
    embedding = v.vision_hidden_size * (v.patch_dim + 1 + v.patches_per_crop)
    return v.vision_num_layers * block + embedding if v.vision_num_layers else 0


def _pool_weights(config: RunConfig) -> tuple[int, int]:
    """Weights of the connector that meet a pooled token once, and those that meet each of its patches."""
    v = config.vision
    wide, heads = 2 * v.vision_hidden_size, v.connector_head_dim * v.connector_num_attention_heads
    projector = _connector_ffn(config) * (2 * v.vision_hidden_size + config.model.hidden_size)
    once = wide * heads + heads * v.vision_hidden_size + projector
    return once, wide * 2 * v.connector_head_dim * v.connector_groups


def connector_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the connector on one tp rank; 0 without a tower."""
    v = config.vision
    biases = v.connector_head_dim * (v.connector_num_attention_heads + 2 * v.connector_groups)
    sharded = sum(_pool_weights(config)) + biases
    return sharded // tp + v.vision_hidden_size if v.vision_num_layers else 0


def run_parameters(config: RunConfig) -> int:
    """Parameters of the whole model as a checkpoint counts them."""
    return model_parameters(config.model) + tower_parameters(config) + connector_parameters(config)


def stage_parameters(config: RunConfig, stage: int, layers: int, *, trained: bool = False) -> int:
    """Parameters on one tp rank of a pipeline stage that holds so many decoder layers; `trained`: without frozen ones.

    A tied embedding stands on the first and on the last stage (once where they are one stage); vision on the first.
    """
    model, v, tp = config.model, config.vision, config.parallel.tensor_model_parallel_size
    text = layers * layer_parameters(model, tp)
    if stage == 0:
        text += embedding_parameters(model, tp)
    if stage == config.parallel.pipeline_model_parallel_size - 1:
        shared = stage == 0 and not model.untie_embeddings_and_output_weights
        text += model.hidden_size if shared else head_parameters(model, tp)
    towers = [(text, v.freeze_text)]
    if stage == 0:
        towers += [
            (tower_parameters(config, tp), v.freeze_vision),
            (connector_parameters(config, tp), v.freeze_connector),
        ]
    return sum(count for count, frozen in towers if not (trained and frozen))


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
    heads = v.connector_num_attention_heads * v.connector_head_dim
    return Flops(2.0 * (once + window * each), 4.0 * window * heads)


def vision_flops(config: RunConfig, crops: int, pooled: int, window: int = WINDOW) -> float:
    """FLOPs of training on so many crops and pooled tokens of one row, less what frozen towers leave out."""
    v = config.vision
    tower, connector = crop_flops(config).times(crops), pooled_flops(config, window).times(pooled)
    passing = connector.forward if v.freeze_vision else connector.passing
    below = tower.forward if v.freeze_vision else tower.training
    return below + (passing if v.freeze_connector else connector.training)


def planned_images(config: RunConfig) -> tuple[int, int]:
    """Crops and pooled tokens of one pack that are planned for: `--vision-planned-crops`, or a full row of them."""
    v, length = config.vision, config.data.seq_length
    if not v.vision_num_layers:
        return 0, 0
    pooled = (-(-v.patches_per_side // 2)) ** 2  # tokens of a crop with windows of 2 x 2 patches
    crops = v.vision_planned_crops or -(-length // pooled)
    return crops, min(length, crops * pooled)


def run_stage_costs(config: RunConfig) -> tuple[list[float], float, float]:
    """What the pipeline of a run is cut by, for one causal pack: FLOPs of training of each decoder layer, of embedding
    and vision, and of final norm, head and loss.

    The embedding multiplies nothing; it is counted as one operation per element written, forward and backward.
    """
    model, tokens = config.model, config.data.seq_length
    parts = (layer_flops(model, tokens, causal_area(tokens)), head_flops(model, tokens))
    layer, head = (part.passing if config.vision.freeze_text else part.training for part in parts)
    first = 2.0 * tokens * model.hidden_size + vision_flops(config, *planned_images(config))
    return [layer] * model.num_layers, first, head


def block_activations(config: RunConfig, granularity: str) -> tuple[int, int]:
    """Elements of the model's dtype and wide ones that a block of the tower keeps per patch on one rank."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    if granularity == "full":
        return v.vision_hidden_size, 0
    cheap = granularity != "selective"
    heads, groups = v.vision_num_attention_heads, v.vision_groups
    sharded = (2 * heads + 2 * groups) * v.vision_head_dim + (2 if cheap else 1) * v.vision_ffn_hidden_size
    return (4 if cheap else 2) * v.vision_hidden_size + sharded // tp, 4 + heads // tp


def connector_activations(config: RunConfig, window: int = WINDOW) -> int:
    """Elements that the connector keeps per pooled token of `window` patches on one rank."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    heads = 2 * v.connector_num_attention_heads + 2 * window * v.connector_groups
    sharded = heads * v.connector_head_dim + 3 * _connector_ffn(config)
    return (2 * window + 3) * v.vision_hidden_size + sharded // tp


def vision_activations(config: RunConfig, size: int, wide: int) -> int:
    """Bytes that vision keeps for the backward of one microbatch on a rank of the first stage; `size` and `wide` are
    those of the model's dtype and of statistics. A frozen tower keeps nothing.
    """
    v, granularity = config.vision, config.training.recompute_granularity
    packs, cp = config.training.micro_batch_size, config.parallel.context_parallel_size
    crops, pooled = (-(-packs * count // cp) for count in planned_images(config))
    total = 0
    if not (v.freeze_vision and v.freeze_connector):
        total += pooled * connector_activations(config) * size
    if not v.freeze_vision and crops:
        patches = crops * v.patches_per_crop
        kept = v.vision_num_layers * _bytes(config, granularity, size, wide)
        if granularity != "none":  # one block while its backward runs
            kept += _bytes(config, "none", size, wide) - _bytes(config, granularity, size, wide)
        total += patches * (kept + (v.patch_dim + 2 * v.vision_hidden_size) * size)
    return total


def _bytes(config: RunConfig, granularity: str, size: int, wide: int) -> int:
    elements, statistics = block_activations(config, granularity)
    return elements * size + statistics * wide
