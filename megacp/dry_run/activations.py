"""Activations and work of blocks on one rank: what a microbatch keeps for its backward, and what one block needs then.

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), table 2,
with the tensors that our blocks save. Per layer and token, in elements of the model's dtype (h hidden, f FFN, a
heads, g query groups, d head width; tp' is tp with sequence parallelism, else 1):

    inputs of both norms and their outputs       4 h / tp', and one wide number per norm and token
    what mixer and MLP keep                      `kept` of their rows in core/layers
    dropout, when there is any                   2 h / tp' bytes

Norms after attention and MLP keep as much: inputs of the products, and their outputs as inputs of the norms; but
`selective` finds none of these to compute again. Norms in both places keep the inputs of all four. A layer without
rotary embedding keeps q and k as they are. A frozen product keeps no input, unless a low-rank pair beside it does,
which adds its rank a token.

"Wide" is fp32, float64 in a float64 model. There is no S x S term: attention saves the log-sum-exp per row
(FlashAttention). `selective` computes the outputs of the norms and of SwiGLU again; `full` keeps one input per block
and what its attention gave, and one block's activations while its backward runs. `--mlp-chunk-tokens` leaves of the
MLP only its input, and the norm's output, gate, up and SwiGLU of one tile while its backward runs. A pipeline stage
holds the activations of every chunk in flight, as its schedule's list says. `zero_bubble` adds inputs and output
gradients of the products whose weight gradients wait, for each backward that they wait of:

    qkv, output, gate and up, down               2 h / tp' + 2 h + (2 a + 2 g) d / tp + 3 f / tp

Blocks of `--activation-offload` keep all of this on the host, except for the input that a
pipeline holds; on the device are at least two blocks at once: one at work, and one on its way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megacp.engine.config.run import RunConfig
from megacp.engine.layers.moe import MOE
from megacp.engine.layers.stack import Layer, layers_of
from megacp.engine.layers.table import Share
from megacp.engine.layers.vision import VISION_KINDS
from megacp.engine.models.costs import encoders, planned_images
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Action, Kind


class Held(NamedTuple):
    """Most that a stage holds at once in a step."""

    in_flight: int
    """Activations of a chunk, from its forward to its backward."""
    rows: int
    """Microbatches between forward and backward of the stage's first chunk."""
    deferred: int | None
    """Backwards whose weight gradients wait while another one runs; None where none ever do."""


@functools.cache
def most_held(config: RunConfig, stage: int, world_size: int) -> Held:
    """By the list of what the stage computes."""
    in_flight, rows, deferred = zip(*(held for _, held in held_over(config, stage, world_size)), strict=True)
    return Held(max(in_flight), max(rows), None if deferred[0] is None else max(deferred))


def held_over(config: RunConfig, stage: int, world_size: int) -> list[tuple[Action, Held]]:
    """What the stage computes in a step, and what it holds while it does."""
    p = config.parallel
    sizes = p.pipeline_model_parallel_size, config.num_microbatches(world_size), p.num_virtual_stages_per_pipeline_rank
    computes = SCHEDULES[p.pipeline_schedule](stage, *sizes)
    defers = any(compute.kind is Kind.WEIGHTS for compute in computes)
    in_flight = rows = deferred = 0
    found = []
    for compute in computes:
        begins, ends = compute.kind is Kind.FORWARD, compute.kind is Kind.BACKWARD
        in_flight += begins
        rows += begins and compute.chunk == 0
        deferred -= compute.kind is Kind.WEIGHTS
        found.append((compute, Held(in_flight, rows, deferred if defers else None)))
        in_flight -= ends
        rows -= ends and compute.chunk == 0
        deferred += ends
    return found


def layer_deferred(config: RunConfig, layer: int = 0) -> int:
    """Bytes that the weight gradients of one layer keep while they wait: inputs and output gradients of its products.

    The gradient of a sum over tp is whole on each rank.
    """
    share, described, elements = Share(config), layers_of(config.model)[layer], 0
    for kind in described.kinds:
        linears = kind.linears(config.model)
        for product in kind.products:
            columns = sum(linears[name].outputs for name in product)
            by_rows = linears[product[0]].cut == "rows"
            elements += share.product_input(linears[product[0]])
            elements += share.tokens * columns // (share.tp if by_rows else 1)
    return elements * share.size * ("text" not in config.frozen_parts)


def layer_activations(config: RunConfig, granularity: str, layer: int = 0) -> int:
    """Bytes one layer keeps for the backward of one microbatch on one rank, under a recompute granularity."""
    share, described = Share(config, granularity), layers_of(config.model)[layer]
    held = sum(kind.held(share) for kind in described.kinds)
    if granularity == "full":
        return share.residual * share.size + held
    tiled = share.tiled and described.mlp is not MOE
    # norms keep their inputs, their outputs and a number a token; but for that of a tiled MLP
    after = not share.model.has_input_norms
    both = share.model.has_input_norms and share.model.has_output_norms
    count = 4 if after else 2 * both + (4 - tiled if share.cheap else 2)
    norms = count * share.residual, (2 + 2 * both - (tiled and not after)) * share.rows
    parts = (norms, *(kind.kept(share) for kind in described.kinds))
    elements, wide = (sum(numbers) for numbers in zip(*parts, strict=True))
    narrow, dropped = _pairs(share, described)
    masks = dropped + 2 * share.residual * (config.model.hidden_dropout > 0)
    return share.bytes_of(elements + narrow + dropped, wide) + masks + held


def _pairs(share: Share, described: Layer) -> tuple[int, int]:
    """Elements that low-rank pairs keep: what their first products give, and what dropout leaves of what those are
    given, whose masks have as many bytes. A tile makes its own anew.
    """
    model, given, dropped = share.model, 0, 0
    for kind in described.kinds:
        linears, tiled = kind.linears(model), share.tiled and kind is not described.mixer
        for product in kind.products:
            ranks = share.pair_ranks(kind.name, product)
            tokens = share.tokens if linears[product[0]].cut == "rows" else share.rows
            if not tiled:
                given += sum(ranks) * tokens
            if ranks and model.lora_dropout > 0:
                dropped += share.product_input(linears[product[0]])
    return given, dropped


def block_work(config: RunConfig, layer: int = 0) -> int:
    """Bytes of one block while its backward runs, beyond what it keeps: what is computed again, and the larger of the
    works of its MLP and of its attention, which begins when the MLP's activations are gone.
    """
    share, described = Share(config, config.training.recompute_granularity), layers_of(config.model)[layer]
    again = 0
    if share.granularity == "full":
        again = layer_activations(config, "none", layer) - layer_activations(config, "full", layer)
    mlps = described.kinds[1:]
    gone = 0 if share.tiled else (sum(kind.kept(share)[0] for kind in mlps) + share.residual) * share.size
    attention = described.mixer.work(share) + share.residual * share.size - gone
    if described.has_state and config.parallel.sharding.parameters:
        # gradients of the MLP's weights leave with those of all the block; the terms of attention hold enough for them
        linears = [linear for kind in mlps for linear in kind.linears(config.model).values()]
        attention += sum(linear.inputs * linear.outputs for linear in linears) // share.tp * share.size
    return again + max(sum(kind.work(share) for kind in mlps), attention)


def vision_activations(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Bytes that vision keeps for the backward of one microbatch on a rank of the first stage, and those of one block's
    backward. A frozen tower keeps nothing, nor does a frozen connector behind it.
    """
    v, share, frozen = config.vision, Share(config, config.training.recompute_granularity), config.frozen_parts
    factor, sharers = encoders(config, world_size)
    packs = config.training.micro_batch_size * factor
    crops, pooled = (-(-packs * count // sharers) for count in planned_images(config))
    tower, connector = VISION_KINDS[v.vision_family]
    patches = crops * v.crop_patches * ("vision" not in frozen)
    tokens = pooled * (not {"vision", "connector"} <= set(frozen))
    counts = ((tower, patches), (connector, tokens))
    kept = sum(count * share.bytes_of(*kind.kept(share)) for kind, count in counts)
    return kept, sum(count * kind.work(share) for kind, count in counts)
