"""Every contradiction a configuration can hold, found before any process group exists and told all at once.

First comes each field by itself, then the sections that compare fields. A number out of range is NaN for the sections:
no comparison with NaN is true, so one mistake is told once. Sections therefore ask `a > b` and never `not a <= b`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacp.core.config.blend import path_problems, shown_path
from megacp.core.config.checks.activations import activation_reasons
from megacp.core.config.checks.checkpoint import checkpoint_reasons, folder_reasons
from megacp.core.config.checks.context import context_reasons, packs_in_a_row
from megacp.core.config.checks.health import health_reasons, profile_reasons
from megacp.core.config.checks.lora import lora_reasons
from megacp.core.config.checks.multiples import multiple_reasons
from megacp.core.config.checks.pipeline import pipeline_reasons
from megacp.core.config.checks.sharding import sharding_reasons
from megacp.core.config.checks.vision import vision_reasons
from megacp.core.config.model import no_rope_pattern
from megacp.core.config.ranges import differ
from megacp.core.config.run import RunConfig, fields, flag, flatten, with_values

MAX_ROW_TOKENS = 2**31 - 1
"""The index of a token in its row is int32."""
MAX_DENSE_ROW_TOKENS = 8192
"""The dense kernel holds heads x T x T scores: 256 MiB a head in float32 at this length."""


def check(config: RunConfig, world_size: int) -> list[str]:
    """All reasons why this configuration cannot run on `world_size` ranks; empty when it can."""
    values = flatten(config)
    problems = {name: info.problem(values[name]) for name, info in fields().items()}
    reasons = [f"{flag(name)}: {problem}" for name, problem in problems.items() if problem]
    if world_size < 1:
        return [*reasons, f"the world size is {world_size}, it must be at least 1"]
    known = with_values(config, {name: fields()[name].unknown for name, problem in problems.items() if problem})
    return reasons + [reason for section in SECTIONS for reason in section(known, world_size)]


def require(config: RunConfig, world_size: int, also: Sequence[str] = ()) -> None:
    """Raise one ValueError that lists every reason of `check`, and those that the caller found `also`."""
    reasons = [*check(config, world_size), *also]
    if reasons:
        head = "this configuration cannot run" + (f", for {len(reasons)} reasons" if len(reasons) > 1 else "")
        raise ValueError("\n".join([f"{head}:", *(f"  - {reason}" for reason in reasons)]))


def _grid(config: RunConfig, world: int) -> Iterator[str]:
    asked = config.world_size
    if asked is not None and not config.dry_run and differ(asked, world):
        yield f"--world-size {asked} acts only with --dry-run; this run has {world} ranks from its launcher"


def _model(config: RunConfig, world: int) -> Iterator[str]:
    m = config.model
    divides = m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0
    if divides and m.head_dim % 2 > 0:
        yield (
            f"a head is {m.head_dim} wide, the rotary embedding needs an even width: change --kv-channels or "
            "--hidden-size"
        )
    if m.vocab_size == 0 and config.data.data_path is None and not config.dry_run:
        yield "--vocab-size 0 takes the vocabulary from the dataset, but no --data-path is given: give one of them"
    if m.additional_vocab_size > 0 and not m.untie_embeddings_and_output_weights:
        yield (
            f"--additional-vocab-size {m.additional_vocab_size} gives the embedding more rows than the head: "
            "it needs --untie-embeddings-and-output-weights"
        )
    if m.rope_scaling == "none" and m.rope_scaling_factor > 1:
        yield f"--rope-scaling-factor {m.rope_scaling_factor:g} acts only with --rope-scaling linear, llama3 or yarn"
    if m.rope_scaling == "llama3" and m.rope_low_freq_factor >= m.rope_high_freq_factor:
        yield (
            f"--rope-low-freq-factor {m.rope_low_freq_factor:g} must be below "
            f"--rope-high-freq-factor {m.rope_high_freq_factor:g}"
        )
    yield from _yarn(config)
    try:
        no_rope_pattern(m.no_rope_freq or None)
    except ValueError as error:
        yield str(error)
    if m.qk_layernorm_scope != "head" and not m.qk_layernorm:
        yield f"--qk-layernorm-scope {m.qk_layernorm_scope} acts only with --qk-layernorm"


def _yarn(config: RunConfig) -> Iterator[str]:
    m, plain = config.model, RunConfig().model
    numbers = {
        "beta_fast": (m.beta_fast, plain.beta_fast),
        "beta_slow": (m.beta_slow, plain.beta_slow),
        "mscale": (m.mscale or 0, 0),
        "mscale_all_dim": (m.mscale_all_dim or 0, 0),
        "rope_attention_factor": (m.rope_attention_factor or 0, 0),
    }
    given = [f"{flag(name)} {value:g}" for name, (value, default) in numbers.items() if differ(value, default)]
    if m.rope_scaling != "yarn":
        if given:
            yield f"{', '.join(given)} {'act' if len(given) > 1 else 'acts'} only with --rope-scaling yarn"
        return
    if m.beta_slow > m.beta_fast:
        yield f"--beta-slow {m.beta_slow:g} is above --beta-fast {m.beta_fast:g}"
    both = [scale for scale in (m.mscale, m.mscale_all_dim) if scale is not None]
    if len(both) == 1 and both[0] > 0:
        yield f"--mscale {m.mscale} and --mscale-all-dim {m.mscale_all_dim} act only together"


def _rows(config: RunConfig, world: int) -> Iterator[str]:
    joined = packs_in_a_row(config, world)
    cp = config.parallel.context_parallel_size * joined
    tokens = config.data.seq_length * config.training.micro_batch_size * joined
    if tokens > MAX_ROW_TOKENS:
        yield f"--seq-length x --micro-batch-size = {tokens} tokens in a row, at most {MAX_ROW_TOKENS} fit an int32"
    known = cp * tokens > 0
    if config.training.attention_kernel == "dense" and known and (cp > 1 or tokens > MAX_DENSE_ROW_TOKENS):
        yield (
            f"--attention-kernel dense is a reference for one cp rank and rows of at most {MAX_DENSE_ROW_TOKENS} "
            f"tokens; this run has --context-parallel-size {cp} and rows of {tokens}: use --attention-kernel auto"
        )


def _schedule(config: RunConfig, world: int) -> Iterator[str]:
    t = config.training
    warmup, fall = t.lr_warmup_iters, t.lr_wsd_decay_iters
    end, name = (t.train_iters, "--train-iters") if t.lr_decay_iters is None else (t.lr_decay_iters, "--lr-decay-iters")
    if t.min_lr > t.lr:
        yield f"--min-lr {t.min_lr:g} is above --lr {t.lr:g}"
    if warmup > end:
        yield f"--lr-warmup-iters {warmup} is above {name} {end}: the decay would end before it starts"
    if t.lr_decay_style != "WSD":
        if fall is not None and fall > 0:
            yield f"--lr-wsd-decay-iters {fall} acts only with --lr-decay-style WSD"
    elif fall is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its final fall"
    elif warmup <= end < warmup + fall:
        yield (
            f"--lr-wsd-decay-iters {fall} does not fit between --lr-warmup-iters {warmup} and the end of the decay at "
            f"step {end}: use at most {end - warmup}"
        )


def _validation(config: RunConfig, world: int) -> Iterator[str]:
    data, interval = config.data, config.training.eval_interval
    if interval > 0 and data.valid_data_path is None:
        yield f"--eval-interval {interval} needs --valid-data-path"
    yield from path_problems("--data-path", data.data_path)
    yield from path_problems("--valid-data-path", data.valid_data_path)
    if data.valid_data_path and data.data_path is None:
        yield f"--valid-data-path {shown_path(data.valid_data_path)} needs --data-path, packs of the same tokenizer"


SECTIONS = (
    multiple_reasons,
    _grid,
    pipeline_reasons,
    _model,
    _rows,
    _schedule,
    _validation,
    activation_reasons,
    folder_reasons,
    checkpoint_reasons,
    context_reasons,
    health_reasons,
    profile_reasons,
    vision_reasons,
    lora_reasons,
    sharding_reasons,
)
"""Functions `(config, world size) -> reasons` over a config whose numbers out of range are NaN."""
