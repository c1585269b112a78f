"""Every contradiction a configuration can hold, found before any process group exists and told all at once.

Key property: three tables: the range of each number, the allowed words (from the field types), and small functions that
compare fields; a row whose fields are already out of range is left out, so that one mistake is told once. Rejected:
checks inside the rooms that use the values, which tell the first problem only, after minutes of starting up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megacp.config.checks.checkpoint import CHECKPOINT_RULES
from megacp.config.checks.context import CONTEXT_RULES
from megacp.config.checks.health import HEALTH_RULES
from megacp.config.checks.ranges import problem_of_value
from megacp.config.checks.rules import Finder, Rule, registrar
from megacp.config.checks.vision import VISION_RULES
from megacp.config.run import RunConfig, fields, flag, flatten

MAX_ROW_TOKENS = 2**31 - 1
"""Token places of a row are int32."""
MAX_DENSE_ROW_TOKENS = 8192
"""The dense kernel holds heads x T x T scores: 256 MiB a head in float32 at this length."""


_OWN_RULES: list[Rule] = []
_rule = registrar(_OWN_RULES)

_GRID = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_BATCH = (*_GRID, "micro_batch_size", "global_batch_size")
_HEADS = ("hidden_size", "num_attention_heads", "kv_channels")


def check(config: RunConfig, world_size: int) -> list[str]:
    """All reasons why this configuration cannot run on `world_size` ranks; empty when it can."""
    values = flatten(config)
    reasons = []
    wrong = set()
    for info in fields().values():
        problem = problem_of_value(info, values[info.name])
        if problem:
            reasons.append(f"{flag(info.name)}: {problem}")
            wrong.add(info.name)
    if world_size < 1:
        return [*reasons, f"the world size is {world_size}, it must be at least 1"]
    found = [rule.find(config, world_size) for rule in RULES if not wrong & set(rule.reads)]
    return reasons + [reason for reason in found if reason]


def require(config: RunConfig, world_size: int, also: Sequence[str] = ()) -> None:
    """Raise one ValueError that lists every reason of `check`, and those that the caller found `also`."""
    reasons = [*check(config, world_size), *also]
    if reasons:
        head = "this configuration cannot run" + (f", for {len(reasons)} reasons" if len(reasons) > 1 else "")
        raise ValueError("\n".join([f"{head}:", *(f"  - {reason}" for reason in reasons)]))


def _neighbours(value: int, step: int) -> str:
    """The multiples of `step` around `value`, as words."""
    below, above = value // step * step, -(-value // step) * step
    return f"{above}" if below == 0 else f"{below} or {above}"


@_rule(*_GRID)
def _world_holds_grid(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    if world % config.model_ranks == 0:
        return None
    return (
        f"a world of {world} ranks is no multiple of tp {p.tensor_model_parallel_size} x "
        f"pp {p.pipeline_model_parallel_size} x cp {p.context_parallel_size} = {config.model_ranks}: start "
        f"{_neighbours(world, config.model_ranks)} ranks, or change --tensor-model-parallel-size, "
        f"--pipeline-model-parallel-size or --context-parallel-size"
    )


@_rule(*_GRID, "dry_run", "world_size")
def _world_size_is_for_dry_runs(config: RunConfig, world: int) -> str | None:
    if config.world_size is None or config.dry_run or config.world_size == world:
        return None
    return f"--world-size {config.world_size} acts only with --dry-run; this run has {world} ranks from its launcher"


@_rule("num_attention_heads", "tensor_model_parallel_size")
def _heads_over_tp(config: RunConfig, world: int) -> str | None:
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    if heads % tp == 0:
        return None
    return f"--num-attention-heads {heads} is no multiple of --tensor-model-parallel-size {tp}"


@_rule("num_attention_heads", "num_query_groups", "tensor_model_parallel_size")
def _query_groups_over_tp(config: RunConfig, world: int) -> str | None:
    groups, tp = config.model.query_groups, config.parallel.tensor_model_parallel_size
    if config.model.num_query_groups is None or groups % tp == 0:
        return None
    return (
        f"--num-query-groups {groups} is no multiple of --tensor-model-parallel-size {tp}: lower tp to a divisor of it"
    )


@_rule("num_attention_heads", "num_query_groups")
def _heads_over_query_groups(config: RunConfig, world: int) -> str | None:
    heads, groups = config.model.num_attention_heads, config.model.query_groups
    if heads % groups == 0:
        return None
    return f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}"


@_rule(*_HEADS)
def _hidden_over_heads(config: RunConfig, world: int) -> str | None:
    m = config.model
    if m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0:
        return None
    return (
        f"--hidden-size {m.hidden_size} is no multiple of --num-attention-heads {m.num_attention_heads}: "
        f"give the width of a head with --kv-channels"
    )


@_rule(*_HEADS)
def _head_width_is_even(config: RunConfig, world: int) -> str | None:
    m = config.model
    divides = m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0
    if not divides or m.head_dim % 2 == 0:
        return None
    return (
        f"a head is {m.head_dim} wide, the rotary embedding needs an even width: change --kv-channels or --hidden-size"
    )


@_rule("ffn_hidden_size", "tensor_model_parallel_size")
def _ffn_over_tp(config: RunConfig, world: int) -> str | None:
    ffn, tp = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if ffn % tp == 0:
        return None
    return f"--ffn-hidden-size {ffn} is no multiple of --tensor-model-parallel-size {tp}: use {_neighbours(ffn, tp)}"


@_rule("vocab_size", "data_path", "dry_run")
def _vocabulary_is_known(config: RunConfig, world: int) -> str | None:
    if config.model.vocab_size > 0 or config.data.data_path is not None or config.dry_run:
        return None
    return "--vocab-size 0 takes the vocabulary from the dataset, but no --data-path is given: give one of them"


@_rule("additional_vocab_size", "untie_embeddings_and_output_weights")
def _tied_tables_have_equal_rows(config: RunConfig, world: int) -> str | None:
    m = config.model
    if m.additional_vocab_size == 0 or m.untie_embeddings_and_output_weights:
        return None
    return (
        f"--additional-vocab-size {m.additional_vocab_size} gives the embedding more rows than the head: "
        "it needs --untie-embeddings-and-output-weights"
    )


@_rule("rope_scaling", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor")
def _rope_scaling(config: RunConfig, world: int) -> str | None:
    m = config.model
    if m.rope_scaling == "none" and m.rope_scaling_factor != 1.0:
        return f"--rope-scaling-factor {m.rope_scaling_factor:g} acts only with --rope-scaling linear or llama3"
    if m.rope_scaling == "llama3" and m.rope_low_freq_factor >= m.rope_high_freq_factor:
        return (
            f"--rope-low-freq-factor {m.rope_low_freq_factor:g} must be below "
            f"--rope-high-freq-factor {m.rope_high_freq_factor:g}"
        )
    return None


@_rule("num_layers", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
def _layers_over_stages(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    virtual = p.num_virtual_stages_per_pipeline_rank
    stages = p.pipeline_model_parallel_size * virtual
    if config.model.num_layers >= stages:
        return None
    return (
        f"--num-layers {config.model.num_layers} is fewer than {stages} stages "
        f"(--pipeline-model-parallel-size {p.pipeline_model_parallel_size} x "
        f"--num-virtual-stages-per-pipeline-rank {virtual}): every stage needs a layer"
    )


@_rule("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
def _virtual_stages_need_a_pipeline(config: RunConfig, world: int) -> str | None:
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank
    if virtual == 1 or config.parallel.pipeline_model_parallel_size > 1:
        return None
    return f"--num-virtual-stages-per-pipeline-rank {virtual} needs --pipeline-model-parallel-size above 1"


@_rule(*_BATCH)
def _global_batch_over_micro_batch(config: RunConfig, world: int) -> str | None:
    t, dp = config.training, config.data_parallel_size(world)
    if world % config.model_ranks or t.global_batch_size % (t.micro_batch_size * dp) == 0:
        return None
    return (
        f"--global-batch-size {t.global_batch_size} is no multiple of --micro-batch-size {t.micro_batch_size} x "
        f"dp {dp} = {t.micro_batch_size * dp} (dp = {world} ranks / {config.model_ranks}): "
        f"use {_neighbours(t.global_batch_size, t.micro_batch_size * dp)}"
    )


@_rule("seq_length", "cp_layout", "sequence_parallel", *_GRID)
def _sequence_over_cp_and_tp(config: RunConfig, world: int) -> str | None:
    length, p = config.data.seq_length, config.parallel
    tp = p.tensor_model_parallel_size if p.sequence_parallel else 1
    halves = 2 if p.cp_layout not in ("contiguous", "balanced") and p.context_parallel_size > 1 else 1
    step = halves * p.context_parallel_size * tp
    if length % step == 0:
        return None
    factors = [f"2 (chunks a rank of --cp-layout {p.cp_layout})"] if halves == 2 else []
    factors.append(f"--context-parallel-size {p.context_parallel_size}")
    factors += [f"--tensor-model-parallel-size {tp} (--sequence-parallel)"] if tp > 1 else []
    return f"--seq-length {length} is no multiple of {' x '.join(factors)} = {step}: use {_neighbours(length, step)}"


def _joined(config: RunConfig, world: int) -> int:
    """Data-parallel ranks whose packs make one row."""
    return max(1, config.data_parallel_size(world)) if config.parallel.dynamic_context_parallel else 1


def _row_tokens(config: RunConfig, world: int) -> int:
    return config.data.seq_length * config.training.micro_batch_size * _joined(config, world)


@_rule("seq_length", "micro_batch_size", "dynamic_context_parallel", *_GRID)
def _row_fits_int32(config: RunConfig, world: int) -> str | None:
    tokens = _row_tokens(config, world)
    if tokens <= MAX_ROW_TOKENS:
        return None
    return f"--seq-length x --micro-batch-size = {tokens} tokens in a row, at most {MAX_ROW_TOKENS} have an int32 place"


@_rule("lr", "min_lr")
def _min_lr_below_lr(config: RunConfig, world: int) -> str | None:
    t = config.training
    return f"--min-lr {t.min_lr:g} is above --lr {t.lr:g}" if t.min_lr > t.lr else None


@_rule("lr_warmup_iters", "lr_decay_iters", "train_iters")
def _warmup_before_decay_ends(config: RunConfig, world: int) -> str | None:
    t = config.training
    end, name = (t.train_iters, "--train-iters") if t.lr_decay_iters is None else (t.lr_decay_iters, "--lr-decay-iters")
    if t.lr_warmup_iters <= end:
        return None
    return f"--lr-warmup-iters {t.lr_warmup_iters} is above {name} {end}: the decay would end before it starts"


@_rule("lr_decay_style", "lr_wsd_decay_iters", "lr_warmup_iters", "lr_decay_iters", "train_iters")
def _wsd_decay(config: RunConfig, world: int) -> str | None:
    t = config.training
    if t.lr_decay_style != "WSD":
        unused = f"--lr-wsd-decay-iters {t.lr_wsd_decay_iters} acts only with --lr-decay-style WSD"
        return None if t.lr_wsd_decay_iters is None else unused
    if t.lr_wsd_decay_iters is None:
        return "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its final fall"
    end = t.train_iters if t.lr_decay_iters is None else t.lr_decay_iters
    if t.lr_warmup_iters > end or t.lr_warmup_iters + t.lr_wsd_decay_iters <= end:
        return None
    return (
        f"--lr-wsd-decay-iters {t.lr_wsd_decay_iters} does not fit between --lr-warmup-iters {t.lr_warmup_iters} and "
        f"the end of the decay at step {end}: use at most {end - t.lr_warmup_iters}"
    )


@_rule("eval_interval", "valid_data_path")
def _validation_needs_data(config: RunConfig, world: int) -> str | None:
    if config.training.eval_interval == 0 or config.data.valid_data_path is not None:
        return None
    return f"--eval-interval {config.training.eval_interval} needs --valid-data-path"


@_rule("valid_data_path", "data_path")
def _validation_needs_training_data(config: RunConfig, world: int) -> str | None:
    if config.data.valid_data_path is None or config.data.data_path is not None:
        return None
    return f"--valid-data-path {config.data.valid_data_path} needs --data-path, packs of the same tokenizer"


@_rule("attention_kernel", "seq_length", "micro_batch_size", "dynamic_context_parallel", *_GRID)
def _dense_kernel_is_small(config: RunConfig, world: int) -> str | None:
    cp = config.parallel.context_parallel_size * _joined(config, world)
    row = _row_tokens(config, world)
    if config.training.attention_kernel != "dense" or (cp == 1 and row <= MAX_DENSE_ROW_TOKENS):
        return None
    return (
        f"--attention-kernel dense is a reference for one cp rank and rows of at most {MAX_DENSE_ROW_TOKENS} tokens; "
        f"this run has --context-parallel-size {cp} and rows of {row}: use --attention-kernel auto"
    )


def _missing_folder(name: str, file_inside: str) -> Finder:
    def find(config: RunConfig, world: int) -> str | None:
        path = flatten(config)[name]
        if path is None or config.dry_run:
            return None
        folder = Path(str(path))
        if not folder.exists() and len(str(path).replace(",", " ").split()) > 1:
            return (
                f"{flag(name)} {path}: does not exist; it takes one directory, no list or weighted blend of them: "
                f"tools/preprocess_data.py merge joins several"
            )
        if not folder.is_dir():
            return f"{flag(name)} {path}: {'is not a directory' if folder.exists() else 'does not exist'}"
        if file_inside and not (folder / file_inside).is_file():
            return f"{flag(name)} {path}: holds no {file_inside}; build it with tools/preprocess_data.py build"
        return None

    return find


_rule("data_path", "dry_run")(_missing_folder("data_path", "manifest.json"))
_rule("valid_data_path", "dry_run")(_missing_folder("valid_data_path", "manifest.json"))
_rule("load", "dry_run")(_missing_folder("load", ""))


def _blocked_folder(name: str) -> Finder:
    def find(config: RunConfig, world: int) -> str | None:
        path = flatten(config)[name]
        if path is None or config.dry_run:
            return None
        folder = Path(str(path)).absolute()
        if folder.exists() and not folder.is_dir():
            return f"{flag(name)} {path}: is a file, a directory is needed"
        parent = next(place for place in (folder, *folder.parents) if place.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            return f"{flag(name)} {path}: cannot be written, {parent} does not allow it"
        return None

    return find


_rule("save", "dry_run")(_blocked_folder("save"))
_rule("tensorboard_dir", "dry_run")(_blocked_folder("tensorboard_dir"))
_rule("profile_dir", "dry_run")(_blocked_folder("profile_dir"))


@_rule("log_file", "dry_run")
def _log_file_is_a_file(config: RunConfig, world: int) -> str | None:
    if config.dry_run or not config.log_path.is_dir():
        return None
    return f"--log-file {config.log_path}: is a directory, a file is needed"


RULES: tuple[Rule, ...] = (*_OWN_RULES, *CHECKPOINT_RULES, *CONTEXT_RULES, *HEALTH_RULES, *VISION_RULES)
"""Every comparison of fields."""
