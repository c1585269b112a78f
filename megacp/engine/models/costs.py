"""Parameters and FLOPs of decoder, vision tower and connector.

For the dry run, the cut of the pipeline, the deal of images and the logged utilisation. A
multiply-add counts as two FLOPs; attention counts, the embedding multiplies nothing.
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
"""Most bytes of logits and their gradient under `--cross-entropy-chunk-tokens auto`, of halves on
CUDA.
"""


def causal_area(tokens: int, window: int = 0) -> int:
    """Allowed (query, key) pairs of one causal document: n (n + 1) / 2, or what a window leaves of
    them.
    """
    seen = min(tokens, window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


def layer_areas(model: ModelConfig, tokens: int) -> list[int]:
    """`causal_area` of each layer; 0 where a state takes the place of attention."""
    return [
        0 if layer.has_state else causal_area(tokens, layer.window) for layer in layers_of(model)
    ]


@functools.cache
def _sizes(
    model: ModelConfig, layer: int, tp: int, ep: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Parameters of a layer on one rank, and of its low-rank pairs: all, and those of experts."""

    def sums(tensors: Iterator[Tensor]) -> tuple[int, int]:
        sizes = [(tensor.local_size(tp, ep), tensor.reduced_over == EXPERTS) for tensor in tensors]
        return sum(size for size, _ in sizes), sum(size for size, of_experts in sizes if of_experts)

    described = layers_of(model)[layer]
    return sums(described.tensors(model)), sums(described.pairs(model))


@functools.cache
def first_alike(model: ModelConfig) -> tuple[int, ...]:
    """For each layer the first that is like it but for its name."""
    nameless = [dataclasses.replace(layer, name="") for layer in layers_of(model)]
    return tuple(map(nameless.index, nameless))


def of_layers(
    model: ModelConfig, layers: Iterable[int], count: Callable[[int], Counted]
) -> list[Counted]:
    """`count(layer)` of each, found once for those that are alike."""
    first = first_alike(model)
    alike = [first[layer] for layer in layers]
    known = {layer: count(layer) for layer in set(alike)}
    return [known[layer] for layer in alike]


def _sizes_of(
    model: ModelConfig, layer: int, tp: int, ep: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers that are alike are counted once: one may have a thousand tensors of experts."""
    return _sizes(model, first_alike(model)[layer], tp, ep)


def layer_parameters(model: ModelConfig, tp: int = 1, layer: int = 0, ep: int = 1) -> int:
    """Parameters of one decoder block on one rank of tp and ep, without low-rank pairs."""
    return _sizes_of(model, layer, tp, ep)[0][0]


def expert_parameters(model: ModelConfig, layer: int, ep: int = 1, *, pairs: bool = False) -> int:
    """Parameters among them that are of experts, or of the low-rank `pairs` of experts."""
    return _sizes_of(model, layer, 1, ep)[pairs][1]


def pair_parameters(model: ModelConfig, tp: int = 1, layer: int = 0, ep: int = 1) -> int:
    """Parameters of the low-rank pairs of one decoder block on one rank of tp and ep; 0 without
    them.
    """
    return _sizes_of(model, layer, tp, ep)[1][0]


def vocabulary_rows(model: ModelConfig, rows: int, tp: int = 1) -> int:
    """Rows of a table of `rows` on each tp rank, padding included; 0 while the vocabulary is
    unknown.
    """
    return -(-rows // (tp * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE


@functools.cache
def model_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model as a checkpoint counts them: no padding, a tied weight once."""
    return sum(tensor.size for tensor in model_tensors(model))


def head_flops(model: ModelConfig, tokens: int) -> Flops:
    """The output head's forward."""
    return Flops(2.0 * tokens * model.hidden_size * model.vocab_size, 0.0)


def model_flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """The whole model's forward over `tokens` tokens, without pairs; `area`, of a layer with
    attention, is summed over their documents.
    """
    return sum(
        (layer.flops(model, tokens, area) for layer in layers_of(model)), head_flops(model, tokens)
    )


def tower_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the vision tower on one tp rank; 0 without one."""
    return sum(tensor.local_size(tp) for tensor in tower_tensors(config))


def connector_parameters(config: RunConfig, tp: int = 1) -> int:
    """Parameters of the connector on one tp rank; 0 without a tower."""
    return sum(tensor.local_size(tp) for tensor in connector_tensors(config))


def run_parameters(config: RunConfig) -> int:
    """Parameters of the whole model as a checkpoint counts them."""
    return model_parameters(config.model) + tower_parameters(config) + connector_parameters(config)


def trained_parameters(config: RunConfig) -> int:
    """Parameters that are not frozen."""
    model, frozen = config.model, config.frozen_parts
    pairs = sum(pair.size for pair in pair_tensors(model))
    text, vision = model_parameters(model) - pairs, tower_parameters(config)
    parts = {"text": text, "vision": vision, "connector": connector_parameters(config)}
    return pairs + sum(count for name, count in parts.items() if name not in frozen)


def crop_flops(config: RunConfig) -> Flops:
    """The tower's forward over one crop, of images as large as the table of positions."""
    tower, _ = VISION_KINDS[config.vision.vision_family]
    return tower.flops(config.vision, config.model, config.vision.crop_patches)


def pooled_flops(config: RunConfig, window: int = POOLED_PATCHES) -> Flops:
    """The connector's forward over one pooled token of `window` patches."""
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
    """FLOPs of training on so many crops and pooled tokens of one row, without those that frozen
    parts leave out; those of the model, as MFU is `published`, or all that are computed.
    """
    frozen = config.frozen_parts
    tower, connector = crop_flops(config).times(crops), pooled_flops(config, window).times(pooled)
    if published:
        tower, connector = tower.published, connector.published
    passing = connector.forward if "vision" in frozen else connector.passing
    below = tower.forward if "vision" in frozen else tower.training
    return below + (passing if "connector" in frozen else connector.training)


def pair_flops(model: ModelConfig, tokens: int, layer: int) -> Flops:
    """The forward of a block's low-rank pairs."""
    passed, of_experts = (
        pair_parameters(model, 1, layer),
        expert_parameters(model, layer, pairs=True),
    )
    if of_experts:
        passed -= of_experts * (model.num_experts - model.moe_router_topk) // model.num_experts
    return Flops(2.0 * tokens * passed, 0.0)


def block_flops(
    config: RunConfig, tokens: int, area: int, layer: int, *, published: bool = False
) -> float:
    """FLOPs of training of a block: a frozen one passes gradients through, low-rank pairs beside it
    are trained. `published` as in `vision_flops`.
    """
    flops = layers_of(config.model)[layer].flops(config.model, tokens, area)
    flops = flops.published if published else flops
    pairs = pair_flops(config.model, tokens, layer).training
    return (flops.passing if "text" in config.frozen_parts else flops.training) + pairs


def text_flops(config: RunConfig, tokens: int, area: int) -> float:
    """FLOPs of training of the decoder as MFU is published; `area` as in `model_flops`."""
    head = head_flops(config.model, tokens)
    blocks = sum(
        block_flops(config, tokens, area, layer, published=True)
        for layer in range(config.model.num_layers)
    )
    return blocks + (head.passing if "text" in config.frozen_parts else head.training)


def planned_images(config: RunConfig) -> tuple[int, int]:
    """Planned crops and pooled tokens of one pack: `--vision-planned-crops`, or a full row of
    them.
    """
    v, length = config.vision, config.data.seq_length
    if not v.vision_num_layers:
        return 0, 0
    of_one, pooled = v.smallest_image
    crops = v.vision_planned_crops or of_one * -(-length // pooled)
    return crops, min(length, -(-crops // of_one) * pooled)


def encoders(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Packs whose images are encoded together, and by how many ranks; replicated ones by each rank
    for itself.
    """
    p = config.parallel
    replicates = p.vision_shards == "replicate"
    return (packs_in_a_row(config, world_size), 1) if replicates else (1, p.context_parallel_size)


def run_stage_costs(config: RunConfig, world_size: int) -> tuple[list[float], float, float]:
    """Costs of each layer, of embedding and vision, and of head and loss: FLOPs of training on one
    causal pack.

    Text is dealt over cp; vision that is not counts cp times. The embedding counts an operation per
    element, both ways. Experts have the load that is planned for.
    """
    model, tokens = config.model, config.data.seq_length
    head = head_flops(model, tokens)
    last = head.passing if "text" in config.frozen_parts else head.training
    areas = layer_areas(model, tokens)
    every = range(model.num_layers)
    blocks = of_layers(model, every, lambda layer: block_flops(config, tokens, areas[layer], layer))
    if model.num_experts > 0:
        more = Flops(
            2.0 * tokens * (planned_load(config) - 1) * model.moe_router_topk / model.num_experts,
            0.0,
        )
        factor = more.passing if "text" in config.frozen_parts else more.training
        experts = of_layers(model, every, lambda layer: expert_parameters(model, layer))
        blocks = [cost + factor * count for cost, count in zip(blocks, experts, strict=True)]
    factor, sharers = encoders(config, world_size)
    seeing = (
        vision_flops(config, *planned_images(config))
        * factor
        * config.parallel.context_parallel_size
        / sharers
    )
    first = 2.0 * tokens * model.hidden_size + seeing
    return blocks, first, last


def stage_layers(config: RunConfig, world_size: int) -> list[list[range]]:
    """`[stage][chunk]` -> the global layers of that chunk: those that a run builds and the dry run
    prints.

    Stages hold unequal numbers of layers where the head costs more than a layer.
    """
    num_stages = config.parallel.pipeline_model_parallel_size
    num_chunks = config.parallel.num_virtual_stages_per_pipeline_rank
    blocks, first, last = run_stage_costs(config, world_size)
    ranges = _known_cut(tuple(blocks), first, last, num_stages * num_chunks)
    return [ranges[stage::num_stages] for stage in range(num_stages)]


def first_trained_stage(config: RunConfig, world_size: int) -> int:
    """Return the first virtual stage with a trained parameter; earlier ones take no part in the
    backward.

    Only low-rank pairs leave stages without one: some kinds of layers have no linear of
    `--lora-targets`.
    """
    frozen = config.frozen_parts
    trains_images = config.vision.vision_num_layers > 0 and not {"vision", "connector"} <= set(
        frozen
    )
    if "text" not in frozen or trains_images:
        return 0
    adapted = {
        i for i, layer in enumerate(layers_of(config.model)) if layer.has_pairs(config.model)
    }
    # virtual stages in the order of their layers: chunk 0 of every stage, then chunk 1, ...
    by_chunk = zip(*stage_layers(config, world_size), strict=True)
    in_order = itertools.chain.from_iterable(by_chunk)
    return next(place for place, layers in enumerate(in_order) if not adapted.isdisjoint(layers))


_known_cut = functools.cache(partition)
"""Most layouts of a model cut it as one before them."""


def offloaded_blocks(config: RunConfig, chunks: Sequence[range]) -> list[int]:
    """Blocks of each chunk of a stage that keep their activations on the host; the part asked for
    is rounded up.
    """
    asked, blocks = config.training.activation_offload, sum(map(len, chunks))
    wanted = min(blocks, math.ceil(asked * blocks - 1e-9) if asked < 1 else int(asked))
    counts = []
    for layers in chunks:
        counts.append(-(-wanted * len(layers) // blocks))
        wanted, blocks = wanted - counts[-1], blocks - len(layers)
    return counts


def logit_bytes(config: RunConfig) -> int:
    """Bytes of one token's logits on a rank: softmax and gradient take their place.

    A CPU has a wide copy of halves beside them; on CUDA two kernels read and write the halves
    themselves.
    """
    rows = vocabulary_rows(
        config.model, config.model.vocab_size, config.parallel.tensor_model_parallel_size
    )
    return rows * config.training.element_bytes


def loss_chunk_tokens(config: RunConfig) -> int:
    """Tokens whose logits exist at once; 0 for all of a row. `auto` takes all where they fit into
    `LOSS_WORK`, else the largest power of two of them that does.
    """
    asked, each = config.training.cross_entropy_chunk_tokens, logit_bytes(config)
    if asked != "auto":
        return asked
    if tokens_per_rank(config) * each <= LOSS_WORK:
        return 0
    return 1 << max(LOSS_WORK // each, 1).bit_length() - 1
