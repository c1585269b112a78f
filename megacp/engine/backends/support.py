"""The limits of Transformer Engine, as reasons against a run's layers and against their attention.

Each function yields every reason that holds, in the words of our flags. So a user or a log line
sees all of them at once. Nothing here imports the package: its asserts come one by one and name its
internals.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.cudnn import WIDEST_HEAD
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.attention import heads_group, transport_of

FP8_MULTIPLES = {"off": 1, "delayed": 16, "current": 16, "blockwise": 128}
"""Both sides of every 8-bit product, tokens included, are multiples of this. Other widths of
`blockwise` would be gathered and multiplied in 16 bits.
"""


def attention_reasons(config: RunConfig) -> Iterator[str]:
    """Why a run on Transformer Engine's layers cannot have its attention.

    These its selector does not ask about; what it refuses, GPU and all, is
    `transformer_engine.selector_problem`.
    """
    p, m = config.parallel, config.model
    if m.head_dim > WIDEST_HEAD:
        yield (
            f"cuDNN's gradients of heads wider than {WIDEST_HEAD} are wrong, this model's are "
            f"{m.head_dim} wide"
        )
    if m.softmax_type != "vanilla":
        yield f"--softmax-type {m.softmax_type} is asked of ours alone"
    if p.context_parallel_size == 1 and not p.dynamic_context_parallel:
        return
    if transport_of(config).engine is None or p.chooses_transport:
        known = ", ".join(row.name for row in TRANSPORTS.values() if row.engine is not None)
        yield f"--cp-comm-type {p.cp_comm_type} is native only; Transformer Engine has {known}"
    dealt_over = heads_group(config)
    heads, groups = (
        n // p.tensor_model_parallel_size for n in (m.num_attention_heads, m.query_groups)
    )
    if heads % dealt_over or groups % dealt_over:
        yield (
            f"--cp-comm-type {p.cp_comm_type} deals heads over {dealt_over} ranks, a tensor rank "
            f"has {heads} heads and "
            f"{groups} groups"
        )


def layer_reasons(
    config: RunConfig,
    device_type: str = "cuda",
    package: str | None = None,
    eight_bits: str | None = None,
) -> Iterator[str]:
    """Why a run on a type of device cannot have Transformer Engine's layers at all.

    `package` says why the package cannot be imported there, `eight_bits` why this GPU lacks the
    recipe of `--fp8`.
    """
    t, tp = config.training, config.parallel.tensor_model_parallel_size
    if device_type != "cuda":
        yield f"Transformer Engine runs on CUDA, this run is on {device_type}"
    if package is not None:
        yield package
    if eight_bits is not None:
        yield f"--fp8 {t.fp8}: {eight_bits}"
    if config.parallel.defers_weight_gradients:
        schedule = config.parallel.pipeline_schedule
        yield (
            f"--pipeline-schedule {schedule} defers weight gradients, which only native layers "
            "support"
        )
    if t.dtype != "bfloat16":
        yield f"Transformer Engine's layers are for --dtype bfloat16, this run has {t.dtype}"
    twice = {
        f"--recompute-granularity {t.recompute_granularity}": t.recompute_mode.repeats_block,
        f"--mlp-chunk-tokens {t.mlp_chunk_tokens}": t.mlp_chunk_tokens > 0,
    }
    for name in (name for name, asked in twice.items() if asked and t.fp8 == "delayed"):
        yield (
            f"--fp8 delayed changes its scales between forward and backward, so {name} would "
            "compute something else "
            "again: take --fp8 current or blockwise"
        )
    sharers = tp if config.parallel.sequence_parallel else 1
    if t.mlp_chunk_tokens % (FP8_MULTIPLES[t.fp8] * sharers) > 0 and t.fp8 != "off":
        yield (
            f"--fp8 {t.fp8} takes --mlp-chunk-tokens that are a multiple of {FP8_MULTIPLES[t.fp8]} "
            "on each of "
            f"{sharers} tp ranks = {FP8_MULTIPLES[t.fp8] * sharers}, got {t.mlp_chunk_tokens}"
        )
    m = config.model
    widths = {
        "--hidden-size": m.hidden_size,
        "--ffn-hidden-size / tp": m.ffn_hidden_size // tp,
        "width of a rank's heads": m.num_attention_heads * m.head_dim // tp,
        "width of a rank's groups": m.query_groups * m.head_dim // tp,
    }
    if narrow := [
        f"{name} {width}" for name, width in widths.items() if width % FP8_MULTIPLES[t.fp8]
    ]:
        yield (
            f"--fp8 {t.fp8} takes multiples of {FP8_MULTIPLES[t.fp8]}, this model has "
            f"{', '.join(narrow)}"
        )


def needed_by(config: RunConfig) -> list[str]:
    """The settings of a run that only Transformer Engine has."""
    training, names = config.training, []
    if training.transformer_impl == "transformer_engine":
        names.append("--transformer-impl transformer_engine")
    if training.fp8 != "off":
        names.append(f"--fp8 {training.fp8}")
    return names
