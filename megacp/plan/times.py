"""Estimate of the seconds in a training step, by cause, from the lists that a run executes.

First, the times of one microbatch on a stage are estimated:

* Matrix products take their FLOPs divided by the rate of products.
* Attention takes the FLOPs of its allowed pairs divided by the kernel's rate.
* Elementwise passes take the bytes saved for the backward pass divided by the memory bandwidth.
* Messages take their bytes divided by the rate of their group's slowest link, minus the compute
  time that they overlap with.
* Kernel launches on the host count if they do not overlap with compute.

Then the schedule's list of actions is simulated with these times; idle time counts as `pipeline`.
Competition between messages for the same link is not modelled.
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
    """Forward and backward passes, without recomputation."""
    again: float
    """Recomputation."""
    offload: float
    """Exposed transfers of activations to host memory and back. Exposed time is the part that does
    not overlap with compute.
    """
    tp: float
    """Exposed messages of tensor parallelism; `cp` and `ep` likewise."""
    cp: float
    ep: float
    dp: float
    """Exposed all-gathers of parameters and reductions of gradients."""
    pp: float
    """Exposed messages between pipeline stages."""
    pipeline: float
    """Idle time in the pipeline schedule."""
    uneven: float
    """Time spent waiting for the rank with the most work."""
    optimizer: float
    cores: float
    """Time spent waiting for a core that another rank uses (CPU ranks)."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def binds(self) -> str:
        """Largest cause other than compute, with its share of the step; "" if below 1 %."""
        causes = {name: seconds for name, seconds in vars(self).items() if name != "compute"}
        name = max(causes, key=lambda cause: causes[cause])
        if causes[name] < self.total / 100:
            return ""
        return f"{name} {causes[name] / self.total:.0%}"


@dataclass(frozen=True)
class _Part:
    """Seconds of one microbatch on a stage: work, and exposed messages."""

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
    """Return the fraction of attention that cuDNN computes; FlexAttention computes the rest."""
    model = config.model
    vision = config.vision
    if config.training.attention_kernel not in ("auto", "cudnn"):
        return 0.0
    if model.softmax_type != "vanilla" or model.head_dim > 128:
        return 0.0
    # In mock packs, every document has an image, whose tokens attend to each other.
    has_spans = vision.vision_num_layers > 0 and config.data.image_attention != "causal"
    if config.data.data_path is None and has_spans:
        return 0.0
    return sample.causal


def _layer(
    config: RunConfig, hardware: Hardware, sample: PackSample, number: int
) -> tuple[_Part, _Part]:
    """Return the seconds of a forward and a backward pass of block `number`, for one microbatch."""
    model = config.model
    p = config.parallel
    t = config.training
    mode = t.recompute_mode
    layer = layers_of(model)[number]
    tokens = t.micro_batch_size * config.data.seq_length
    ranks = p.tensor_model_parallel_size * p.context_parallel_size

    # Attended pairs: the pairs of a causal row, times the fraction that packs attend to, times the
    # imbalance of the cp ranks.
    # For experts, the busiest rank counts. Each expert has few rows, so its products are slower.
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
    # A backward pass computes gradients of inputs and weights; frozen weights need no gradient.
    trained = MATMUL_BACKWARD if "text" not in config.frozen_parts else 1.0

    # Attention. Narrow heads are slower: with heads of width 64, an H200 reaches 0.72 of the rate.
    narrow = min(1.0, model.head_dim / 128) ** 0.5
    fused = _fused_share(config, sample)
    scores = flops.attention / ranks / narrow
    fused_forward, fused_backward = hardware.attention["fused"]
    flex_forward, flex_backward = hardware.attention["flex"]
    there = scores * (fused / fused_forward + (1 - fused) / flex_forward)
    back = scores * (fused / fused_backward + (1 - fused) / flex_backward)

    # Elementwise passes: each saved tensor is written once and read once. A routed block also
    # copies each token's rows to its experts, weights their outputs and copies these back.
    kept_without = _kept(config, number, KEEP_ALL) / hardware.bandwidth
    passes = 2 * kept_without
    if layer.is_routed:
        routed = expert_rows(config) * model.hidden_size * t.element_bytes
        passes += 6 * routed / hardware.bandwidth
    # The host launches kernels ahead of the GPU, so launches cost time only in small blocks.
    calls = hardware.exposed(hardware.calls, products + passes + there)

    # Recomputation. The output of attention is saved, but a recurrent layer is recomputed.
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
        # Tiles recompute the first products of the MLP. This is not added if the whole block is
        # recomputed: that recomputation stops before the tiles.
        linears = layer.mlp.linears(model).values()
        up = sum(linear.inputs * linear.outputs for linear in linears if linear.cut == "rows")
        again += (2.0 * tokens * up + experts) / ranks / hardware.products

    # Tensor parallelism gathers the residual stream before attention and MLP, and scatters it
    # afterwards. In the backward pass, half of these messages overlap with weight gradients, and so
    # does the gather of inputs for them. A block with experts counts like a dense block.
    tensor = 0.0
    if p.tensor_model_parallel_size > 1:
        rate = hardware.ring(p.tensor_model_parallel_size, 1)
        tensor = 4 * (stream_bytes(config) / rate + hardware.latency)
    tensor_backward = tensor * (1 - hardware.overlap / 2)

    # Context parallelism exchanges tokens for heads and sends keys; the backward pass also sends
    # gradients. Recomputation repeats the exchange for heads.
    swap, sent, hidden = 0.0, 0.0, 0.0
    if not layer.has_state:
        swap, sent, hidden = _context(config, hardware, sample)
    swap_backward = swap
    if mode.repeats_block:
        tensor_backward += tensor
        swap_backward += swap
    attention_backward = ATTENTION_BACKWARD * back

    # Tokens are sent to their experts and back in the forward pass, and again in the backward pass.
    # Each pass gets half of these bytes.
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
    """Return the bytes that a block saves for the backward pass, without tiles, on a single rank.

    Elementwise passes read and write these bytes. MLP tiles and the number of ranks that share a
    row do not change them.
    """
    changes: dict[str, Value] = {"mlp_chunk_tokens": 0, "recompute_granularity": granularity}
    whole = with_values(as_one_rank(config), changes)
    return block_memory(whole, layer).kept


def _context(
    config: RunConfig, hardware: Hardware, sample: PackSample
) -> tuple[float, float, float]:
    """Return the times of context parallelism in the forward pass of a layer's attention.

    The three values are the seconds to exchange tokens for heads, the seconds to send K/V, and the
    fraction of attention that sending can overlap with.
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
    if heads > 1:  # exchange q, k and v, and then the output
        swap = swap_bytes(config) / hardware.exchange(heads, tp) + 2 * hardware.latency
    sent = 0.0
    if ring > 1:
        # A ring sends to one neighbour, all_gather is a collective, and kv_exchange an all-to-all.
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
    """Return the seconds of a forward and a backward pass of a stage, for one microbatch."""
    p = config.parallel
    t = config.training
    stages = p.pipeline_model_parallel_size

    # Blocks of the same kind are estimated once.
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

    # Gradients are accumulated in the wider dtype.
    trained = stage_parameters(config, chunks, trained=True)
    summed = trained * (t.element_bytes + 2 * t.accumulation_bytes) / hardware.bandwidth
    backward += _Part(work=summed)

    # Activations are copied to the host in the forward pass, and back in the backward pass.
    if t.activation_offload:
        kept = sum(block_memory(config, layer).kept * count for layer, count in alike.items())
        moved = kept * sum(costs.offloaded_blocks(config, chunks)) / alike.total() / hardware.host
        forward += _Part(offload=hardware.exposed(moved, forward.total))
        backward += _Part(offload=hardware.exposed(moved, backward.total))
    if p.sharding.gradients:
        gather, scatter = _sharded(config, world_size, hardware, chunks)
        if p.sharding.parameters:
            # Half of the gathers are in the forward pass, half in the backward pass.
            gathers = gathers_a_step(config, world_size, len(chunks))
            gather *= gathers / config.num_microbatches(world_size) / 2
        else:
            gather = 0.0  # parameters are gathered once per step, not per microbatch
        forward += _Part(dp=hardware.exposed(gather, forward.total))
        backward += _Part(dp=hardware.exposed(gather + scatter, backward.total))
    if stages > 1:
        rate = hardware.link(stages, world_size // stages)
        one = boundary_bytes(config) / rate + hardware.latency
        # The model's first chunk receives no message in the forward pass, and its last chunk
        # receives none in the backward pass.
        arriving = len(chunks) - 1 if stage == 0 else len(chunks)
        returning = len(chunks) - 1 if stage == stages - 1 else len(chunks)
        forward += _Part(pp=hardware.exposed(one * arriving, forward.total))
        backward += _Part(pp=hardware.exposed(one * returning, backward.total))
    return forward, backward


def _head(config: RunConfig, hardware: Hardware) -> _Part:
    """Return the seconds of head and loss in the forward pass, which already computes gradients.
    The loss takes about five passes over the logits.
    """
    tokens = config.training.micro_batch_size * config.data.seq_length
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    head = costs.head_flops(config.model, tokens).matmul / ranks / hardware.products
    logits = tokens_per_rank(config) * costs.logit_bytes(config) / hardware.bandwidth
    # the output, the input gradient, and the weight gradient if the weight is trained
    products = 2 if "text" in config.frozen_parts else 3
    return _Part(work=products * head + 5 * logits)


def _tower(config: RunConfig, world_size: int, hardware: Hardware) -> tuple[_Part, _Part]:
    """Return the seconds of a forward and a backward pass of the tower, for one microbatch."""
    factor, sharers = costs.encoders(config, world_size)
    tp = config.parallel.tensor_model_parallel_size
    # The images of `factor` packs are divided among `sharers` x tp ranks.
    packs = config.training.micro_batch_size * factor / sharers / tp
    crops, pooled = costs.planned_images(config)
    of_crops = costs.crop_flops(config).times(crops).forward
    of_pooled = costs.pooled_flops(config).times(pooled).forward
    # `once` is the forward pass; `every` also includes the backward pass of trained parts.
    once = (of_crops + of_pooled) * packs / hardware.products
    every = costs.vision_flops(config, crops, pooled) * packs / hardware.products
    again = 0.0
    if config.training.recompute_mode.repeats_block and "vision" not in config.frozen_parts:
        again = once
    return _Part(work=once), _Part(work=every - once, again=again)


def _sharded(
    config: RunConfig, world_size: int, hardware: Hardware, chunks: Sequence[range]
) -> tuple[float, float]:
    """Return the seconds to gather a stage's parameters and the seconds to reduce its gradients.

    Dense parameters are sharded across dp x cp ranks, experts across edp ranks. Frozen parameters
    that are not sharded are not gathered.
    """
    gather = 0.0
    scatter = 0.0
    for part in shared_messages(config, chunks, world_size):
        rate = hardware.ring(part.ranks, part.stride)
        # Each bucket goes around the ring once. `latency` covers a launch and a few hops, so one
        # hop counts as a quarter of it.
        buckets = -(-part.moved // config.parallel.ddp_bucket_size)
        hops = (part.ranks - 1) * hardware.latency / 4 * buckets
        gather += part.gather / rate + hops
        scatter += part.scatter / rate + hops
    return gather, scatter


def in_lockstep(config: RunConfig, world_size: int) -> int:
    """Return the number of replicas that wait for each other in every microbatch.

    Replicas wait if they gather parameters or exchange tokens in every microbatch.
    """
    p = config.parallel
    dp = config.data_parallel_size(world_size)
    # If a stage has a single chunk, the schedule gathers it only once per step.
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
    """Return four values:

    * the seconds of each stage's forward and backward pass, for one microbatch,
    * the number of the busiest stage,
    * its exposed seconds of data parallelism per step,
    * its seconds for the optimizer update.
    """
    # Stages of the same kind take the same time, so each kind is estimated once.
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

    # Messages that are sent once per step overlap with one microbatch: gathers with its forward
    # pass, reductions with its backward pass.
    exposed = 0.0
    if not p.sharding.parameters:
        gather, scatter = _sharded(config, world_size, hardware, layers[busiest])
        exposed = hardware.exposed(gather, forward.total)
        if not p.sharding.gradients:
            exposed += hardware.exposed(scatter, backward.total)
    # Copies of the optimizer also reduce their gradients across copies.
    instances = p.num_distributed_optimizer_instances
    if instances > 1:
        dp = config.data_parallel_size(world_size)
        stride = p.tensor_model_parallel_size * p.context_parallel_size * dp // instances
        summed = instance_bytes(config, layers[busiest], world_size)
        exposed += summed / hardware.ring(instances, stride)

    # The gradient norm reads the gradients. The update reads gradients, master weights and two
    # moments; it writes master weights, moments and weights. The next step clears the gradients.
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
    """Return the step time of a checked configuration on `world_size` ranks.

    With `idles=False`, return a lower bound: the time without idle stages.
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
        # Simulate the schedule's actions. The step ends when the last stage finishes.
        times = [kind_seconds(config, *part) for part in parts]
        chunks = config.parallel.num_virtual_stages_per_pipeline_rank
        spans = timeline(orders(config, world_size), chunks, times)
        span = max(span, *(stage[-1].stop for stage in spans))
        if turns:
            waiting = _turns(spans, hardware.cores * len(parts) / world_size)

    # Replicas in lockstep wait for the largest pack of every microbatch. Other replicas wait for
    # the largest sum in a step.
    drawn = 1 if in_lockstep(config, world_size) > 1 else microbatches
    # `spent` includes the attention of the busiest cp rank for an average pack. The average cp rank
    # computes `even`. The replica with the largest packs computes `most`; the others wait for it.
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
    """Return the extra seconds that a pipeline takes if it has only `cores` cores.

    Stages take turns while more of them compute at once than there are cores.
    """
    # Visit the times at which a stage begins (+1) or ends (-1) an action, in order.
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

    Weight gradients take half the work of a backward pass, but no more than a forward pass.
    """
    defers = config.parallel.defers_weight_gradients
    weights = min(forward.work, backward.work / 2) if defers else 0.0
    return {
        Kind.FORWARD: forward.total,
        Kind.BACKWARD: backward.total - weights,
        Kind.WEIGHTS: weights,
    }
