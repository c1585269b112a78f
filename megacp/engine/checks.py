"""Configuration checks, which run before any process group exists and report all problems at once.

First, every field is checked against its range. If all fields pass, the functions in `SECTIONS`
compare fields with each other. A check belongs here if the run would otherwise silently compute
wrong results, or fail only after hours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.engine.config.blend import named_folders, path_problems, shown_path
from megacp.engine.config.model import LINEARS, LORA_KINDS, ModelConfig, parse_lora_targets
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.config.ranges import MAX_EXPERTS_IN_ALL
from megacp.engine.config.run import RunConfig, fields, flag, flatten
from megacp.engine.layers.attention import heads_group, transport_of
from megacp.engine.layers.stack import EXPERT_KINDS, layers_of, lora_kinds
from megacp.storage.place import place_of
from megacp.storage.url import Url, is_url
from megacp.storage.wording import counted

MAX_DENSE_ROW_TOKENS = 8192
"""Maximum row length T for the dense kernel, which stores T x T scores (256 MiB) per float32 head.
"""


def check(config: RunConfig, world_size: int, *, trains: bool = True) -> list[str]:
    """Return all reasons why this configuration cannot run on `world_size` ranks; empty if it can.

    `trains=False` skips checks that only matter for training, for example during conversion.
    """
    values = flatten(config)
    reasons = []
    for name, info in fields().items():
        problem = info.problem(values[name])
        if problem:
            reasons.append(f"{flag(name)}: {problem}")
    if world_size < 1:
        reasons.append(f"the world size is {world_size}, but it must be at least 1")
    # the sections compute with the fields, so all fields must be within their ranges
    if reasons:
        return reasons
    sections = (*SECTIONS, *OF_TRAINING) if trains else SECTIONS
    for section in sections:
        reasons += section(config, world_size)
    return reasons


def require(config: RunConfig, world_size: int, also: Sequence[str] = ()) -> None:
    """Raise ValueError if `check` or the caller (`also`) has reasons; the message lists all."""
    reasons = [*check(config, world_size), *also]
    if not reasons:
        return
    head = "this configuration cannot run"
    if len(reasons) > 1:
        head += f" for {len(reasons)} reasons"
    lines = [f"  - {reason}" for reason in reasons]
    raise ValueError("\n".join([f"{head}:", *lines]))


# Tables for `_multiples`. tp must split each of these sizes evenly, and in grouped-query attention
# each key/value head has the same number of query heads.
_TP = "tensor_model_parallel_size"
_DECODER_MULTIPLES = (
    ("num_attention_heads", _TP),
    ("num_query_groups", _TP),
    ("num_attention_heads", "num_query_groups"),
    ("ffn_hidden_size", _TP),
    ("moe_shared_expert_intermediate_size", _TP),
)
# Layers with a recurrent state, which exist only if --linear-attention-freq is set
_STATE_MULTIPLES = (
    ("linear_num_key_heads", _TP),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
# The vision tower, if there is one
_TOWER_MULTIPLES = (
    ("vision_image_size", "vision_patch_size"),
    ("vision_ffn_hidden_size", _TP),
    ("connector_ffn_hidden_size", _TP),
    ("vision_num_attention_heads", _TP),
    ("vision_hidden_size", "vision_num_attention_heads"),
)
"""Pairs of fields: the first must be a multiple of the second. A pair with a None is skipped,
because the default then follows from another field, whose pair is checked.
"""


def _slices(parallel: ParallelConfig) -> int:
    """Return the number of equal slices of a row that each cp rank gets.

    For `--cp-layout auto`, return the maximum over all layouts.
    """
    if parallel.context_parallel_size == 1:
        return 1
    if parallel.chooses_layout:
        return max(layout.slices for layout in LAYOUTS.values())
    return LAYOUTS[parallel.cp_layout].slices


def _multiples(config: RunConfig, world: int) -> Iterator[str]:
    """Yield a reason for each value that is not a multiple of its divisor, with valid values."""
    values = flatten(config)
    model = config.model
    parallel = config.parallel
    training = config.training
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    ranks = config.model_ranks
    dp = config.data_parallel_size(world)

    # rows of (text of the number, number, text of the divisor, divisor)
    rows = [
        (
            f"a world of {counted(world, 'rank')}",
            world,
            f"tp {tp} x pp {pp} x cp {cp} = {ranks}",
            ranks,
        )
    ]
    if world % ranks == 0:  # otherwise dp is rounded down, and this message would be misleading
        packs = training.micro_batch_size * dp
        divisor_text = (
            f"--micro-batch-size {training.micro_batch_size} x dp {dp} = {packs} "
            f"(dp = {world} ranks / {ranks})"
        )
        batch = training.global_batch_size
        rows.append((f"--global-batch-size {batch}", batch, divisor_text, packs))

    # each rank gets whole slices of a row, and sequence parallelism splits every slice over tp
    slices = _slices(parallel)
    sharded = tp if parallel.sequence_parallel else 1
    parts = slices * cp * sharded
    divisor_text = (
        f"{slices} slices of --cp-layout {parallel.cp_layout} x cp {cp} x tp {sharded} = {parts}"
    )
    length = config.data.seq_length
    rows.append((f"--seq-length {length}", length, divisor_text, parts))

    if model.kv_channels is None:
        heads = model.num_attention_heads
        divisor_text = f"--num-attention-heads {heads} (or set --kv-channels)"
        rows.append((f"--hidden-size {model.hidden_size}", model.hidden_size, divisor_text, heads))

    # pairs of flags that this model uses
    rules = [*_DECODER_MULTIPLES]
    if model.linear_attention_freq is not None:
        rules += _STATE_MULTIPLES
    if config.vision.vision_num_layers > 0:
        rules += _TOWER_MULTIPLES
    for name, divisor_name in rules:
        number = values[name]
        divisor = values[divisor_name]
        if isinstance(number, int) and isinstance(divisor, int):
            rows.append(
                (f"{flag(name)} {number}", number, f"{flag(divisor_name)} {divisor}", divisor)
            )

    # suggest the nearest multiples, but never 0
    for number_text, number, divisor_text, divisor in rows:
        if number % divisor == 0:
            continue
        below = number // divisor * divisor
        above = below + divisor
        usable = f"{below} or {above}" if below else f"{above}"
        yield f"{number_text} is not a multiple of {divisor_text}: use {usable}"


def _grid(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts between the grid and the layers, pipeline schedule or sharding strategy."""
    p = config.parallel
    training = config.training
    layers = config.model.num_layers
    pp = p.pipeline_model_parallel_size
    virtual = p.num_virtual_stages_per_pipeline_rank
    # --world-size lets a dry run check a grid that is larger than this machine
    if config.world_size not in (None, world) and not config.dry_run:
        yield (
            f"--world-size {config.world_size} needs --dry-run: without it, the world consists of "
            f"the {world} ranks that the launcher started"
        )
    chunks = f"--num-virtual-stages-per-pipeline-rank {virtual}"
    if layers < pp * virtual:
        yield (
            f"--num-layers {layers} is below --pipeline-model-parallel-size {pp} x {chunks}, but "
            "each chunk needs at least one layer: lower one of these two sizes"
        )
    if virtual > 1 and pp == 1:
        yield f"{chunks} needs --pipeline-model-parallel-size above 1"

    # Both options add weight gradients directly to the gradient buffer of the whole parameter.
    strategy = p.data_parallel_sharding_strategy
    deferring = f"--pipeline-schedule {p.pipeline_schedule}"
    accumulating = []
    if p.defers_weight_gradients:
        accumulating.append(deferring)
    if training.gradient_accumulation_fusion:
        accumulating.append("--gradient-accumulation-fusion")
    for name in accumulating:
        if p.sharding.gradients:
            yield (
                f"{name} needs unsharded gradients, but --data-parallel-sharding-strategy "
                f"{strategy} shards them: use optim"
            )
        if config.model.lora_rank > 0:
            yield (
                f"{name} cannot be combined with --lora-rank {config.model.lora_rank}, which "
                "freezes the weights of linear layers"
            )
    # The deferred weight gradients need the MLP activations that tiling would free.
    if p.defers_weight_gradients and training.mlp_chunk_tokens > 0:
        yield (
            f"--mlp-chunk-tokens {training.mlp_chunk_tokens} has no effect with {deferring}, which "
            "keeps the MLP's activations: use only one of the two"
        )
    # all instances have the same number of ranks
    instances = p.num_distributed_optimizer_instances
    dp = config.data_parallel_size(world)
    if dp % instances > 0:
        usable = f"use {math.gcd(dp, instances)}"
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the "
            f"data-parallel size {dp}: {usable}"
        )


def _model(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts within the decoder: head width, vocabulary and layer patterns."""
    m = config.model
    # `_multiples` reports a hidden size that is not divisible by the number of heads
    divides = m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0
    if divides and m.head_dim % 2 > 0:
        yield (
            f"the head width is {m.head_dim}, but the rotary embedding needs an even width: set "
            "--kv-channels to an even number"
        )
    if m.vocab_size == 0 and config.data.data_path is None and not config.dry_run:
        yield (
            "--vocab-size 0 uses the dataset's vocabulary, but --data-path is not set: set "
            "one of the two"
        )
    # a tied head would have rows for tokens that the model never predicts
    if m.additional_vocab_size > 0 and not m.untie_embeddings_and_output_weights:
        yield (
            f"--additional-vocab-size {m.additional_vocab_size} needs "
            "--untie-embeddings-and-output-weights"
        )
    # `layers_of` parses the patterns and raises ValueError if one is invalid
    try:
        routed = [layer for layer in layers_of(m) if layer.is_routed]
        if m.num_experts > 0 and not routed:
            yield (
                f"--moe-layer-freq {m.moe_layer_freq} gives none of the {m.num_layers} layers "
                "experts: set at least one entry to 1"
            )
        # Unlike in other patterns, a list must have an entry for each layer, as in Megatron.
        listed = m.moe_layer_freq.count(",") + 1
        if m.num_experts > 0 and listed != m.num_layers and not m.moe_layer_freq.isdigit():
            yield (
                f"--moe-layer-freq {m.moe_layer_freq} has {listed} entries, but --num-layers is "
                f"{m.num_layers}: use one entry per layer"
            )
    except ValueError as error:
        yield str(error)
    if m.window_attn_skip_freq is not None and m.window_size is None:
        yield f"--window-attn-skip-freq {m.window_attn_skip_freq} needs --window-size"


def _experts(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts between the experts and the router, the grid or training flags."""
    m = config.model
    p = config.parallel
    t = config.training
    tp = p.tensor_model_parallel_size
    ep = p.expert_model_parallel_size
    dp = config.data_parallel_size(world)
    size = f"--expert-model-parallel-size {ep}"
    count = f"--num-experts {m.num_experts}"
    if m.moe_shared_expert_gate and m.moe_shared_expert_intermediate_size is None:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"

    # training flags that act on a router
    terms = (
        ("--moe-aux-loss-coeff", t.moe_aux_loss_coeff),
        ("--moe-z-loss-coeff", t.moe_z_loss_coeff),
    )
    balancing = [f"{name} {value:g}" for name, value in terms if value > 0]
    correction = f"--moe-router-bias-update-rate {t.moe_router_bias_update_rate:g}"
    corrects = t.moe_router_bias_update_rate > 0
    if corrects:
        balancing.append(correction)

    # without experts, report every changed flag that would be ignored
    if m.num_experts == 0:
        usual = ModelConfig()
        unused = []
        for name, value in vars(m).items():
            if name.startswith("moe_") and value != getattr(usual, name):
                unused.append(f"{flag(name)} {value}")
        if ep > 1:
            unused.append(size)
        for given in unused + balancing:
            yield f"{given} needs --num-experts above 0"
        return

    in_all = m.num_layers * m.num_experts
    if in_all > MAX_EXPERTS_IN_ALL:
        yield (
            f"{count} x --num-layers {m.num_layers} = {in_all:,} experts in total, but at most "
            f"{MAX_EXPERTS_IN_ALL:,} are supported"
        )
    # LoRA and --freeze text leave the router untrained, so these flags cannot change its choices
    if "text" in config.frozen_parts:
        for given in balancing:
            yield f"{given} has no effect because the router is frozen: remove this flag"

    # choice of experts
    groups = m.moe_router_num_groups
    best = m.moe_router_group_topk
    groups_text = f"--moe-router-num-groups {groups}"
    if m.moe_router_score_function == "softmax":
        if groups > 1:
            yield f"{groups_text} needs --moe-router-score-function sigmoid"
        if corrects:
            yield f"{correction} needs --moe-router-score-function sigmoid"
    # groups are ranked by the sum of their two highest scores, so each needs two experts
    if groups > 1 and (m.num_experts % groups > 0 or m.num_experts < 2 * groups):
        yield f"{groups_text} must divide {count} into equal groups of at least two experts"
    if best > groups:
        yield (
            f"--moe-router-group-topk {best} is above {groups_text}: a token cannot use more "
            "groups than there are"
        )
    elif groups > 1 and m.moe_router_topk * groups > best * m.num_experts:
        yield (
            f"--moe-router-group-topk {best} of {groups_text} leaves fewer experts to choose from "
            f"than --moe-router-topk {m.moe_router_topk} of {count}"
        )
    if m.moe_router_topk > m.num_experts:
        yield f"--moe-router-topk {m.moe_router_topk} is above {count}: use at most all experts"

    # grid: ep divides the ranks of a stage, and each group of ep ranks has one copy of every expert
    ranks = tp * p.context_parallel_size * dp
    stage = f"tp {tp} x cp {p.context_parallel_size} x dp {dp}"
    largest = math.gcd(m.num_experts, ranks)
    if largest % ep > 0:
        yield (
            f"{size} must divide both {count} and the {ranks} ranks of a stage ({stage}): use a "
            f"divisor of {largest}"
        )
    # experts' optimizer state is sharded across the ranks that have a copy of the same expert
    instances = p.num_distributed_optimizer_instances
    copies = ranks // ep
    if instances > 1 and copies % instances > 0:
        yield (
            f"--num-distributed-optimizer-instances {instances} must divide {copies}, the number "
            "of ranks that have a copy of each expert"
        )
    if tp > 1 and not p.sequence_parallel:
        yield (
            f"{count} with tp {tp} needs --sequence-parallel; otherwise all tp ranks would route "
            "the same tokens"
        )
    if t.fp8 != "off":
        yield f"--fp8 {t.fp8} cannot be combined with {count}: experts do not support FP8"


def _routers(config: RunConfig, world: int) -> Iterator[str]:
    """Refuse a trained router that gets no gradient from the loss, as Megatron does.

    If a token chooses a single expert, the softmax over it is 1 for any score, and so is the
    normalised sigmoid. Balancing losses would still train such a router, but only towards even
    loads, not towards better experts.
    """
    m = config.model
    if m.num_experts == 0 or "text" in config.frozen_parts:
        return
    no_gradient = "so the loss gives the router no gradient"
    freeze = "freeze the router (--lora-rank trains only LoRA adapters)"
    # A weight normalised over one chosen expert is constant. With pre-softmax, weights are
    # normalised over all experts, so they depend on the scores.
    if m.moe_router_topk == 1 and not m.moe_router_pre_softmax:
        function = {
            "softmax": "softmax over the chosen expert",
            "sigmoid": "normalised sigmoid of the chosen expert",
        }
        weight = f"the {function[m.moe_router_score_function]} is always 1"
        # with --load-hf, this flag would change the function that the loaded weights compute
        other = "" if config.checkpoint.load_hf is not None else "use --moe-router-pre-softmax, or "
        yield f"--moe-router-topk 1: {weight}, {no_gradient}; {other}{freeze}"
    elif m.num_experts == 1 and m.moe_router_score_function == "softmax":
        yield (
            f"--num-experts 1: the softmax over one expert is always 1, {no_gradient}; use a dense "
            f"MLP, or {freeze}"
        )


def _schedule(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts within the learning rate schedule, and invalid profiled steps."""
    t = config.training
    warmup = t.warmup_updates
    wsd_decay = t.lr_wsd_decay_iters or 0
    if t.lr_decay_iters is None:
        end = t.train_iters
        end_text = f"--train-iters {end}"
    else:
        end = t.lr_decay_iters
        end_text = f"--lr-decay-iters {end}"
    # a decay from --lr to a larger --min-lr would be a rise
    if t.min_lr > t.lr:
        yield f"--min-lr {t.min_lr:g} is above --lr {t.lr:g}: lower --min-lr or raise --lr"
    if t.lr_warmup_iters > 0 and t.lr_warmup_fraction is not None:
        yield (
            f"--lr-warmup-iters {t.lr_warmup_iters} and --lr-warmup-fraction "
            f"{t.lr_warmup_fraction:g} both set the warm-up: use one of them "
            "(--lr-warmup-fraction None overrides a value from a file)"
        )
    if warmup > end:
        yield (
            f"--lr-warmup-iters {warmup} is above {end_text}: lower it, or use --lr-warmup-fraction"
        )
    # only the WSD style has a final decay, and it requires one
    if (t.lr_decay_style == "WSD") != (wsd_decay > 0):
        yield (
            f"--lr-wsd-decay-iters {wsd_decay} with --lr-decay-style {t.lr_decay_style}: the "
            "style WSD needs this flag above 0, and other styles do not use it"
        )
    elif warmup <= end < warmup + wsd_decay:
        yield (
            f"--lr-wsd-decay-iters {wsd_decay} does not fit between the {warmup} warm-up steps and "
            f"{end_text}: use at most {end - warmup}"
        )
    if config.log.profile:
        try:
            first = profiled_steps(config.log.profile)[0]
            if first > t.train_iters:
                yield (
                    f"--profile {config.log.profile} starts after --train-iters {t.train_iters}: "
                    "use earlier steps"
                )
        except ValueError as error:
            yield str(error)


def profiled_steps(text: str) -> range:
    """Parse `--profile START:STOP` and return these steps, both included.

    Raise ValueError if `text` has another form.
    """
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)):
        raise ValueError(
            f"--profile {text}: expected START:STOP with two step numbers of at least 1, such as "
            "10:12"
        )
    return range(int(start), int(stop) + 1)


def packs_in_a_row(config: RunConfig, world: int) -> int:
    """Return the number of data-parallel ranks whose packs are joined into one row."""
    if config.parallel.dynamic_context_parallel:
        return max(1, config.data_parallel_size(world))
    return 1


def _context(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts between row length, attention kernel, transport and token layout."""
    p = config.parallel
    cp = p.context_parallel_size
    tp = p.tensor_model_parallel_size
    comm = p.cp_comm_type
    joined = packs_in_a_row(config, world)
    tokens = config.data.seq_length * config.training.micro_batch_size * joined
    if config.training.attention_kernel == "dense":
        # an automatic choice could need more than the dense kernel supports
        undecided = p.chooses_transport or p.chooses_layout
        if cp * joined > 1 or tokens > MAX_DENSE_ROW_TOKENS or undecided:
            yield (
                "--attention-kernel dense is a reference that supports only one cp rank and rows "
                f"of at most {MAX_DENSE_ROW_TOKENS} tokens, but this run has "
                f"--context-parallel-size {cp}, rows of {tokens} tokens and --cp-comm-type {comm}: "
                "use another kernel"
            )
    transport = transport_of(config)
    # A document may use any number of ranks, so the layout must not need a fixed number.
    fits_replicas = (
        comm == transport.name and transport.spans_replicas and p.cp_layout == transport.best_layout
    )
    if p.dynamic_context_parallel and not fits_replicas:
        allowed = " or ".join(
            f"--cp-layout {row.best_layout} and --cp-comm-type {row.name}"
            for row in TRANSPORTS.values()
            if row.spans_replicas
        )
        yield (
            f"--dynamic-context-parallel needs {allowed}, but this run uses {p.cp_layout} and "
            f"{comm}"
        )
    # a2a+p2p needs group sizes that cover all cp ranks, and other transports ignore them
    sizes = p.hierarchical_context_parallel_sizes
    name = "--hierarchical-context-parallel-sizes"
    if transport.needs_sizes and cp > 1 and (sizes is None or sizes[0] * sizes[1] != cp):
        yield f"--cp-comm-type {comm} needs {name} A B with A x B = {cp}, but got {sizes}"
    elif not transport.needs_sizes and sizes is not None:
        users = " or ".join(row.name for row in TRANSPORTS.values() if row.needs_sizes)
        yield (
            f"{name} {sizes[0]} {sizes[1]} needs --cp-comm-type {users}, but this run uses {comm}"
        )
    # tp splits the heads first; the transport then distributes a tp rank's heads across cp ranks
    head_ranks = heads_group(config)
    heads = config.model.num_attention_heads // tp
    if heads % head_ranks > 0:
        yield (
            f"--cp-comm-type {comm} cannot distribute heads evenly across {head_ranks} ranks, "
            f"because a tp rank has {heads} heads (--num-attention-heads / tp {tp}): use a2a+p2p "
            f"with a first size that divides {heads}, or p2p or kv_exchange"
        )


def _vision(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts between the vision tower and other flags, if the model has a tower."""
    v = config.vision
    layers = v.vision_num_layers
    if layers == 0:
        return
    # freezing all three parts would leave nothing to train
    parts = {"vision", "connector", "text"}
    if not set(v.frozen) <= parts or set(v.frozen) == parts:
        yield f"--freeze {v.freeze}: use only one or two of vision, connector and text"
    family = v.family
    if v.vision_head_dim % family.head_multiple:
        yield (
            f"the head width of the vision tower is {v.vision_head_dim}, but rotary angles by row "
            f"and column need a multiple of {family.head_multiple}: change --vision-hidden-size or "
            "--vision-num-attention-heads"
        )
    # the mask of the data must match the attention that the model family was trained with
    seen = config.data.image_attention
    if family.is_causal and seen != "causal":
        yield (
            f"--image-attention {seen}: --vision-family {v.vision_family} needs "
            "--image-attention causal"
        )
    first, second = v.vision_feature_layers
    # `feature_layers` wraps negative numbers around, so check their range before
    is_outside = min(first, second) < -layers or max(first, second) >= layers
    if family.has_feature_layers and (is_outside or max(v.feature_layers) < layers - 1):
        yield (
            f"--vision-feature-layers {first} {second}: with --vision-num-layers {layers}, both "
            f"must be between {-layers} and {layers - 1}, and one of them must be the last layer"
        )
    if family.token_rows and config.model.additional_vocab_size == 0:
        yield (
            f"--vision-num-layers {layers} needs embedding rows for image tokens: set "
            f"--additional-vocab-size {family.token_rows} for {v.vision_family}"
        )


def _names_no_layer(word: str, model: ModelConfig) -> bool:
    """Return whether a word of --lora-targets only matches kinds that no layer has."""
    kinds, _ = parse_lora_targets(word, model.usual_pair)
    return bool(kinds) and kinds.keys().isdisjoint(lora_kinds(model))


def _lora(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts between LoRA flags and the layers or training flags."""
    m = config.model
    if m.lora_rank == 0:
        if m.lora_alpha is not None or m.lora_targets is not None or m.lora_dropout > 0:
            yield "--lora-alpha, --lora-targets and --lora-dropout need --lora-rank above 0"
        return
    # the default of --lora-targets
    targets = m.lora_targets or "q,v"
    asked, faults = parse_lora_targets(targets, m.usual_pair)
    if faults or not asked:
        invalid = f" (invalid: {', '.join(faults)})" if faults else ""
        yield (
            f"--lora-targets {m.lora_targets}: use words ({', '.join(LINEARS)}), kinds "
            f"({', '.join(LORA_KINDS)}) or all; KIND:RANK:ALPHA sets the rank and alpha of a "
            f"kind, and attention.q+v makes q and v share one A{invalid}"
        )
    lacking = [word for word in targets.replace(",", " ").split() if _names_no_layer(word, m)]
    if lacking and not faults:
        yield (
            f"--lora-targets {' '.join(lacking)}: this model has no such linear layers; remove "
            "these words"
        )
    # kinds that layers of this model actually have
    kinds = lora_kinds(m)
    experts = [kind for kind in kinds if kind in EXPERT_KINDS]
    if m.lora_dropout > 0 and experts:
        yield (
            f"--lora-dropout {m.lora_dropout} on {', '.join(experts)}: as in peft, adapters of "
            "experts do not support dropout; remove one of the two"
        )
    # The same kind may have different widths in different layers, so look at all of them.
    narrow = dict[str, str]()
    for layer in layers_of(m):
        for kind, linear in layer.lora_linears(m).items():
            width = min(linear.inputs, linear.outputs)
            rank = m.lora_pairs[kind].rank
            # exempt the rates b and a of a gated delta rule, which have one output per head
            if rank > width and kind.split(".")[1] in LINEARS:
                narrow[kind] = f"{kind} (rank {rank}, width {width})"
    if narrow:
        yield (
            f"--lora-rank {m.lora_rank} or --lora-targets sets a rank above the smaller dimension "
            f"of a linear layer: {', '.join(narrow.values())}; use a lower rank"
        )
    # dropout masks are computed from token identifiers so that they do not depend on the grid
    has_mlp = any(kind.endswith((".gate", ".up", ".down")) for kind in kinds)
    if m.lora_dropout > 0 and config.training.mlp_chunk_tokens > 0 and has_mlp:
        yield (
            f"--lora-dropout {m.lora_dropout} on the MLP cannot be combined with "
            f"--mlp-chunk-tokens {config.training.mlp_chunk_tokens}: a tile lacks the token "
            "identifiers that dropout masks are computed from"
        )
    folder = config.checkpoint.vision_from_hf
    if folder is not None:
        yield (
            f"--vision-from-hf {folder} cannot be combined with --lora-rank {m.lora_rank}, which "
            "would freeze the new connector at its random initial weights"
        )


def _data(config: RunConfig, world: int) -> Iterator[str]:
    """Yield flags that lack their dataset, and problems with blended datasets."""
    data = config.data
    interval = config.training.eval_interval
    if config.training.train_epochs is not None and data.data_path is None and not config.dry_run:
        yield f"--train-epochs {config.training.train_epochs:g} needs --data-path"
    if interval > 0 and data.valid_data_path is None:
        yield f"--eval-interval {interval} needs --valid-data-path"
    if data.valid_data_path and data.data_path is None:
        yield (
            f"--valid-data-path {shown_path(data.valid_data_path)} needs --data-path, a dataset "
            "with the same tokenizer"
        )
    yield from path_problems("--data-path", data.data_path)
    yield from path_problems("--valid-data-path", data.valid_data_path)


# Flags that have no effect without --save
_NEED_SAVE = ("save_interval", "keep_last", "async_save", "auto_resume")


def _checkpoints(config: RunConfig, world: int) -> Iterator[str]:
    """Yield conflicts between starting points, and a --save directory used by another run."""
    c = config.checkpoint
    values = flatten(config)
    if c.save is None:
        given = [flag(name) for name in _NEED_SAVE if values[name]]
        if given:
            yield f"{', '.join(given)} cannot be used without --save, the directory for checkpoints"
    if c.finetune and c.load is None and c.load_hf is None:
        yield "--finetune needs --load, the checkpoint to load the weights from"
    if c.load is not None and c.load_hf is not None:
        yield f"--load {c.load} and --load-hf {c.load_hf} are both set: start from only one of them"
    if c.load is not None and not is_url(c.load) and (Path(c.load) / "config.json").is_file():
        yield f"--load {c.load} is a Hugging Face folder and not a checkpoint: use --load-hf"
    for name in ("vision_from_hf", "load_adapter"):
        if values[name] is not None and c.load_hf is None:
            yield f"{flag(name)} {values[name]} needs --load-hf"
    # --auto-resume resumes from --save, so it may contain checkpoints
    if not c.save or config.dry_run or c.auto_resume:
        return
    steps = "step_*/manifest.json"
    if is_url(c.save):
        has_checkpoints = bool((Url(c.save) / steps).matches())
    else:
        has_checkpoints = any(Path(c.save).glob(steps))
    if not has_checkpoints:
        return
    # A resumed run may write next to the checkpoints that it resumes from. --load is their
    # directory, or one step in it.
    folder = place_of(c.save).resolve()
    loaded = place_of(c.load).resolve() if c.load else None
    if loaded is None or c.finetune or folder not in (loaded, loaded.parent):
        yield (
            f"--save {c.save} already contains checkpoints of another run: choose a new directory, "
            f"or resume with --load {c.save}"
        )


def _files(config: RunConfig, world: int) -> Iterator[str]:
    """Yield inputs that do not exist, and outputs that cannot be written.

    Dry runs skip these checks because they may run on another machine.
    """
    if config.dry_run:
        return
    data = config.data
    c = config.checkpoint
    # rows of (flag, path, file that the folder must contain)
    read = []
    for folder in named_folders(data.data_path):
        read.append(("--data-path", folder, "manifest.json"))
    for folder in named_folders(data.valid_data_path):
        read.append(("--valid-data-path", folder, "manifest.json"))
    if c.load:
        read.append(("--load", c.load, ""))
    if c.load_hf:
        read.append(("--load-hf", c.load_hf, ""))
    for name, path, inside in read:
        try:
            if name == "--load-hf" and is_url(path):
                yield f"{name} {path} is a URL, but must be a local directory"
                continue
            # in a store of objects, there are no folders to look for
            if not is_url(path) and not Path(path).exists():
                yield f"{name} {path} does not exist: there is no such folder"
                continue
            place = place_of(path)
            if inside:
                place = place / inside
            if not place.exists() and not Path(path).is_file():
                problem = "does not exist"
                if inside:
                    problem = (
                        f"has no {inside}, so it is not a finished dataset: build it with "
                        "megacp-preprocess build"
                    )
                yield f"{name} {path} {problem}"
        except ValueError as error:  # a URL that cannot be opened
            yield f"{name} {error}"
    # Outputs: a URL must be opened to check it; a path is checked without creating anything.
    written = {"--save": c.save, "--tensorboard-dir": config.log.tensorboard_dir}
    if config.log.profile:
        written["--profile"] = str(config.profile_path)
    for name, output in written.items():
        if output and is_url(output):
            try:
                Url(output).exists()
            except ValueError as error:
                yield f"{name} {error}"
        elif output:
            # the run creates missing folders, so look at the nearest one that exists
            whole = Path(output).absolute()
            parent = next(place for place in (whole, *whole.parents) if place.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                yield (
                    f"{name} {output} cannot be written because {parent} is a file or is not "
                    "writable"
                )
    if config.log_path is not None and config.log_path.is_dir():
        yield f"--log-file {config.log_path} is a directory, but must be a file"


SECTIONS = (
    _multiples,
    _grid,
    _model,
    _experts,
    _schedule,
    _context,
    _vision,
    _lora,
    _data,
    _checkpoints,
    _files,
)
"""Functions `(config, world size) -> reasons`, for configs whose fields are within their ranges."""
OF_TRAINING = (_routers,)
"""More functions of this kind, which only training needs; conversion skips them."""
