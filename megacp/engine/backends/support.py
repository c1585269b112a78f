"""Transformer Engine's limits: reasons why it cannot run the layers or the attention of a run.

Each function yields all reasons that apply, in terms of megacp's flags, so an error or a log line
can list them together. The package's own assertions would report only one problem at a time and
refer to its internals. Nothing here imports the package.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.cudnn import WIDEST_HEAD
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.attention import heads_group, transport_of

FP8_MULTIPLES = {"off": 1, "delayed": 16, "current": 16, "blockwise": 128}
"""Required divisor of all dimensions of 8-bit products, including tokens, by `--fp8` value.

With other sizes, `blockwise` would gather and multiply in 16 bits.
"""


def attention_reasons(config: RunConfig) -> Iterator[str]:
    """Yield reasons why a run with Transformer Engine's layers cannot use its attention.

    Transformer Engine's kernel selector does not check these conditions. It checks everything else,
    including the GPU; see `transformer_engine.selector_problem`.
    """
    p = config.parallel
    m = config.model
    if m.head_dim > WIDEST_HEAD:
        yield (
            f"cuDNN computes wrong gradients for heads wider than {WIDEST_HEAD}, but this model's "
            f"heads have width {m.head_dim}"
        )
    if m.softmax_type != "vanilla":
        yield f"only native attention supports --softmax-type {m.softmax_type}"
    # the remaining conditions are about context parallelism
    if p.context_parallel_size == 1 and not p.dynamic_context_parallel:
        return
    # `auto` may choose a transport that only native attention has
    if transport_of(config).engine is None or p.chooses_transport:
        known = ", ".join(row.name for row in TRANSPORTS.values() if row.engine is not None)
        yield (
            f"only native attention supports --cp-comm-type {p.cp_comm_type}; Transformer Engine "
            f"supports {known}"
        )
    # all-to-all transports distribute the heads of a tp rank across this number of cp ranks
    dealt_over = heads_group(config)
    heads = m.num_attention_heads // p.tensor_model_parallel_size
    groups = m.query_groups // p.tensor_model_parallel_size
    if heads % dealt_over or groups % dealt_over:
        yield (
            f"--cp-comm-type {p.cp_comm_type} distributes heads across {dealt_over} ranks, but a "
            f"tp rank has {heads} heads and {groups} query groups; both must be multiples of "
            f"{dealt_over}"
        )


def layer_reasons(
    config: RunConfig,
    device_type: str = "cuda",
    package: str | None = None,
    eight_bits: str | None = None,
) -> Iterator[str]:
    """Yield reasons why a run cannot use Transformer Engine's layers on a type of device.

    `package` is the reason why the package cannot be imported, and `eight_bits` the reason why the
    GPU does not support `--fp8`; None means that there is no problem.
    """
    t = config.training
    tp = config.parallel.tensor_model_parallel_size
    if device_type != "cuda":
        yield f"Transformer Engine runs on CUDA, but this run is on {device_type}"
    if package is not None:
        yield package
    if eight_bits is not None:
        yield f"--fp8 {t.fp8}: {eight_bits}"
    # zero_bubble stores the factors of weight gradients, which only native layers provide
    if config.parallel.defers_weight_gradients:
        schedule = config.parallel.pipeline_schedule
        yield (
            f"--pipeline-schedule {schedule} defers weight gradients, which only native layers "
            "support"
        )
    if t.dtype != "bfloat16":
        yield f"Transformer Engine's layers need --dtype bfloat16, but this run has {t.dtype}"
    # delayed scaling conflicts with every setting that computes a product twice
    twice = []
    if t.fp8 == "delayed":
        if t.recompute_mode.repeats_block:
            twice.append(f"--recompute-granularity {t.recompute_granularity}")
        if t.mlp_chunk_tokens > 0:
            twice.append(f"--mlp-chunk-tokens {t.mlp_chunk_tokens}")
    for name in twice:
        yield (
            f"--fp8 delayed changes its scales between the forward and the backward pass, so "
            f"{name} would recompute different values: use --fp8 current or blockwise"
        )
    multiple = FP8_MULTIPLES[t.fp8]
    # with sequence parallelism, each tp rank has a part of a tile
    sharers = tp if config.parallel.sequence_parallel else 1
    if t.mlp_chunk_tokens % (multiple * sharers) > 0 and t.fp8 != "off":
        yield (
            f"--fp8 {t.fp8} needs --mlp-chunk-tokens to be a multiple of {multiple * sharers} "
            f"({multiple} on each of {sharers} tp ranks), but it is {t.mlp_chunk_tokens}"
        )
    # local widths of the products in attention and MLP
    m = config.model
    widths = {
        "--hidden-size": m.hidden_size,
        "--ffn-hidden-size / tp": m.ffn_hidden_size // tp,
        "width of a rank's heads": m.num_attention_heads * m.head_dim // tp,
        "width of a rank's groups": m.query_groups * m.head_dim // tp,
    }
    narrow = [f"{name} {width}" for name, width in widths.items() if width % multiple]
    if narrow:
        yield (
            f"--fp8 {t.fp8} needs widths that are multiples of {multiple}, but this model has "
            f"{', '.join(narrow)}"
        )


def needed_by(config: RunConfig) -> list[str]:
    """Return the flags of a run that require Transformer Engine."""
    training = config.training
    names = []
    # "auto" does not require it, because the run can fall back to native layers
    if training.transformer_impl == "transformer_engine":
        names.append("--transformer-impl transformer_engine")
    if training.fp8 != "off":
        names.append(f"--fp8 {training.fp8}")
    return names
