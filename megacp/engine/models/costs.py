"""Parameter counts and FLOPs of decoder, vision tower and connector.

The dry run, the pipeline partition, the distribution of images and the logged MFU use these
numbers. A multiply-add counts as two FLOPs. Attention is included. The embedding is a lookup
without FLOPs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from megacp.engine.checks import packs_in_a_row
from megacp.engine.config.model import VOCABULARY_MULTIPLE, ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.config.vision import POOLED_PATCHES
from megacp.engine.layers.moe import planned_load
from megacp.engine.layers.stack import layers_of, model_tensors, pair_tensors
from megacp.engine.layers.table import EXPERTS, Flops, Tensor, tokens_per_rank
from megacp.engine.layers.vision import VISION_KINDS, connector_tensors, tower_tensors
from megacp.engine.pipeline_parallel.partition import partition

Counted = TypeVar("Counted")
LOSS_WORK = 2**29
"""Maximum size in bytes of a chunk's logits with `--cross-entropy-chunk-tokens auto`."""


def causal_area(tokens: int, window: int = 0) -> int:
    """Return the number of allowed (query, key) pairs in a causal document.

    A `window` of 0 means no window; the number is then n (n + 1) / 2.
    """
    # the first `seen` queries have a growing number of keys; all later queries have `seen` keys
    seen = min(tokens, window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


def layer_areas(model: ModelConfig, tokens: int) -> list[int]:
    """Return `causal_area` for each layer; 0 for layers with a recurrent state."""
    areas = []
    for layer in layers_of(model):
        areas.append(0 if layer.has_state else causal_area(tokens, layer.window))
    return areas


@functools.cache
def _sizes(
    model: ModelConfig, layer: int, tp: int, ep: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the per-rank parameter counts of a layer, and of its LoRA pairs.

    Each consists of two numbers: the count of all tensors, and the count of expert tensors.
    """

    def sums(tensors: Iterator[Tensor]) -> tuple[int, int]:
        total = 0
        of_experts = 0
        for tensor in tensors:
            size = tensor.local_size(tp, ep)
            total += size
            if tensor.reduced_over == EXPERTS:
                of_experts += size
        return total, of_experts

    # experts are counted separately because their state is sharded over different ranks
    described = layers_of(model)[layer]
    return sums(described.tensors(model)), sums(described.pairs(model))


@functools.cache
def first_alike(model: ModelConfig) -> tuple[int, ...]:
    """Return, for each layer, the index of the first layer that is equal except for its name."""
    # layers are frozen dataclasses, so they can be compared without their names
    nameless = [dataclasses.replace(layer, name="") for layer in layers_of(model)]
    return tuple(map(nameless.index, nameless))


def of_layers(
    model: ModelConfig, layers: Iterable[int], count: Callable[[int], Counted]
) -> list[Counted]:
    """Return `count(layer)` for each layer, computed only once for equal layers."""
    # a model may have a hundred layers, but only a few of them differ
    first = first_alike(model)
    alike = [first[layer] for layer in layers]
    known = {layer: count(layer) for layer in set(alike)}
    return [known[layer] for layer in alike]


def _sizes_of(
    model: ModelConfig, layer: int, tp: int, ep: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return `_sizes` of the first equal layer, so that equal layers share one cache entry.

    A layer may have thousands of expert tensors, which take time to add up.
    """
    return _sizes(model, first_alike(model)[layer], tp, ep)


def layer_parameters(model: ModelConfig, tp: int = 1, layer: int = 0, ep: int = 1) -> int:
    """Return the number of parameters of a block per rank (tp, ep), without LoRA pairs."""
    return _sizes_of(model, layer, tp, ep)[0][0]


def expert_parameters(model: ModelConfig, layer: int, ep: int = 1, *, pairs: bool = False) -> int:
    """Return the number of a block's expert parameters per ep rank.

    With `pairs`, count the parameters of their LoRA pairs instead.
    """
    of_layer, of_pairs = _sizes_of(model, layer, 1, ep)
    return of_pairs[1] if pairs else of_layer[1]


def pair_parameters(model: ModelConfig, tp: int = 1, layer: int = 0, ep: int = 1) -> int:
    """Return the number of LoRA parameters of a block per rank (tp, ep); 0 without LoRA."""
    return _sizes_of(model, layer, tp, ep)[1][0]


def vocabulary_rows(model: ModelConfig, rows: int, tp: int = 1) -> int:
    """Return the number of rows of a vocabulary table per tp rank, including padding.

    The result is 0 if `rows` is 0, which means that the vocabulary is not known yet.
    """
    # round up per tp rank
    return -(-rows // (tp * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE


@functools.cache
def model_parameters(model: ModelConfig) -> int:
    """Return the number of decoder parameters in a checkpoint: no padding, tied weights once."""
    return sum(tensor.size for tensor in model_tensors(model))


def head_flops(model: ModelConfig, tokens: int) -> Flops:
    """Return the FLOPs of the output head's forward pass."""
    return Flops(2.0 * tokens * model.hidden_size * model.vocab_size, 0.0)


def model_flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Return the FLOPs of the decoder's forward pass over `tokens` tokens, without LoRA pairs.

    `area` is the number of allowed (query, key) pairs in an attention layer, over all documents.
    """
    blocks = (layer.flops(model, tokens, area) for layer in layers_of(model))
    return sum(blocks, head_flops(model, tokens))


def tower_parameters(config: RunConfig, tp: int = 1) -> int:
    """Return the number of vision tower parameters per tp rank; 0 without a tower."""
    return sum(tensor.local_size(tp) for tensor in tower_tensors(config))


def connector_parameters(config: RunConfig, tp: int = 1) -> int:
    """Return the number of connector parameters per tp rank; 0 without a tower."""
    return sum(tensor.local_size(tp) for tensor in connector_tensors(config))


def run_parameters(config: RunConfig) -> int:
    """Return the number of parameters of decoder, tower and connector in a checkpoint."""
    return model_parameters(config.model) + tower_parameters(config) + connector_parameters(config)


def trained_parameters(config: RunConfig) -> int:
    """Return the number of parameters that are not frozen."""
    model = config.model
    pairs = sum(pair.size for pair in pair_tensors(model))
    parts = {
        "text": model_parameters(model) - pairs,
        "vision": tower_parameters(config),
        "connector": connector_parameters(config),
    }
    # LoRA pairs are always trained
    return pairs + sum(count for name, count in parts.items() if name not in config.frozen_parts)


def crop_flops(config: RunConfig) -> Flops:
    """Return the FLOPs of the tower's forward pass over one crop.

    Images of any shape are assumed to have one patch per learned position.
    """
    tower, _ = VISION_KINDS[config.vision.vision_family]
    return tower.flops(config.vision, config.model, config.vision.crop_patches)


def pooled_flops(config: RunConfig, window: int = POOLED_PATCHES) -> Flops:
    """Return the FLOPs of the connector's forward pass for a pooled token of `window` patches."""
    _, connector = VISION_KINDS[config.vision.vision_family]
    return connector.flops(config.vision, config.model, window)


def vision_flops(
    config: RunConfig,
    crops: int,
    pooled: int,
    window: int = POOLED_PATCHES,
    *,
    published: bool = False,
) -> float:
    """Return the training FLOPs of tower and connector for a row's crops and pooled tokens.

    Work that frozen parts skip is not counted. With `published`, count as in published MFU.
    """
    frozen = config.frozen_parts
    tower = crop_flops(config).times(crops)
    connector = pooled_flops(config, window).times(pooled)
    if published:
        tower = tower.published
        connector = connector.published
    # a frozen connector passes gradients on only if the tower before it is trained
    if "vision" in frozen:
        of_tower = tower.forward
        frozen_connector = connector.forward
    else:
        of_tower = tower.training
        frozen_connector = connector.passing
    return of_tower + (frozen_connector if "connector" in frozen else connector.training)


def pair_flops(model: ModelConfig, tokens: int, layer: int) -> Flops:
    """Return the FLOPs of the forward pass through a block's LoRA pairs."""
    passed = pair_parameters(model, 1, layer)
    of_experts = expert_parameters(model, layer, pairs=True)
    if of_experts:
        # a token uses only the pairs of its chosen experts
        passed -= of_experts * (model.num_experts - model.moe_router_topk) // model.num_experts
    return Flops(2.0 * tokens * passed, 0.0)


def block_flops(
    config: RunConfig, tokens: int, area: int, layer: int, *, published: bool = False
) -> float:
    """Return the training FLOPs of a block, including its LoRA pairs.

    A frozen block only computes input gradients. With `published`, count as in published MFU.
    """
    flops = layers_of(config.model)[layer].flops(config.model, tokens, area)
    if published:
        flops = flops.published
    # the pairs are always trained
    pairs = pair_flops(config.model, tokens, layer).training
    return (flops.passing if "text" in config.frozen_parts else flops.training) + pairs


def text_flops(config: RunConfig, tokens: int, area: int) -> float:
    """Return the decoder's training FLOPs as counted in published MFU.

    `area` is the same as for `model_flops`.
    """
    head = head_flops(config.model, tokens)
    blocks = sum(
        block_flops(config, tokens, area, layer, published=True)
        for layer in range(config.model.num_layers)
    )
    return blocks + (head.passing if "text" in config.frozen_parts else head.training)


def planned_images(config: RunConfig) -> tuple[int, int]:
    """Return the number of crops and pooled tokens per pack to plan for.

    They follow from --vision-planned-crops; by default, image tokens fill the whole pack.
    """
    v = config.vision
    length = config.data.seq_length
    if not v.vision_num_layers:
        return 0, 0
    crops_per_image, tokens_per_image = v.smallest_image
    # number of crops if small images fill the pack with image tokens
    full = crops_per_image * -(-length // tokens_per_image)
    crops = v.vision_planned_crops or full
    images = -(-crops // crops_per_image)
    return crops, min(length, images * tokens_per_image)


def encoders(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Return the number of packs whose images are encoded together, and by how many ranks."""
    # with `replicate`, each rank encodes all images of a row, which may contain several packs
    if config.parallel.vision_shards == "replicate":
        return packs_in_a_row(config, world_size), 1
    return 1, config.parallel.context_parallel_size


def run_stage_costs(config: RunConfig, world_size: int) -> tuple[list[float], float, float]:
    """Return the costs of each layer, of embedding and vision together, and of head and loss.

    Costs are training FLOPs for one causal pack. Text is split over cp, so vision work that is not
    split counts cp times. The embedding counts as one operation per element in each pass. Experts
    have the planned load.
    """
    model = config.model
    tokens = config.data.seq_length
    frozen = "text" in config.frozen_parts
    # a frozen head still computes the gradients of its inputs
    head = head_flops(model, tokens)
    last = head.passing if frozen else head.training
    areas = layer_areas(model, tokens)
    every = range(model.num_layers)
    blocks = of_layers(model, every, lambda layer: block_flops(config, tokens, areas[layer], layer))
    if model.num_experts > 0:
        # `block_flops` assumes an even load, so add the excess FLOPs per expert parameter
        excess = 2.0 * tokens * (planned_load(config) - 1) * model.moe_router_topk
        more = Flops(excess / model.num_experts, 0.0)
        factor = more.passing if frozen else more.training
        experts = of_layers(model, every, lambda layer: expert_parameters(model, layer))
        blocks = [cost + factor * count for cost, count in zip(blocks, experts, strict=True)]
    packs, sharers = encoders(config, world_size)
    images = vision_flops(config, *planned_images(config))
    vision = images * packs * config.parallel.context_parallel_size / sharers
    first = 2.0 * tokens * model.hidden_size + vision
    return blocks, first, last


def stage_layers(config: RunConfig, world_size: int) -> list[list[range]]:
    """Return the global layers of each chunk, as `[stage][chunk]`.

    Stages may have different numbers of layers, for example because the head costs more than a
    layer.
    """
    num_stages = config.parallel.pipeline_model_parallel_size
    num_chunks = config.parallel.num_virtual_stages_per_pipeline_rank
    # minimise the cost of the most expensive chunk
    blocks, first, last = run_stage_costs(config, world_size)
    # chunks in the order of layers: chunk 0 of every stage, then chunk 1 of every stage, ...
    ranges = _known_cut(tuple(blocks), first, last, num_stages * num_chunks)
    return [ranges[stage::num_stages] for stage in range(num_stages)]


def first_trained_stage(config: RunConfig, world_size: int) -> int:
    """Return the first virtual stage with trained parameters. Earlier stages have no backward pass.

    It is above 0 only with LoRA, if the first layers have no linear layer in --lora-targets.
    """
    frozen = set(config.frozen_parts)
    has_vision = config.vision.vision_num_layers > 0
    trains_vision = has_vision and not {"vision", "connector"} <= frozen
    if "text" not in frozen or trains_vision:
        return 0
    layers_of_model = layers_of(config.model)
    adapted = {i for i, layer in enumerate(layers_of_model) if layer.has_pairs(config.model)}
    # virtual stages in the order of their layers: chunk 0 of every stage, then chunk 1, ...
    by_chunk = zip(*stage_layers(config, world_size), strict=True)
    in_order = itertools.chain.from_iterable(by_chunk)
    return next(place for place, layers in enumerate(in_order) if not adapted.isdisjoint(layers))


# Cached because the planner needs the same partition for many parallel layouts of a model.
_known_cut = functools.cache(partition)


def offloaded_blocks(config: RunConfig, chunks: Sequence[range]) -> list[int]:
    """Return the number of blocks to offload in each chunk of a stage."""
    asked = config.training.activation_offload
    blocks = sum(map(len, chunks))
    # a fraction below 1 is rounded up; 1e-9 absorbs the rounding of the product
    wanted = math.ceil(asked * blocks - 1e-9) if asked < 1 else int(asked)
    wanted = min(blocks, wanted)
    # distribute the blocks among the chunks in proportion to the chunks' sizes
    counts = []
    for layers in chunks:
        count = -(-wanted * len(layers) // blocks)
        counts.append(count)
        wanted -= count
        blocks -= len(layers)
    return counts


def logit_bytes(config: RunConfig) -> int:
    """Return the size in bytes of one token's logits on a rank.

    Softmax and gradient reuse their memory. On a CPU, bfloat16 logits need an additional float32
    copy; CUDA kernels use them directly.
    """
    tp = config.parallel.tensor_model_parallel_size
    rows = vocabulary_rows(config.model, config.model.vocab_size, tp)
    return rows * config.training.element_bytes


def loss_chunk_tokens(config: RunConfig) -> int:
    """Return the number of tokens whose logits are computed at once; 0 means a whole row.

    `auto` means a whole row if its logits fit into `LOSS_WORK`, otherwise the largest power of two
    that fits.
    """
    asked = config.training.cross_entropy_chunk_tokens
    each = logit_bytes(config)
    if asked != "auto":
        return asked
    if tokens_per_rank(config) * each <= LOSS_WORK:
        return 0
    fitting = max(LOSS_WORK // each, 1)
    return 1 << fitting.bit_length() - 1
