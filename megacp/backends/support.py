"""What Transformer Engine 2.20 can do, as two tables: its attention under context parallelism, and a run's settings.

Key property: a constraint is a row with its sentence, and every row that is broken is told, so a user or a log line
sees all reasons at once; nothing here imports the package. Rejected: asserts met one by one inside the package, whose
text names its internals, and after the process groups exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megacp.config.run import RunConfig

Case = TypeVar("Case")

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Transports of Transformer Engine; a cp axis of one rank needs none."""
CAUSAL_OR_NONE = ("causal", "no_mask")
PADDING = ("padding", "padding_causal")
HEAD_MULTIPLE, WIDEST_HEAD = 8, 128
"""Widths of a head that cuDNN's training kernels take on every GPU that has them for packed sequences."""
FP8_MULTIPLES = {"off": 1, "delayed": 16, "current": 16, "blockwise": 128}
"""Both sides of every 8-bit product, tokens included, are multiples of this; blockwise ones would else be gathered and
multiplied wide.
"""


@dataclass(frozen=True)
class Constraint(Generic[Case]):
    """One row: the case is refused where `broken`, with the sentence `reason`."""

    broken: Callable[[Case], bool]
    reason: Callable[[Case], str]


def refusals(case: Case, constraints: tuple[Constraint[Case], ...]) -> list[str]:
    """All reasons against a case; none when it is supported."""
    return [row.reason(case) for row in constraints if row.broken(case)]


@dataclass(frozen=True)
class AttentionCase:
    """One way to call `DotProductAttention` on `degree` cp ranks; heads and groups are those of a tensor rank."""

    comm_type: str = "p2p"
    degree: int = 2
    inner: int = 1
    """Ranks of the all-to-all inside a2a+p2p."""
    layout: str = "thd"
    """`thd`, `bshd` or `sbhd`."""
    mask: str = "padding_causal"
    padded_lengths: bool = True
    """Whether `cu_seqlens_*_padded` are given."""
    bias: str = "no_bias"
    """`no_bias`, `post_scale_bias` or `alibi`."""
    score_mod: bool = False
    softcap: bool = False
    window: bool = False
    heads: int = 8
    groups: int = 8
    head_dim: int = 64
    dtype: str = "bfloat16"
    capability: tuple[int, int] = (9, 0)
    """Of the GPU: (8, 0) is Ampere, (9, 0) Hopper, (10, 0) and (12, 0) Blackwell."""
    cudnn: int = 91900
    """Version of cuDNN: 91900 is 9.19."""

    @property
    def swapped(self) -> int:
        """Ranks over which heads are dealt."""
        return {"a2a": self.degree, "a2a+p2p": self.inner}.get(self.comm_type, 1)


def _dotted(case: AttentionCase) -> str:
    return ".".join(map(str, case.capability))


def _across(broken: Callable[[AttentionCase], bool]) -> Callable[[AttentionCase], bool]:
    """A row that acts from two cp ranks on."""
    return lambda case: case.degree > 1 and broken(case)


ATTENTION: tuple[Constraint[AttentionCase], ...] = (
    Constraint(
        lambda c: c.dtype != "bfloat16",
        lambda c: f"cuDNN's attention takes bfloat16, this run has --dtype {c.dtype}",
    ),
    Constraint(
        lambda c: c.head_dim % HEAD_MULTIPLE != 0 or c.head_dim > WIDEST_HEAD,
        lambda c: f"a head is {c.head_dim} wide, cuDNN takes multiples of {HEAD_MULTIPLE} up to {WIDEST_HEAD}",
    ),
    Constraint(
        lambda c: c.layout == "thd" and c.capability < (9, 0),
        lambda c: f"cuDNN takes packed sequences (thd) from compute capability 9.0 on, this GPU has {_dotted(c)}",
    ),
    Constraint(
        lambda c: c.layout == "thd" and c.capability >= (12, 0) and c.cudnn < 91801,
        lambda c: f"on compute capability {_dotted(c)} packed sequences (thd) need cuDNN 9.18.1, this is {c.cudnn}",
    ),
    Constraint(
        _across(lambda c: c.comm_type not in COMM_TYPES),
        lambda c: f"--cp-comm-type {c.comm_type} is ours alone; Transformer Engine has {', '.join(COMM_TYPES)}",
    ),
    Constraint(
        lambda c: c.layout == "thd" and c.mask not in PADDING,
        lambda c: f"packed sequences (thd) take the masks {' and '.join(PADDING)}, not {c.mask}",
    ),
    Constraint(
        _across(lambda c: c.layout == "thd" and not c.padded_lengths),
        lambda c: "packed sequences (thd) under context parallelism need cu_seqlens_q_padded and cu_seqlens_kv_padded",
    ),
    Constraint(
        _across(lambda c: c.layout != "thd" and c.mask in PADDING),
        lambda c: f"{c.layout} under context parallelism takes no {c.mask} mask: its lengths would be stale or refused",
    ),
    Constraint(
        _across(lambda c: c.mask not in (*PADDING, *CAUSAL_OR_NONE)),
        lambda c: f"the mask {c.mask} does not work under context parallelism",
    ),
    Constraint(
        _across(lambda c: c.bias == "alibi"),
        lambda c: "ALiBi does not work under context parallelism",
    ),
    Constraint(
        _across(lambda c: c.bias == "post_scale_bias" and (c.comm_type != "p2p" or c.layout == "thd")),
        lambda c: f"a bias works with p2p and not packed, this is {c.comm_type} and {c.layout}",
    ),
    Constraint(
        _across(lambda c: c.score_mod),
        lambda c: "score_mod does not work under context parallelism",
    ),
    Constraint(
        _across(lambda c: c.softcap),
        lambda c: "softcap does not work under context parallelism",
    ),
    Constraint(
        _across(lambda c: c.window and c.comm_type not in ("all_gather", "a2a")),
        lambda c: f"a sliding window works with all_gather and a2a, not with {c.comm_type}",
    ),
    Constraint(
        _across(lambda c: bool(c.heads % c.swapped or c.groups % c.swapped)),
        lambda c: (
            f"--cp-comm-type {c.comm_type} deals heads over {c.swapped} ranks, a tensor rank has {c.heads} heads and "
            f"{c.groups} groups"
        ),
    ),
)
"""The constraint matrix of Transformer Engine's attention."""


def attention_case(config: RunConfig) -> AttentionCase:
    """How a run would call Transformer Engine's attention on its packs."""
    p, m = config.parallel, config.model
    sizes = p.hierarchical_context_parallel_sizes or (1, 1)
    ranks = p.context_parallel_size * (2 if p.dynamic_context_parallel else 1)  # dp x cp: more than one
    return AttentionCase(
        comm_type=p.cp_comm_type,
        degree=ranks,
        inner=sizes[0],
        heads=m.num_attention_heads // p.tensor_model_parallel_size,
        groups=m.query_groups // p.tensor_model_parallel_size,
        head_dim=m.head_dim,
        dtype=config.training.dtype,
    )


@dataclass(frozen=True)
class RunCase:
    """A run on a type of device; `package` says why Transformer Engine cannot be imported there, `eight_bits` why this
    GPU does not have the recipe of `--fp8`.
    """

    config: RunConfig
    device_type: str
    package: str | None = None
    eight_bits: str | None = None

    @property
    def rows_shared_equally(self) -> bool:
        """Whether every tp rank holds as many rows of the vocabulary."""
        m, tp = self.config.model, self.config.parallel.tensor_model_parallel_size
        return tp == 1 or m.vocab_size % (tp * m.make_vocab_size_divisible_by) == 0

    @property
    def narrow_widths(self) -> dict[str, int]:
        """Widths of the decoder's linears on a rank that an 8-bit product does not take."""
        m, tp = self.config.model, self.config.parallel.tensor_model_parallel_size
        widths = {
            "--hidden-size": m.hidden_size,
            "--ffn-hidden-size / tp": m.ffn_hidden_size // tp,
            "width of a rank's heads": m.num_attention_heads * m.head_dim // tp,
            "width of a rank's groups": m.query_groups * m.head_dim // tp,
        }
        return {name: width for name, width in widths.items() if width % self.multiple}

    @property
    def multiple(self) -> int:
        """What widths of 8-bit products are multiples of."""
        return FP8_MULTIPLES[self.config.training.fp8]


ENGINE: tuple[Constraint[RunCase], ...] = (
    Constraint(
        lambda c: c.device_type != "cuda",
        lambda c: f"Transformer Engine runs on CUDA, this run is on {c.device_type}",
    ),
    Constraint(
        lambda c: c.package is not None,
        lambda c: c.package or "",
    ),
    Constraint(
        lambda c: c.eight_bits is not None,
        lambda c: f"--fp8 {c.config.training.fp8}: {c.eight_bits}",
    ),
    Constraint(
        lambda c: c.config.training.dtype != "bfloat16",
        lambda c: f"Transformer Engine's layers are for --dtype bfloat16, this run has {c.config.training.dtype}",
    ),
    Constraint(
        lambda c: c.config.training.fp8 == "delayed" and c.config.training.recompute_granularity == "full",
        lambda c: (
            "--fp8 delayed changes its scales between forward and backward, so --recompute-granularity full would "
            "compute something else again: take none or selective, or --fp8 current or blockwise"
        ),
    ),
    Constraint(
        lambda c: bool(c.narrow_widths),
        lambda c: (
            f"--fp8 {c.config.training.fp8} takes widths that are multiples of {c.multiple}, this model has "
            + ", ".join(f"{name} {width}" for name, width in c.narrow_widths.items())
        ),
    ),
    Constraint(
        lambda c: c.config.training.cross_entropy_fusion_impl == "te" and not c.rows_shared_equally,
        lambda c: (
            f"--cross-entropy-fusion-impl te wants as many rows on each tp rank: --vocab-size "
            f"{c.config.model.vocab_size} is no multiple of {c.config.parallel.tensor_model_parallel_size} x "
            f"--make-vocab-size-divisible-by {c.config.model.make_vocab_size_divisible_by}"
        ),
    ),
)
"""Why a run cannot use Transformer Engine's layers at all."""


def needed_by(config: RunConfig) -> list[str]:
    """The settings of a run that only Transformer Engine has."""
    training, names = config.training, []
    if training.transformer_impl == "transformer_engine":
        names.append("--transformer-impl transformer_engine")
    if training.fp8 != "off":
        names.append(f"--fp8 {training.fp8}")
    if training.cross_entropy_fusion_impl == "te":
        names.append("--cross-entropy-fusion-impl te")
    return names


def contradictions(config: RunConfig) -> list[str]:
    """Settings of Transformer Engine in a run that asks for the native layers."""
    if config.training.transformer_impl != "native":
        return []
    return [
        f"{name} needs --transformer-impl transformer_engine or auto, this run has native" for name in needed_by(config)
    ]
