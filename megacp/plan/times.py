"""Seconds of a training step, by what they are spent on, from the lists that a run executes.

A microbatch on a stage: products by their FLOPs, attention by its area and the kernel's rate,
elementwise passes by the bytes that a block keeps. Messages by bytes over the slowest link of their
group, less what the code hides them under. The schedule's own list of computes then runs with these
times, and what is left over is the pipeline's.

The host's calls count where no compute hides them. Contention of two messages is not in it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacp.dry_run.measured import as_one_rank, block_memory
from megacp.dry_run.memory import shared_parts, stage_kind, stage_parameters
from megacp.dry_run.messages import (
    boundary_bytes,
    expert_bytes,
    gathers_a_step,
    instance_bytes,
    key_bytes,
    shared_messages,
    stream_bytes,
    swap_bytes,
)
from megacp.dry_run.packs import PackSample, one_row
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.training import KEEP_ALL
from megacp.engine.layers.attention import transport_of
from megacp.engine.layers.moe import expert_rows, planned_load
from megacp.engine.layers.stack import layers_of
from megacp.engine.layers.table import ATTENTION_BACKWARD, MATMUL_BACKWARD, tokens_per_rank
from megacp.engine.models import costs
from megacp.engine.pipeline_parallel.schedules import Kind
from megacp.engine.pipeline_parallel.timeline import Span, orders, timeline
from megacp.plan.hardware import Hardware


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest stage."""

    compute: float
    """Forward and backward, nothing twice."""
    again: float
    """What is recomputed."""
    offload: float
    """Activations on their way to host memory and back that no block hides."""
    tp: float
    """Messages of tensor parallelism that nothing hides."""
    cp: float
    ep: float
    dp: float
    """Gathers of parameters and sums of gradients that nothing hides."""
    pp: float
    """Hidden states and their gradients on their way between stages that nothing hides."""
    pipeline: float
    """Idle time."""
    uneven: float
    """Waiting for the rank with the most work."""
    optimizer: float
    cores: float
    """Waiting for a core that other ranks use."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def binds(self) -> str:
        """What a step spends most on beside its work; "" where that is less than a hundredth."""
        others = {name: seconds for name, seconds in vars(self).items() if name != "compute"}
        name = max(others, key=lambda term: others[term])
        return f"{name} {others[name] / self.total:.0%}" if others[name] >= self.total / 100 else ""


@dataclass(frozen=True)
class _Part:
    """Seconds of one microbatch on a stage: the work itself, and messages that nothing hides."""

    work: float = 0.0
    attention: float = 0.0
    again: float = 0.0
    offload: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    pp: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def times(self, count: int) -> _Part:
        """So many of them."""
        return _Part(*(seconds * count for seconds in vars(self).values()))

    def __add__(self, other: _Part) -> _Part:
        return _Part(
            *(
                mine + theirs
                for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
            )
        )


def _fused_share(config: RunConfig, sample: PackSample) -> float:
    """The part of attention that cuDNN's kernel takes; FlexAttention has the rest."""
    model, v = config.model, config.vision
    seeing = (
        config.data.data_path is None
        and v.vision_num_layers > 0
        and config.data.image_attention != "causal"
    )
    taken = config.training.attention_kernel in ("auto", "cudnn")
    return sample.causal * (
        taken and model.softmax_type == "vanilla" and model.head_dim <= 128 and not seeing
    )


def _layer(
    config: RunConfig, hardware: Hardware, sample: PackSample, number: int
) -> tuple[_Part, _Part]:
    """Forward and backward of a block for one microbatch."""
    model, p, t = config.model, config.parallel, config.training
    layer, size = layers_of(model)[number], t.element_bytes
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    tokens, ranks = t.micro_batch_size * config.data.seq_length, tp * cp
    whole = t.micro_batch_size * costs.causal_area(config.data.seq_length, layer.window)
    flops = layer.flops(model, tokens, int(whole * sample.area * sample.shared(config)[0]))
    busiest = (
        planned_load(config) if model.num_experts and p.expert_model_parallel_size > 1 else 1.0
    )
    grouped = layer.mlp.mixing(model, tokens, 0).matmul  # of experts, each with few rows
    experts = grouped * busiest / hardware.experts
    products = (flops.matmul - grouped + experts) / ranks / hardware.products
    narrow = (
        min(1.0, model.head_dim / 128) ** 0.5
    )  # an H200 reaches 0.72 of a rate with heads of 64
    fused = _fused_share(config, sample)
    rates = zip(hardware.attention["fused"], hardware.attention["flex"], strict=True)
    there, back = (
        flops.attention / ranks / narrow * (fused / one + (1 - fused) / other)
        for one, other in rates
    )
    kept_without = _kept(config, number, KEEP_ALL) / hardware.bandwidth
    passes = 2 * kept_without  # each is written once and read once
    if layer.is_routed:  # a token's rows are copied to its experts, weighted and copied back
        passes += 6 * expert_rows(config) * model.hidden_size * size / hardware.bandwidth
    trained = MATMUL_BACKWARD if "text" not in config.frozen_parts else 1.0
    pairs = costs.pair_flops(model, tokens, number).matmul / ranks / hardware.products

    calls = hardware.exposed(hardware.calls, products + passes + there)
    whole_block = (
        products + passes + calls + there * layer.has_state
    )  # attention keeps what it gave, a state does not
    mode = t.recompute_mode
    again = 0.0
    if mode.repeats_block:
        again = whole_block
    elif not mode.keeps_all:
        kept = _kept(config, number, t.recompute_granularity) / hardware.bandwidth
        again = 2 * (kept_without - kept)
    if t.mlp_chunk_tokens and not mode.repeats_block:  # a repeated block ends where tiles begin
        up = sum(
            linear.inputs * linear.outputs
            for linear in layer.mlp.linears(model).values()
            if linear.cut == "rows"
        )
        again += (2.0 * tokens * up + experts) / ranks / hardware.products
    # The residual stream is gathered before and scattered after attention and MLP; in backward half
    # of it hides under the products of weights, and so does the gather of inputs for these. A block
    # with experts counts as a dense one.
    tensor = 0.0
    if tp > 1:
        tensor = 4 * (stream_bytes(config) / hardware.ring(tp, 1) + hardware.latency)
    # heads are swapped once more where a block is computed again; K/V are sent again in backward,
    # with gradients
    swap, sent, hidden = (
        _context(config, hardware, sample) if not layer.has_state else (0.0, 0.0, 0.0)
    )
    exchange = expert_bytes(config, number) / hardware.exchange(p.expert_model_parallel_size, 1)
    return (
        _Part(
            work=products + pairs + passes + calls,
            attention=there,
            tp=tensor,
            cp=swap + hardware.exposed(sent, hidden * there),
            ep=exchange / 2,
        ),
        _Part(
            work=trained * products + 2 * (pairs + passes + calls),
            attention=ATTENTION_BACKWARD * back,
            again=again,
            tp=tensor * (1 - hardware.overlap / 2 + mode.repeats_block),
            cp=swap * (1 + mode.repeats_block)
            + hardware.exposed(2 * sent, hidden * ATTENTION_BACKWARD * back),
            ep=exchange / 2,
        ),
    )


@functools.lru_cache(2**14)
def _kept(config: RunConfig, layer: int, granularity: str) -> int:
    """Return the bytes that a block keeps of a rank's tokens, over which its elementwise passes go.

    Tiles of the MLP pass over as many, and so do ranks that share a row.
    """
    whole = with_values(
        as_one_rank(config), {"mlp_chunk_tokens": 0, "recompute_granularity": granularity}
    )
    return block_memory(whole, layer).kept


def _context(
    config: RunConfig, hardware: Hardware, sample: PackSample
) -> tuple[float, float, float]:
    """Return the seconds of attention's forward in a layer: of swapping heads, and of sending K/V;
    and the share of attention under which the latter hide.
    """
    p = config.parallel
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    if cp == 1:
        return 0.0, 0.0, 0.0
    transport = transport_of(config)
    sizes = p.hierarchical_context_parallel_sizes or ()
    heads = transport.head_ranks(cp, sizes)
    ring = transport.key_ranks(cp, sizes)
    swap = sent = 0.0
    if heads > 1:  # q, k and v, and the output back
        swap = swap_bytes(config) / hardware.exchange(heads, tp) + 2 * hardware.latency
    if ring > 1:
        rate = {"ring": hardware.link, "gathered": hardware.ring, "needed": hardware.exchange}[
            transport.keys
        ]
        sent = (
            key_bytes(config, sample) / rate(ring, tp * heads)
            + transport.messages(cp, sizes) * hardware.latency
        )
    return swap, sent, transport.hidden_share(cp, sizes)


def _stage(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    sample: PackSample,
    stage: int,
    chunks: Sequence[range],
) -> tuple[_Part, _Part]:
    """Forward and backward of all of a stage for one microbatch."""
    p, t = config.parallel, config.training
    alike = Counter(costs.first_alike(config.model)[layer] for layers in chunks for layer in layers)
    forward = backward = _Part()
    for layer, count in alike.items():
        there, back = _layer(config, hardware, sample, layer)
        forward, backward = forward + there.times(count), backward + back.times(count)
    ranks = p.tensor_model_parallel_size * p.context_parallel_size
    if stage == p.pipeline_model_parallel_size - 1:
        tokens = t.micro_batch_size * config.data.seq_length
        head = costs.head_flops(config.model, tokens).matmul / ranks / hardware.products
        logits = tokens_per_rank(config) * costs.logit_bytes(config) / hardware.bandwidth
        # the loss makes its gradients in its forward, over about five passes
        forward += _Part(work=(3 - ("text" in config.frozen_parts)) * head + 5 * logits)
    if stage == 0 and config.vision.vision_num_layers:
        factor, sharers = costs.encoders(config, world_size)
        packs = t.micro_batch_size * factor / sharers / p.tensor_model_parallel_size
        crops, pooled = costs.planned_images(config)
        seen = (
            costs.crop_flops(config).times(crops).forward
            + costs.pooled_flops(config).times(pooled).forward
        )
        once, every = (
            count * packs / hardware.products
            for count in (seen, costs.vision_flops(config, crops, pooled))
        )
        again = t.recompute_mode.repeats_block and "vision" not in config.frozen_parts
        forward, backward = (
            forward + _Part(work=once),
            backward + _Part(work=every - once, again=once * again),
        )
    # gradients are added to their wide sums
    trained = stage_parameters(config, chunks, trained=True)
    backward += _Part(
        work=trained * (t.element_bytes + 2 * t.accumulation_bytes) / hardware.bandwidth
    )
    if t.activation_offload:
        kept = sum(block_memory(config, layer).kept * count for layer, count in alike.items())
        moved = kept * sum(costs.offloaded_blocks(config, chunks)) / alike.total() / hardware.host
        forward += _Part(offload=hardware.exposed(moved, forward.total))
        backward += _Part(offload=hardware.exposed(moved, backward.total))
    if p.sharding.gradients:
        gather, scatter = _sharded(config, world_size, hardware, chunks)
        if p.sharding.parameters:  # half of them in forward, half in backward
            gather *= (
                gathers_a_step(config, world_size, len(chunks))
                / config.num_microbatches(world_size)
                / 2
            )
        else:
            gather = 0.0  # once a step
        forward += _Part(dp=hardware.exposed(gather, forward.total))
        backward += _Part(dp=hardware.exposed(gather + scatter, backward.total))
    stages = p.pipeline_model_parallel_size
    if stages > 1:
        one = (
            boundary_bytes(config) / hardware.link(stages, world_size // stages) + hardware.latency
        )
        # what the first chunk of the model begins with is nobody's message, nor what the last one's
        # backward does
        arriving, returning = (one * (len(chunks) - (stage == end)) for end in (0, stages - 1))
        forward += _Part(pp=hardware.exposed(arriving, forward.total))
        backward += _Part(pp=hardware.exposed(returning, backward.total))
    return forward, backward


def _sharded(
    config: RunConfig, world_size: int, hardware: Hardware, chunks: Sequence[range]
) -> tuple[float, float]:
    """Seconds of gathering a stage's parameters, of which frozen ones stay where they are whole,
    and of summing its gradients: over dp x cp, of experts over edp.
    """
    gather = scatter = 0.0
    for part in shared_messages(config, chunks, world_size):
        rate = hardware.ring(part.ranks, part.stride)
        # each bucket goes round once; of a latency, which is a launch and a few hops, a hop is a
        # quarter
        hops = (
            (part.ranks - 1)
            * hardware.latency
            / 4
            * -(-part.moved // config.parallel.ddp_bucket_size)
        )
        gather += part.gather / rate + hops
        scatter += part.scatter / rate + hops
    return gather, scatter


def in_lockstep(config: RunConfig, world_size: int) -> int:
    """Replicas that wait for one another in every microbatch, as they gather parameters or exchange
    tokens in it.
    """
    p, dp = config.parallel, config.data_parallel_size(world_size)
    # a schedule gathers the one chunk of a stage once a step
    again = p.pipeline_model_parallel_size == 1 or p.num_virtual_stages_per_pipeline_rank > 1
    gathers = again and p.sharding.parameters
    exchanging = p.expert_model_parallel_size // (
        p.tensor_model_parallel_size * p.context_parallel_size
    )
    return math.gcd(dp, max(1, exchanging, dp // p.num_distributed_optimizer_instances * gathers))


def stage_parts(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    sample: PackSample,
    layers: Sequence[Sequence[range]],
) -> tuple[list[tuple[_Part, _Part]], int, float, float]:
    """Forward and backward of the stages for one microbatch; the busiest of them, and its seconds
    once a step: of data parallelism that no backward or forward of one microbatch hides, and of the
    optimizer.
    """
    kinds = [stage_kind(config, *stage) for stage in enumerate(layers)]
    alike = dict(zip(kinds, enumerate(layers), strict=True))
    known = {
        kind: _stage(config, world_size, hardware, sample, *stage) for kind, stage in alike.items()
    }
    parts = [known[kind] for kind in kinds]
    busiest = max(range(len(parts)), key=lambda stage: sum(part.total for part in parts[stage]))
    p, t, (forward, backward) = config.parallel, config.training, parts[busiest]
    dp, instances = config.data_parallel_size(world_size), p.num_distributed_optimizer_instances
    trained = stage_parameters(config, layers[busiest], trained=True)
    share = sum(
        count / ranks for _, count, ranks, _ in shared_parts(config, layers[busiest], world_size)
    )
    exposed = 0.0
    if not p.sharding.parameters:
        gather, scatter = _sharded(config, world_size, hardware, layers[busiest])
        exposed = hardware.exposed(gather, forward.total)
        if not p.sharding.gradients:
            exposed += hardware.exposed(scatter, backward.total)
    if instances > 1:
        stride = p.tensor_model_parallel_size * p.context_parallel_size * dp // instances
        exposed += instance_bytes(config, layers[busiest], world_size) / hardware.ring(
            instances, stride
        )
    # the norm reads gradients; then they, master weights and two moments are read, three of them
    # and weights written; the next step begins with gradients of zero
    passed = (
        share * ((1 + 4 + 3) * t.accumulation_bytes + t.element_bytes)
        + trained * t.accumulation_bytes
    )
    return parts, busiest, exposed, passed / hardware.bandwidth


def step_time(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    sample: PackSample,
    *,
    idles: bool = True,
) -> StepTime:
    """The step of a checked configuration on `world_size` ranks; not shorter than one in which no
    stage `idles`.
    """
    config, sample = one_row(config, world_size, sample)
    microbatches, dp = config.num_microbatches(world_size), config.data_parallel_size(world_size)
    layers = costs.stage_layers(config, world_size)
    parts, busiest, exposed, optimizer = stage_parts(config, world_size, hardware, sample, layers)
    spent = (parts[busiest][0] + parts[busiest][1]).times(microbatches)
    span, turns = spent.total, max(0.0, world_size / hardware.cores - 1)
    waiting = turns * span if len(parts) == 1 else 0.0
    if idles and len(parts) > 1:
        times = [kind_seconds(config, *part) for part in parts]
        spans = timeline(
            orders(config, world_size), config.parallel.num_virtual_stages_per_pipeline_rank, times
        )
        span = max(span, *(stage[-1].stop for stage in spans))
        waiting = _turns(spans, hardware.cores * len(parts) / world_size) if turns else 0.0
    drawn = 1 if in_lockstep(config, world_size) > 1 else microbatches
    even, most = (
        spent.attention / sample.shared(config)[0],
        spent.attention * sample.largest(dp, drawn),
    )
    own = vars(spent + _Part(dp=exposed))
    found = StepTime(
        compute=spent.work + even,
        **{name: own[name] for name in ("again", "offload", "tp", "cp", "ep", "dp", "pp")},
        pipeline=span - spent.total,
        uneven=most - even,
        optimizer=optimizer,
        cores=waiting + turns * (exposed + optimizer),
    )
    return StepTime(
        *(
            seconds * (hardware.beside if world_size > 1 else 1.0)
            for seconds in vars(found).values()
        )
    )


def _turns(spans: Sequence[Sequence[Span]], cores: float) -> float:
    """Seconds by which a pipeline is longer where only so many stages compute at once and more of
    them take turns.
    """
    computes = [span for stage in spans for span in stage]
    edges = sorted(
        [*((span.start, 1) for span in computes), *((span.stop, -1) for span in computes)]
    )
    at_once, found = 0, 0.0
    for (start, change), (stop, _) in itertools.pairwise(edges):
        at_once += change
        found += (stop - start) * max(0.0, at_once / cores - 1)
    return found


def kind_seconds(config: RunConfig, forward: _Part, backward: _Part) -> Mapping[Kind, float]:
    """What the timeline asks of a stage; the products of weights are a third of the work of a
    backward.
    """
    defers = config.parallel.defers_weight_gradients
    weights = min(forward.work, backward.work / 2) if defers else 0.0
    return {
        Kind.FORWARD: forward.total,
        Kind.BACKWARD: backward.total - weights,
        Kind.WEIGHTS: weights,
    }
