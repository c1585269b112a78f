"""Seconds of a training step by cause, from the same lists that a run executes.

The times of a microbatch on a stage are estimated first:

* Matrix products take their FLOPs over the rate of products.
* Attention takes its allowed pairs over the rate of the kernel.
* Elementwise passes take the bytes that a block saves for backward over the memory bandwidth.
* Messages take their bytes over the slowest link of their group, minus the compute that hides them.
* Launches on the host count if no compute hides them.

The schedule's list of actions is then simulated with these times, and idle time belongs to the
pipeline. Two messages that compete for a link are not modelled.
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
from megacp.engine.config.run import RunConfig, Value, with_values
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
    """Forward and backward without recomputation."""
    again: float
    """Recomputation."""
    offload: float
    """Transfers of activations to host memory and back, as far as no block hides them."""
    tp: float
    """Messages of tensor parallelism, as far as nothing hides them; cp and ep likewise."""
    cp: float
    ep: float
    dp: float
    """Gathers of parameters and sums of gradients, as far as nothing hides them."""
    pp: float
    """Messages between pipeline stages, as far as nothing hides them."""
    pipeline: float
    """Idle time of the schedule."""
    uneven: float
    """Waiting for the rank with the most work."""
    optimizer: float
    cores: float
    """Waiting for a core that another rank uses (CPU ranks)."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def binds(self) -> str:
        """The largest cause except compute, with its share; "" if it is below a hundredth."""
        causes = {name: seconds for name, seconds in vars(self).items() if name != "compute"}
        name = max(causes, key=lambda cause: causes[cause])
        if causes[name] < self.total / 100:
            return ""
        return f"{name} {causes[name] / self.total:.0%}"


@dataclass(frozen=True)
class _Part:
    """Seconds of one microbatch on a stage: work, and messages as far as nothing hides them."""

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
        """Return the seconds of `count` equal parts."""
        return _Part(*(seconds * count for seconds in vars(self).values()))

    def __add__(self, other: _Part) -> _Part:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Part(*(mine + theirs for mine, theirs in pairs))


def _fused_share(config: RunConfig, sample: PackSample) -> float:
    """Return the share of attention that cuDNN's kernel takes; FlexAttention takes the rest."""
    model = config.model
    vision = config.vision
    if config.training.attention_kernel not in ("auto", "cudnn"):
        return 0.0
    if model.softmax_type != "vanilla" or model.head_dim > 128:
        return 0.0
    # Mock packs have an image per document, whose tokens attend to each other.
    has_spans = vision.vision_num_layers > 0 and config.data.image_attention != "causal"
    if config.data.data_path is None and has_spans:
        return 0.0
    return sample.causal


def _layer(
    config: RunConfig, hardware: Hardware, sample: PackSample, number: int
) -> tuple[_Part, _Part]:
    """Return forward and backward of a block for one microbatch."""
    model = config.model
    p = config.parallel
    t = config.training
    mode = t.recompute_mode
    layer = layers_of(model)[number]
    tokens = t.micro_batch_size * config.data.seq_length
    ranks = p.tensor_model_parallel_size * p.context_parallel_size

    # Attended pairs: a causal row, times the share that packs have of them, times the
    # imbalance of the cp ranks.
    # The busiest rank of experts counts, and experts have few rows each, which makes their products
    # slower.
    causal = t.micro_batch_size * costs.causal_area(config.data.seq_length, layer.window)
    pairs_seen = int(causal * sample.area * sample.shared(config)[0])
    flops = layer.flops(model, tokens, pairs_seen)
    busiest = 1.0
    if model.num_experts and p.expert_model_parallel_size > 1:
        busiest = planned_load(config)
    grouped = layer.mlp.mixing(model, tokens, 0).matmul
    experts = grouped * busiest / hardware.experts
    products = (flops.matmul - grouped + experts) / ranks / hardware.products
    pairs = costs.pair_flops(model, tokens, number).matmul / ranks / hardware.products
    # A backward computes gradients of inputs and of weights; frozen weights need only the former.
    trained = MATMUL_BACKWARD if "text" not in config.frozen_parts else 1.0

    # Attention. Narrow heads are slower: an H200 reaches 0.72 of the rate with heads of 64.
    narrow = min(1.0, model.head_dim / 128) ** 0.5
    fused = _fused_share(config, sample)
    scores = flops.attention / ranks / narrow
    fused_forward, fused_backward = hardware.attention["fused"]
    flex_forward, flex_backward = hardware.attention["flex"]
    there = scores * (fused / fused_forward + (1 - fused) / flex_forward)
    back = scores * (fused / fused_backward + (1 - fused) / flex_backward)

    # Elementwise passes: each saved tensor is written once and read once. A routed block also
    # copies the rows of a token to its experts, weights them and copies them back.
    kept_without = _kept(config, number, KEEP_ALL) / hardware.bandwidth
    passes = 2 * kept_without
    if layer.is_routed:
        routed = expert_rows(config) * model.hidden_size * t.element_bytes
        passes += 6 * routed / hardware.bandwidth
    # The host launches kernels ahead of the GPU, so launches only cost time in small blocks.
    calls = hardware.exposed(hardware.calls, products + passes + there)

    # Recomputation. Attention keeps its output, but a layer with a state computes it again.
    whole_block = products + passes + calls
    if layer.has_state:
        whole_block += there
    again = 0.0
    if mode.repeats_block:
        again = whole_block
    elif not mode.keeps_all:
        kept = _kept(config, number, t.recompute_granularity) / hardware.bandwidth
        again = 2 * (kept_without - kept)
    if t.mlp_chunk_tokens and not mode.repeats_block:
        # Tiles compute the first products of the MLP again. A repeated block ends where tiles
        # begin, so it does not repeat them twice.
        linears = layer.mlp.linears(model).values()
        up = sum(linear.inputs * linear.outputs for linear in linears if linear.cut == "rows")
        again += (2.0 * tokens * up + experts) / ranks / hardware.products

    # Tensor parallelism gathers the residual stream before attention and MLP, and scatters it after
    # them. In backward half of it hides under the products of weights, and so does the gather of
    # inputs for these products. A block with experts counts like a dense one.
    tensor = 0.0
    if p.tensor_model_parallel_size > 1:
        rate = hardware.ring(p.tensor_model_parallel_size, 1)
        tensor = 4 * (stream_bytes(config) / rate + hardware.latency)
    tensor_backward = tensor * (1 - hardware.overlap / 2)

    # Context parallelism swaps heads and sends keys; backward also sends gradients. Recomputation
    # swaps the heads once more.
    swap, sent, hidden = 0.0, 0.0, 0.0
    if not layer.has_state:
        swap, sent, hidden = _context(config, hardware, sample)
    swap_backward = swap
    if mode.repeats_block:
        tensor_backward += tensor
        swap_backward += swap
    attention_backward = ATTENTION_BACKWARD * back

    # Tokens travel to their experts and back, in forward and again in backward: half each.
    exchange = expert_bytes(config, number) / hardware.exchange(p.expert_model_parallel_size, 1)
    forward = _Part(
        work=products + pairs + passes + calls,
        attention=there,
        tp=tensor,
        cp=swap + hardware.exposed(sent, hidden * there),
        ep=exchange / 2,
    )
    backward = _Part(
        work=trained * products + 2 * (pairs + passes + calls),
        attention=attention_backward,
        again=again,
        tp=tensor_backward,
        cp=swap_backward + hardware.exposed(2 * sent, hidden * attention_backward),
        ep=exchange / 2,
    )
    return forward, backward


@functools.lru_cache(2**14)
def _kept(config: RunConfig, layer: int, granularity: str) -> int:
    """Return the bytes that a block saves for backward, without tiles and on a single rank.

    Elementwise passes go over these bytes. They do not change with tiles of the MLP, or with ranks
    that share a row.
    """
    changes: dict[str, Value] = {"mlp_chunk_tokens": 0, "recompute_granularity": granularity}
    whole = with_values(as_one_rank(config), changes)
    return block_memory(whole, layer).kept


def _context(
    config: RunConfig, hardware: Hardware, sample: PackSample
) -> tuple[float, float, float]:
    """Return the times of context parallelism in the forward of a layer's attention.

    These are the seconds of swapping heads, the seconds of sending K/V, and the share of attention
    under which sending hides.
    """
    p = config.parallel
    tp = p.tensor_model_parallel_size
    cp = p.context_parallel_size
    if cp == 1:
        return 0.0, 0.0, 0.0
    transport = transport_of(config)
    sizes = p.hierarchical_context_parallel_sizes or ()
    heads = transport.head_ranks(cp, sizes)
    ring = transport.key_ranks(cp, sizes)
    swap = 0.0
    if heads > 1:  # q, k and v, and the output back
        swap = swap_bytes(config) / hardware.exchange(heads, tp) + 2 * hardware.latency
    sent = 0.0
    if ring > 1:
        # A ring talks to one neighbour, a gather uses a collective, and kv_exchange an all-to-all.
        rates = {"ring": hardware.link, "gathered": hardware.ring, "needed": hardware.exchange}
        rate = rates[transport.keys](ring, tp * heads)
        launches = transport.messages(cp, sizes) * hardware.latency
        sent = key_bytes(config, sample) / rate + launches
    return swap, sent, transport.hidden_share(cp, sizes)


def _stage(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    sample: PackSample,
    stage: int,
    chunks: Sequence[range],
) -> tuple[_Part, _Part]:
    """Return forward and backward of a whole stage for one microbatch."""
    p = config.parallel
    t = config.training
    stages = p.pipeline_model_parallel_size

    # Blocks: equal ones are estimated once.
    first_alike = costs.first_alike(config.model)
    alike = Counter(first_alike[layer] for layer in itertools.chain(*chunks))
    forward = _Part()
    backward = _Part()
    for layer, count in alike.items():
        there, back = _layer(config, hardware, sample, layer)
        forward += there.times(count)
        backward += back.times(count)

    # Embedding, head and vision tower
    if stage == stages - 1:
        forward += _head(config, hardware)
    if stage == 0 and config.vision.vision_num_layers:
        there, back = _tower(config, world_size, hardware)
        forward += there
        backward += back

    # Gradients are added to their sums in the wider dtype.
    trained = stage_parameters(config, chunks, trained=True)
    summed = trained * (t.element_bytes + 2 * t.accumulation_bytes) / hardware.bandwidth
    backward += _Part(work=summed)

    # Offloaded activations are copied out during forward, and back during backward.
    if t.activation_offload:
        kept = sum(block_memory(config, layer).kept * count for layer, count in alike.items())
        moved = kept * sum(costs.offloaded_blocks(config, chunks)) / alike.total() / hardware.host
        forward += _Part(offload=hardware.exposed(moved, forward.total))
        backward += _Part(offload=hardware.exposed(moved, backward.total))
    if p.sharding.gradients:
        gather, scatter = _sharded(config, world_size, hardware, chunks)
        if p.sharding.parameters:
            # Half of the gathers are in forward, half in backward.
            gathers = gathers_a_step(config, world_size, len(chunks))
            gather *= gathers / config.num_microbatches(world_size) / 2
        else:
            gather = 0.0  # parameters are gathered once per step, not per microbatch
        forward += _Part(dp=hardware.exposed(gather, forward.total))
        backward += _Part(dp=hardware.exposed(gather + scatter, backward.total))
    if stages > 1:
        rate = hardware.link(stages, world_size // stages)
        one = boundary_bytes(config) / rate + hardware.latency
        # The first chunk of the model receives no message in forward, the last none in backward.
        arriving = len(chunks) - 1 if stage == 0 else len(chunks)
        returning = len(chunks) - 1 if stage == stages - 1 else len(chunks)
        forward += _Part(pp=hardware.exposed(one * arriving, forward.total))
        backward += _Part(pp=hardware.exposed(one * returning, backward.total))
    return forward, backward


def _head(config: RunConfig, hardware: Hardware) -> _Part:
    """Return the head and the loss, which computes its gradients in forward.

    The loss takes about five passes over the logits.
    """
    tokens = config.training.micro_batch_size * config.data.seq_length
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    head = costs.head_flops(config.model, tokens).matmul / ranks / hardware.products
    logits = tokens_per_rank(config) * costs.logit_bytes(config) / hardware.bandwidth
    # forward, the gradient of the input, and the gradient of the weight if it is trained
    products = 2 if "text" in config.frozen_parts else 3
    return _Part(work=products * head + 5 * logits)


def _tower(config: RunConfig, world_size: int, hardware: Hardware) -> tuple[_Part, _Part]:
    """Return forward and backward of the vision tower for one microbatch."""
    factor, sharers = costs.encoders(config, world_size)
    tp = config.parallel.tensor_model_parallel_size
    # The images of `factor` packs are divided among `sharers` x tp ranks.
    packs = config.training.micro_batch_size * factor / sharers / tp
    crops, pooled = costs.planned_images(config)
    of_crops = costs.crop_flops(config).times(crops).forward
    of_pooled = costs.pooled_flops(config).times(pooled).forward
    # `once` is the forward; `every` also contains the backward of trained parts.
    once = (of_crops + of_pooled) * packs / hardware.products
    every = costs.vision_flops(config, crops, pooled) * packs / hardware.products
    again = 0.0
    if config.training.recompute_mode.repeats_block and "vision" not in config.frozen_parts:
        again = once
    return _Part(work=once), _Part(work=every - once, again=again)


def _sharded(
    config: RunConfig, world_size: int, hardware: Hardware, chunks: Sequence[range]
) -> tuple[float, float]:
    """Return the seconds of gathering a stage's parameters and of summing its gradients.

    Dense parameters are shared over dp x cp, experts over edp. Whole frozen parameters are not
    gathered.
    """
    gather = 0.0
    scatter = 0.0
    for part in shared_messages(config, chunks, world_size):
        rate = hardware.ring(part.ranks, part.stride)
        # Each bucket goes round the ring once. A latency covers a launch and a few hops, so a hop
        # counts as a quarter of it.
        buckets = -(-part.moved // config.parallel.ddp_bucket_size)
        hops = (part.ranks - 1) * hardware.latency / 4 * buckets
        gather += part.gather / rate + hops
        scatter += part.scatter / rate + hops
    return gather, scatter


def in_lockstep(config: RunConfig, world_size: int) -> int:
    """Return how many replicas wait for each other in every microbatch.

    Replicas wait if they gather parameters or exchange tokens in each of them.
    """
    p = config.parallel
    dp = config.data_parallel_size(world_size)
    # A schedule gathers the single chunk of a stage only once per step.
    repeats = p.pipeline_model_parallel_size == 1 or p.num_virtual_stages_per_pipeline_rank > 1
    gathering = 0
    if repeats and p.sharding.parameters:
        gathering = dp // p.num_distributed_optimizer_instances
    ranks = p.tensor_model_parallel_size * p.context_parallel_size
    exchanging = p.expert_model_parallel_size // ranks
    return math.gcd(dp, max(1, exchanging, gathering))


def stage_parts(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    sample: PackSample,
    layers: Sequence[Sequence[range]],
) -> tuple[list[tuple[_Part, _Part]], int, float, float]:
    """Return four things:

    * forward and backward of each stage for one microbatch,
    * the number of the busiest stage,
    * its seconds of data parallelism per step that no microbatch hides,
    * its seconds of the optimizer.
    """
    # Stages of the same kind take equally long, so each kind is estimated once.
    kinds = [stage_kind(config, *stage) for stage in enumerate(layers)]
    alike = dict(zip(kinds, enumerate(layers), strict=True))
    known = {}
    for kind, stage in alike.items():
        known[kind] = _stage(config, world_size, hardware, sample, *stage)
    parts = [known[kind] for kind in kinds]
    totals = [forward.total + backward.total for forward, backward in parts]
    busiest = totals.index(max(totals))
    forward, backward = parts[busiest]
    p = config.parallel
    t = config.training

    # Messages of a whole step hide under one forward (gathers) and one backward (sums).
    exposed = 0.0
    if not p.sharding.parameters:
        gather, scatter = _sharded(config, world_size, hardware, layers[busiest])
        exposed = hardware.exposed(gather, forward.total)
        if not p.sharding.gradients:
            exposed += hardware.exposed(scatter, backward.total)
    # Copies of the optimizer also sum their gradients with each other.
    instances = p.num_distributed_optimizer_instances
    if instances > 1:
        dp = config.data_parallel_size(world_size)
        stride = p.tensor_model_parallel_size * p.context_parallel_size * dp // instances
        summed = instance_bytes(config, layers[busiest], world_size)
        exposed += summed / hardware.ring(instances, stride)

    # The gradient norm reads the gradients. The update reads gradients, master weights and two
    # moments, and writes the last three and the weights. The next step clears the gradients.
    trained = stage_parameters(config, layers[busiest], trained=True)
    share = 0.0
    for _, count, ranks, _ in shared_parts(config, layers[busiest], world_size):
        share += count / ranks
    updated = share * ((1 + 4 + 3) * t.accumulation_bytes + t.element_bytes)
    cleared = trained * t.accumulation_bytes
    return parts, busiest, exposed, (updated + cleared) / hardware.bandwidth


def step_time(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    sample: PackSample,
    *,
    idles: bool = True,
) -> StepTime:
    """Return the time of a step of a checked configuration on `world_size` ranks.

    With `idles=False`, return a lower bound: the time if no stage were idle.
    """
    config, sample = one_row(config, world_size, sample)
    microbatches = config.num_microbatches(world_size)
    dp = config.data_parallel_size(world_size)
    layers = costs.stage_layers(config, world_size)
    parts, busiest, exposed, optimizer = stage_parts(config, world_size, hardware, sample, layers)
    forward, backward = parts[busiest]
    spent = (forward + backward).times(microbatches)

    # CPU ranks take turns if there are fewer cores than ranks.
    span = spent.total
    turns = max(0.0, world_size / hardware.cores - 1)
    waiting = 0.0
    if len(parts) == 1:
        waiting = turns * span
    elif idles:
        # Run the schedule's actions on a clock; the last stage to finish ends the step.
        times = [kind_seconds(config, *part) for part in parts]
        chunks = config.parallel.num_virtual_stages_per_pipeline_rank
        spans = timeline(orders(config, world_size), chunks, times)
        span = max(span, *(stage[-1].stop for stage in spans))
        if turns:
            waiting = _turns(spans, hardware.cores * len(parts) / world_size)

    # Replicas in lockstep wait for the largest pack of every microbatch; without lockstep, for the
    # largest sum over a step.
    drawn = 1 if in_lockstep(config, world_size) > 1 else microbatches
    # `spent` has the attention of the busiest cp rank for a mean pack. A mean cp rank computes
    # `even`. The replica with the largest packs computes `most`, and the other ones wait for it.
    even = spent.attention / sample.shared(config)[0]
    most = spent.attention * sample.largest(dp, drawn)

    found = StepTime(
        compute=spent.work + even,
        again=spent.again,
        offload=spent.offload,
        tp=spent.tp,
        cp=spent.cp,
        ep=spent.ep,
        dp=spent.dp + exposed,
        pp=spent.pp,
        pipeline=span - spent.total,
        uneven=most - even,
        optimizer=optimizer,
        cores=waiting + turns * (exposed + optimizer),
    )
    slower = hardware.beside if world_size > 1 else 1.0
    return StepTime(*(seconds * slower for seconds in vars(found).values()))


def _turns(spans: Sequence[Sequence[Span]], cores: float) -> float:
    """Return the seconds that a pipeline takes longer on `cores` cores.

    While more stages compute at once than there are cores, they take turns.
    """
    # Sweep over the times at which a stage begins (+1) or ends (-1) an action.
    edges = []
    for stage in spans:
        for span in stage:
            edges.append((span.start, 1))
            edges.append((span.stop, -1))
    edges.sort()
    at_once = 0
    longer = 0.0
    for (start, change), (stop, _) in itertools.pairwise(edges):
        at_once += change
        longer += (stop - start) * max(0.0, at_once / cores - 1)
    return longer


def kind_seconds(config: RunConfig, forward: _Part, backward: _Part) -> Mapping[Kind, float]:
    """Return the seconds of each kind of action on a stage, for the timeline.

    The products of weight gradients are half of the work of a backward, at most that of a forward.
    """
    defers = config.parallel.defers_weight_gradients
    weights = min(forward.work, backward.work / 2) if defers else 0.0
    return {
        Kind.FORWARD: forward.total,
        Kind.BACKWARD: backward.total - weights,
        Kind.WEIGHTS: weights,
    }
