"""What a configuration cannot be, found before any process group exists, all of it reported at
once.

Each field is held against its range first. Only when all are in theirs do the sections compare
fields with each other. A check stands here when the run would otherwise be wrong in silence, or end
hours later.
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

MAX_DENSE_ROW_TOKENS = 8192
"""The dense kernel holds heads x T x T scores: 256 MiB a head in float32 at this length."""


def check(config: RunConfig, world_size: int, *, trains: bool = True) -> list[str]:
    """Return all reasons why this configuration cannot run on `world_size` ranks; empty when it
    can.

    Without `trains` only the model matters, as where a folder is converted: what only training
    rules out is allowed.
    """
    values = flatten(config)
    problems = ((name, info.problem(values[name])) for name, info in fields().items())
    reasons = [f"{flag(name)}: {problem}" for name, problem in problems if problem]
    if world_size < 1:
        reasons.append(f"the world size is {world_size}, it must be at least 1")
    sections = (*SECTIONS, *OF_TRAINING) if trains else SECTIONS
    return reasons or [reason for section in sections for reason in section(config, world_size)]


def require(config: RunConfig, world_size: int, also: Sequence[str] = ()) -> None:
    """Raise one ValueError that lists every reason of `check`, and those that the caller found
    `also`.
    """
    reasons = [*check(config, world_size), *also]
    if reasons:
        head = "this configuration cannot run" + (
            f", for {len(reasons)} reasons" if len(reasons) > 1 else ""
        )
        raise ValueError("\n".join([f"{head}:", *(f"  - {reason}" for reason in reasons)]))


_TP = "tensor_model_parallel_size"
_DECODER_MULTIPLES = (
    ("num_attention_heads", _TP),
    ("num_query_groups", _TP),
    ("num_attention_heads", "num_query_groups"),
    ("ffn_hidden_size", _TP),
    ("moe_shared_expert_intermediate_size", _TP),
)
_STATE_MULTIPLES = (
    ("linear_num_key_heads", _TP),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
_TOWER_MULTIPLES = (
    ("vision_image_size", "vision_patch_size"),
    ("vision_ffn_hidden_size", _TP),
    ("connector_ffn_hidden_size", _TP),
    ("vision_num_attention_heads", _TP),
    ("vision_hidden_size", "vision_num_attention_heads"),
)
"""The first field is a multiple of the second; None is derived from a field that has a row of its
own.
"""


def _slices(parallel: ParallelConfig) -> int:
    """Return the number of equal slices of a row that a rank holds: the most of any layout if it is
    not chosen yet.
    """
    if parallel.context_parallel_size == 1:
        return 1
    if parallel.chooses_layout:
        return max(layout.slices for layout in LAYOUTS.values())
    return LAYOUTS[parallel.cp_layout].slices


def _multiples(config: RunConfig, world: int) -> Iterator[str]:
    """What is no multiple of what it has to be, and the next numbers that are."""
    values, m, p, t = flatten(config), config.model, config.parallel, config.training
    tp, pp, cp = (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.context_parallel_size,
    )
    ranks, dp = config.model_ranks, config.data_parallel_size(world)
    rows = [(f"a world of {world} ranks", world, f"tp {tp} x pp {pp} x cp {cp} = {ranks}", ranks)]
    if world % ranks == 0:
        packs = t.micro_batch_size * dp
        of = (
            f"--micro-batch-size {t.micro_batch_size} x dp {dp} = {packs} (dp = {world} ranks / "
            f"{ranks})"
        )
        rows.append((f"--global-batch-size {t.global_batch_size}", t.global_batch_size, of, packs))
    slices = _slices(p)
    sharded = tp if p.sequence_parallel else 1
    of = (
        f"{slices} slices of --cp-layout {p.cp_layout} x cp {cp} x tp {sharded} = "
        f"{slices * cp * sharded}"
    )
    rows.append(
        (
            f"--seq-length {config.data.seq_length}",
            config.data.seq_length,
            of,
            slices * cp * sharded,
        )
    )
    if m.kv_channels is None:
        of = f"--num-attention-heads {m.num_attention_heads} (or give --kv-channels)"
        rows.append((f"--hidden-size {m.hidden_size}", m.hidden_size, of, m.num_attention_heads))
    rules = [*_DECODER_MULTIPLES]
    if m.linear_attention_freq is not None:
        rules += _STATE_MULTIPLES
    if config.vision.vision_num_layers > 0:
        rules += _TOWER_MULTIPLES
    for name, by in rules:
        number, divisor = values[name], values[by]
        if isinstance(number, int) and isinstance(divisor, int):
            rows.append((f"{flag(name)} {number}", number, f"{flag(by)} {divisor}", divisor))
    for what, number, of, divisor in rows:
        if number % divisor > 0:
            below, above = number // divisor * divisor, -(-number // divisor) * divisor
            yield f"{what} is no multiple of {of}: use {f'{below} or ' if below else ''}{above}"


def _grid(config: RunConfig, world: int) -> Iterator[str]:
    """Stages without layers, and what a schedule or a sharding strategy rules out."""
    p, t, layers = config.parallel, config.training, config.model.num_layers
    pp, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    if config.world_size not in (None, world) and not config.dry_run:
        yield (
            f"--world-size {config.world_size} acts only with --dry-run; this run has {world} "
            "ranks from its launcher"
        )
    chunks = f"--num-virtual-stages-per-pipeline-rank {virtual}"
    if layers < pp * virtual:
        yield (
            f"--num-layers {layers} is below --pipeline-model-parallel-size {pp} x {chunks}: "
            "stages need layers"
        )
    if virtual > 1 and pp == 1:
        yield f"{chunks} needs --pipeline-model-parallel-size above 1"
    strategy, instances = p.data_parallel_sharding_strategy, p.num_distributed_optimizer_instances
    deferring = f"--pipeline-schedule {p.pipeline_schedule}"
    whole = [deferring] if p.defers_weight_gradients else []
    for name in whole + (
        ["--gradient-accumulation-fusion"] if t.gradient_accumulation_fusion else []
    ):
        if p.sharding.gradients:
            yield (
                f"{name} adds to whole gradients, --data-parallel-sharding-strategy {strategy} "
                "keeps none"
            )
        if config.model.lora_rank > 0:
            yield (
                f"{name} with --lora-rank {config.model.lora_rank}: the weights of those "
                "gradients are frozen"
            )
    if p.defers_weight_gradients and t.mlp_chunk_tokens > 0:
        yield f"{deferring} keeps what --mlp-chunk-tokens {t.mlp_chunk_tokens} is to free"
    dp = config.data_parallel_size(world)
    if dp % instances > 0:
        usable = f"use {math.gcd(dp, instances)}"
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the "
            f"data-parallel size {dp}: {usable}"
        )


def _model(config: RunConfig, world: int) -> Iterator[str]:
    m = config.model
    divides = m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0
    if divides and m.head_dim % 2 > 0:
        yield (
            f"a head is {m.head_dim} wide, the rotary embedding needs an even width: change "
            "--kv-channels"
        )
    if m.vocab_size == 0 and config.data.data_path is None and not config.dry_run:
        yield "--vocab-size 0 takes the vocabulary from the dataset, but no --data-path is given: give one of them"
    if m.additional_vocab_size > 0 and not m.untie_embeddings_and_output_weights:
        yield (
            f"--additional-vocab-size {m.additional_vocab_size} needs "
            "--untie-embeddings-and-output-weights"
        )
    try:
        routed = [layer for layer in layers_of(m) if layer.is_routed]
        if m.num_experts > 0 and not routed:
            yield f"--moe-layer-freq {m.moe_layer_freq} gives none of {m.num_layers} layers experts"
        said = m.moe_layer_freq.count(",") + 1
        if m.num_experts > 0 and said != m.num_layers and not m.moe_layer_freq.isdigit():
            yield (
                f"--moe-layer-freq {m.moe_layer_freq} tells of {said} layers, --num-layers is "
                f"{m.num_layers}"
            )
    except ValueError as error:
        yield str(error)
    if m.window_attn_skip_freq is not None and m.window_size is None:
        yield (
            f"--window-attn-skip-freq {m.window_attn_skip_freq} is about windows: give their "
            "--window-size"
        )


def _experts(config: RunConfig, world: int) -> Iterator[str]:
    m, p = config.model, config.parallel
    tp, ep, dp = (
        p.tensor_model_parallel_size,
        p.expert_model_parallel_size,
        config.data_parallel_size(world),
    )
    size, count = f"--expert-model-parallel-size {ep}", f"--num-experts {m.num_experts}"
    width = "--moe-shared-expert-intermediate-size"
    if m.moe_shared_expert_gate and m.moe_shared_expert_intermediate_size is None:
        yield f"--moe-shared-expert-gate acts only with {width}"
    t = config.training
    terms = (
        ("--moe-aux-loss-coeff", t.moe_aux_loss_coeff),
        ("--moe-z-loss-coeff", t.moe_z_loss_coeff),
    )
    asked = [f"{name} {value:g}" for name, value in terms if value > 0]
    correction = f"--moe-router-bias-update-rate {t.moe_router_bias_update_rate:g}"
    corrects = t.moe_router_bias_update_rate > 0
    if m.num_experts == 0:
        idle = [
            name
            for name in vars(m)
            if name.startswith("moe_") and getattr(m, name) != getattr(ModelConfig(), name)
        ]
        alone = [f"{flag(name)} {getattr(m, name)}" for name in idle] + ([size] if ep > 1 else [])
        for given in alone + asked + ([correction] if corrects else []):
            yield f"{given} acts only with --num-experts above 0"
        return
    in_all = m.num_layers * m.num_experts
    if in_all > MAX_EXPERTS_IN_ALL:
        yield (
            f"{count} in {m.num_layers} layers are {in_all:,}, at most {MAX_EXPERTS_IN_ALL:,} "
            "can be named"
        )
    if "text" in config.frozen_parts:
        for given in asked + ([correction] if corrects else []):
            yield f"{given}: the router that it is for is frozen"
    groups, best = m.moe_router_num_groups, m.moe_router_group_topk
    words = f"--moe-router-num-groups {groups}"
    if m.moe_router_score_function == "softmax":
        for given in ([words] if groups > 1 else []) + ([correction] if corrects else []):
            yield f"{given} needs --moe-router-score-function sigmoid"
    if groups > 1 and (m.num_experts % groups > 0 or m.num_experts < 2 * groups):
        yield f"{words} needs groups of equally many experts, two or more, of {count}"
    if best > groups:
        yield (
            f"--moe-router-group-topk {best} is above {words}: a token cannot have more groups "
            "than there are"
        )
    elif groups > 1 and m.moe_router_topk * groups > best * m.num_experts:
        chosen = f"--moe-router-topk {m.moe_router_topk} of {count}"
        yield f"--moe-router-group-topk {best} of {words} holds fewer than {chosen}"
    if m.moe_router_topk > m.num_experts:
        yield f"--moe-router-topk {m.moe_router_topk} is above {count}"
    ranks, stage = (
        tp * p.context_parallel_size * dp,
        f"tp {tp} x cp {p.context_parallel_size} x dp {dp}",
    )
    if (largest := math.gcd(m.num_experts, ranks)) % ep > 0:
        both = f"{count} and {stage} = {ranks}, the ranks of a stage"
        yield f"{size} does not divide both {both}: the largest that does is {largest}"
    instances, shared = p.num_distributed_optimizer_instances, ranks // ep
    if instances > 1 and shared % instances > 0:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the {shared} "
            "ranks with one expert"
        )
    if tp > 1 and not p.sequence_parallel:
        yield (
            f"{count} over tp {tp} needs --sequence-parallel: else its ranks would route the "
            "same tokens"
        )
    if t.fp8 != "off":
        yield f"--fp8 {t.fp8} with {count}: experts have no such form"


def _routers(config: RunConfig, world: int) -> Iterator[str]:
    """Refuse a trained router that the loss cannot reach, as Megatron does.

    Softmax over a single chosen expert, and the share of a single sigmoid, are 1 whatever the score
    is. The terms of balance would still move such a router, but away from the loss: towards even
    loads, not towards better experts.
    """
    m = config.model
    if m.num_experts == 0 or "text" in config.frozen_parts:
        return
    told = "so the loss gives the router no gradient"
    frozen = "freeze the router: --lora-rank trains only low-rank pairs"
    if m.moe_router_topk == 1 and not m.moe_router_pre_softmax:
        function = {
            "softmax": "softmax over the chosen expert",
            "sigmoid": "share of the chosen expert",
        }
        weight = f"the {function[m.moe_router_score_function]} is always 1"
        # a model of a folder would be another one under that flag
        other = "" if config.checkpoint.load_hf is not None else "use --moe-router-pre-softmax, or "
        yield f"--moe-router-topk 1: {weight}, {told}; {other}{frozen}"
    elif m.num_experts == 1 and m.moe_router_score_function == "softmax":
        yield (
            f"--num-experts 1: the softmax over one expert is always 1, {told}; use a dense MLP, "
            f"or {frozen}"
        )


def _schedule(config: RunConfig, world: int) -> Iterator[str]:
    t = config.training
    warmup, fall = t.warmup_updates, t.lr_wsd_decay_iters or 0
    end, name = (
        (t.train_iters, "--train-iters")
        if t.lr_decay_iters is None
        else (t.lr_decay_iters, "--lr-decay-iters")
    )
    if t.min_lr > t.lr:
        yield f"--min-lr {t.min_lr:g} is above --lr {t.lr:g}"
    if t.lr_warmup_iters > 0 and t.lr_warmup_fraction is not None:
        both = (
            f"--lr-warmup-iters {t.lr_warmup_iters} and --lr-warmup-fraction "
            f"{t.lr_warmup_fraction:g}"
        )
        yield (
            f"{both} are two warm-ups: give one of them, or --lr-warmup-fraction None beside a "
            "file that has it"
        )
    if warmup > end:
        yield (
            f"--lr-warmup-iters {warmup} is above {name} {end}: lower it, or give a share by "
            "--lr-warmup-fraction"
        )
    if (t.lr_decay_style == "WSD") != (fall > 0):
        yield (
            f"--lr-wsd-decay-iters {fall} with --lr-decay-style {t.lr_decay_style}: WSD needs "
            "it, and nothing else"
        )
    elif warmup <= end < warmup + fall:
        between = f"between a warm-up of {warmup} and {name} {end}"
        yield f"--lr-wsd-decay-iters {fall} does not fit {between}: use at most {end - warmup}"
    if config.log.profile:
        try:
            first = profiled_steps(config.log.profile)[0]
            if first > t.train_iters:
                yield f"--profile {config.log.profile} begins after --train-iters {t.train_iters}"
        except ValueError as error:
            yield str(error)


def profiled_steps(text: str) -> range:
    """The steps of `--profile START:STOP`, both ends included. ValueError for another text."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)):
        raise ValueError(
            f"--profile {text}: expected START:STOP, two steps from 1 on, such as 10:12"
        )
    return range(int(start), int(stop) + 1)


def packs_in_a_row(config: RunConfig, world: int) -> int:
    """Data-parallel ranks whose packs make one row."""
    return (
        max(1, config.data_parallel_size(world)) if config.parallel.dynamic_context_parallel else 1
    )


def _context(config: RunConfig, world: int) -> Iterator[str]:
    """What rows, kernels, transports and layouts ask of each other."""
    p, kernel = config.parallel, config.training.attention_kernel
    cp, tp, comm = p.context_parallel_size, p.tensor_model_parallel_size, p.cp_comm_type
    joined = packs_in_a_row(config, world)
    tokens = config.data.seq_length * config.training.micro_batch_size * joined
    undecided = p.chooses_transport or p.chooses_layout
    if kernel == "dense" and (cp * joined > 1 or tokens > MAX_DENSE_ROW_TOKENS or undecided):
        yield (
            "--attention-kernel dense is a reference for one cp rank and rows of at most "
            f"{MAX_DENSE_ROW_TOKENS} "
            f"tokens; this run has --context-parallel-size {cp}, rows of {tokens} and "
            f"--cp-comm-type {comm}"
        )
    transport = transport_of(config)
    # a search for packs of all replicas needs a layout that any number of ranks can take
    fits_replicas = (
        comm == transport.name and transport.spans_replicas and p.cp_layout == transport.best_layout
    )
    if p.dynamic_context_parallel and not fits_replicas:
        needed = [row for row in TRANSPORTS.values() if row.spans_replicas]
        allowed = " or ".join(
            f"--cp-layout {row.best_layout} and --cp-comm-type {row.name}" for row in needed
        )
        yield f"--dynamic-context-parallel takes {allowed}, this run has {p.cp_layout} and {comm}"
    sizes, name = p.hierarchical_context_parallel_sizes, "--hierarchical-context-parallel-sizes"
    if transport.needs_sizes and cp > 1 and (sizes is None or sizes[0] * sizes[1] != cp):
        yield f"--cp-comm-type {comm} needs {name} A B with A x B = {cp}, got {sizes}"
    elif not transport.needs_sizes and sizes is not None:
        users = " or ".join(row.name for row in TRANSPORTS.values() if row.needs_sizes)
        yield (
            f"{name} {sizes[0]} {sizes[1]} acts only with --cp-comm-type {users}, this run has "
            f"{comm}"
        )
    dealt = heads_group(config)
    heads = config.model.num_attention_heads // tp
    if heads % dealt > 0:
        yield (
            f"--cp-comm-type {comm} deals heads over {dealt} ranks, the {heads} of a tp rank "
            "(--num-attention-heads "
            f"/ tp {tp}) do not divide by it; use a2a+p2p with a first size that divides {heads}, "
            "p2p or kv_exchange"
        )


def _vision(config: RunConfig, world: int) -> Iterator[str]:
    v, layers = config.vision, config.vision.vision_num_layers
    if layers == 0:
        return
    parts = {"vision", "connector", "text"}
    if not set(v.frozen) <= parts or set(v.frozen) == parts:
        yield f"--freeze {v.freeze}: name one or two of vision, connector and text"
    family, seen, (first, second) = v.family, config.data.image_attention, v.vision_feature_layers
    if v.vision_head_dim % family.head_multiple:
        need = f"its angles by row and column need a multiple of {family.head_multiple}"
        yield f"a head of the tower is {v.vision_head_dim} wide, {need}"
    if family.is_causal and seen != "causal":
        yield (
            f"--image-attention {seen}: image tokens of --vision-family {v.vision_family} are "
            "causal, give causal"
        )
    is_outside = min(first, second) < -layers or max(first, second) >= layers
    if family.has_feature_layers and (is_outside or max(v.feature_layers) < layers - 1):
        yield (
            f"--vision-feature-layers {first} {second} are to be two of --vision-num-layers "
            f"{layers}, the last one "
            f"among them: from {-layers} to {layers - 1}"
        )
    if family.token_rows and config.model.additional_vocab_size == 0:
        rows = f"give --additional-vocab-size ({v.vision_family} has {family.token_rows})"
        yield f"--vision-num-layers {layers} needs rows for image tokens: {rows}"


def _names_no_layer(word: str, model: ModelConfig) -> bool:
    """Whether a word of --lora-targets names only kinds that no layer has."""
    kinds, _ = parse_lora_targets(word, model.usual_pair)
    return bool(kinds) and kinds.keys().isdisjoint(lora_kinds(model))


def _lora(config: RunConfig, world: int) -> Iterator[str]:
    m = config.model
    if m.lora_rank == 0:
        if m.lora_alpha is not None or m.lora_targets is not None or m.lora_dropout > 0:
            yield "--lora-alpha, --lora-targets and --lora-dropout act only with --lora-rank above 0"
        return
    targets = m.lora_targets or "q,v"
    asked, faults = parse_lora_targets(targets, m.usual_pair)
    if faults or not asked:
        shown = f" (not {', '.join(faults)})" if faults else ""
        yield (
            f"--lora-targets {m.lora_targets}: name some of {', '.join(LINEARS)} or of "
            f"{', '.join(LORA_KINDS)}, "
            "or all; KIND:RANK:ALPHA gives one its own rank and alpha, attention.q+v one A for "
            f"both{shown}"
        )
    has = lora_kinds(m)
    lacking = [word for word in targets.replace(",", " ").split() if _names_no_layer(word, m)]
    if lacking and not faults:
        yield f"--lora-targets {' '.join(lacking)}: no layer has one of them"
    experts = [kind for kind in has if kind in EXPERT_KINDS]
    if m.lora_dropout > 0 and experts:
        yield (
            f"--lora-dropout {m.lora_dropout} on {', '.join(experts)}: pairs of experts have "
            "none, as peft's"
        )
    narrow = dict[str, str]()
    for layer in layers_of(m):
        for kind, linear in layer.lora_linears(m).items():
            width, rank = min(linear.inputs, linear.outputs), m.lora_pairs[kind].rank
            # rates of a gated delta rule (b, a) are as narrow as it has heads
            if rank > width and kind.split(".")[1] in LINEARS:
                narrow[kind] = f"{kind} ({rank} of {width})"
    if narrow:
        yield (
            f"--lora-rank {m.lora_rank} is above the smaller width of {', '.join(narrow.values())}"
        )
    of_mlp = any(kind.endswith((".gate", ".up", ".down")) for kind in has)
    if m.lora_dropout > 0 and config.training.mlp_chunk_tokens > 0 and of_mlp:
        tiles = f"--mlp-chunk-tokens {config.training.mlp_chunk_tokens}"
        yield (
            f"--lora-dropout {m.lora_dropout} on the MLP with {tiles}: a tile does not know the "
            "names of its tokens"
        )
    if (folder := config.checkpoint.vision_from_hf) is not None:
        yield (
            f"--vision-from-hf {folder} with --lora-rank {m.lora_rank}: a new connector would "
            "stay as it was drawn"
        )


def _data(config: RunConfig, world: int) -> Iterator[str]:
    data, interval = config.data, config.training.eval_interval
    if config.training.train_epochs is not None and data.data_path is None and not config.dry_run:
        yield f"--train-epochs {config.training.train_epochs:g} needs --data-path"
    if interval > 0 and data.valid_data_path is None:
        yield f"--eval-interval {interval} needs --valid-data-path"
    if data.valid_data_path and data.data_path is None:
        yield (
            f"--valid-data-path {shown_path(data.valid_data_path)} needs --data-path, packs of "
            "the same tokenizer"
        )
    yield from path_problems("--data-path", data.data_path)
    yield from path_problems("--valid-data-path", data.valid_data_path)


_NEED_SAVE = ("save_interval", "keep_last", "async_save", "auto_resume")


def _checkpoints(config: RunConfig, world: int) -> Iterator[str]:
    """A start that is none, and a --save that belongs to another run."""
    c, values = config.checkpoint, flatten(config)
    if c.save is None and (given := [flag(name) for name in _NEED_SAVE if values[name]]):
        yield f"{', '.join(given)} needs --save, the directory for checkpoints"
    if c.finetune and c.load is None and c.load_hf is None:
        yield "--finetune needs --load, the checkpoint whose weights it starts from"
    if c.load is not None and c.load_hf is not None:
        yield f"--load {c.load} and --load-hf {c.load_hf} are two starts: give one of them"
    if c.load is not None and not is_url(c.load) and (Path(c.load) / "config.json").is_file():
        yield (
            f"--load {c.load} goes on from a checkpoint, this is a Hugging Face folder: start "
            "from it by --load-hf"
        )
    for name in ("vision_from_hf", "load_adapter"):
        if values[name] is not None and c.load_hf is None:
            yield f"{flag(name)} {values[name]} acts only with --load-hf"
    if not c.save or config.dry_run or c.auto_resume:
        return
    steps = "step_*/manifest.json"
    if (Url(c.save) / steps).matches() if is_url(c.save) else any(Path(c.save).glob(steps)):
        folder, loaded = place_of(c.save).resolve(), place_of(c.load).resolve() if c.load else None
        if loaded is None or c.finetune or folder not in (loaded, loaded.parent):
            yield (
                f"--save {c.save} holds the checkpoints of a run: choose a new directory, or go "
                f"on by --load {c.save}"
            )


def _files(config: RunConfig, world: int) -> Iterator[str]:
    """Files that are missing, and directories that cannot be written; a dry run may be on another
    machine.
    """
    if config.dry_run:
        return
    data, c, manifest = config.data, config.checkpoint, "manifest.json"
    read = [("--data-path", folder, manifest) for folder in named_folders(data.data_path)]
    read += [
        ("--valid-data-path", folder, manifest) for folder in named_folders(data.valid_data_path)
    ]
    read += [
        (name, path, "") for name, path in (("--load", c.load), ("--load-hf", c.load_hf)) if path
    ]
    for name, path, inside in read:
        try:
            if name == "--load-hf" and is_url(path):
                yield f"{name} {path}: is a URL, a local directory is needed"
            elif (
                not (place_of(path) / inside if inside else place_of(path)).exists()
                and not Path(path).is_file()
            ):
                yield f"{name} {path}: " + (f"holds no {inside}" if inside else "does not exist")
        except ValueError as error:
            yield f"{name} {error}"
    written = {"--save": c.save, "--tensorboard-dir": config.log.tensorboard_dir}
    written["--profile"] = str(config.profile_path) if config.log.profile else None
    for name, folder in written.items():
        if folder and is_url(folder):
            try:
                Url(folder).exists()
            except ValueError as error:
                yield f"{name} {error}"
        elif folder:
            whole = Path(folder).absolute()
            parent = next(place for place in (whole, *whole.parents) if place.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                yield f"{name} {folder}: cannot be written, {parent} does not allow it or is a file"
    if config.log_path is not None and config.log_path.is_dir():
        yield f"--log-file {config.log_path}: is a directory, a file is needed"


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
"""Functions `(config, world size) -> reasons` over a config whose fields are in their ranges."""
OF_TRAINING = (_routers,)
"""Functions like those of `SECTIONS`, about training; a model that is only converted does not meet
them.
"""
