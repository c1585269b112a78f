"""The table of transports, which move keys, values and queries between context-parallel ranks.

Each row contains everything that depends on the choice of a transport. A planner, a memory estimate
or a trainer's checks read the row instead of comparing names. The row also builds the transport;
torch is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megacp.attention.context_parallel.transport import Transport
    from megacp.attention.ops.kernel import Kernel
    from megacp.distributed.grid import Axis

GroupSizes = tuple[int, ...]
"""Sizes of the inner all-to-all and the outer ring if the transport needs them, else empty."""


@dataclass(frozen=True)
class EngineTransport:
    """The equivalent transport in Transformer Engine."""

    name: str
    """Value of `cp_comm_type`."""
    windows: bool
    """Whether layers with a sliding window may use it."""
    saves_own_tokens: bool
    """Whether it saves tensors of the rank's own tokens. Transports with an all-to-all save some
    heads of all tokens instead.
    """
    one_group: str = ""
    """Value of `cp_comm_type` if all ranks form one group; only for transports that need sizes."""
    groups_of_one: str = ""
    """Value of `cp_comm_type` if each group has one rank; only for transports that need sizes."""


@dataclass(frozen=True)
class TransportRow:
    """A transport and its properties.

    In all methods, `cp` is the number of ranks that share a row, and `sizes` are the two group
    sizes if the transport needs them.
    """

    name: str
    build: Callable[[Axis, Kernel, GroupSizes], Transport]
    """Build the transport for an axis of at least two ranks; collective if sizes are needed."""
    heads: Literal["kept", "all", "inner"] = "kept"
    """How heads are exchanged for tokens: not at all, among all ranks, or only among the inner
    ranks.
    """
    keys: Literal["ring", "gathered", "needed"] = "ring"
    """How K/V of other ranks arrive: block by block around a ring, all together, or only the
    needed rows.
    """
    layouts: tuple[str, ...] = ()
    """Layouts that a layout search tries."""
    best_layout: str = ""
    """Best layout for any mask; empty if the best layout depends on the mask."""
    engine: EngineTransport | None = None
    """The equivalent transport in Transformer Engine, if there is one."""

    @property
    def needs_sizes(self) -> bool:
        """Whether the ranks form groups that need two explicit sizes."""
        return self.heads == "inner"

    @property
    def whole_row(self) -> bool:
        """Whether every rank receives the whole row, for its own heads."""
        return self.heads == "all"

    @property
    def spans_replicas(self) -> bool:
        """Whether the ranks of all replicas may share their rows (dynamic context parallelism)."""
        return self.keys == "needed"

    def head_ranks(self, cp: int, sizes: GroupSizes = ()) -> int:
        """Return the number of ranks that share the heads of a row."""
        if self.heads == "all":
            return cp
        if self.heads == "inner":
            return sizes[0] if sizes else 1
        return 1

    def key_ranks(self, cp: int, sizes: GroupSizes = ()) -> int:
        """Return the number of ranks, or of groups with split heads, that exchange K/V."""
        return cp // self.head_ranks(cp, sizes)

    def messages(self, cp: int, sizes: GroupSizes = ()) -> int:
        """Return the number of K/V messages in a forward pass."""
        if self.keys == "ring":
            return self.key_ranks(cp, sizes) - 1
        return 2

    def hidden_share(self, cp: int, sizes: GroupSizes = ()) -> float:
        """Return the share of attention time that can hide K/V messages.

        In a ring, messages overlap with all blocks except the last.
        """
        if self.keys != "ring":
            return 0.0
        return 1 - 1 / self.key_ranks(cp, sizes)


# The builders import their modules when they are called, because the table itself must not need
# torch.


def _ring(axis: Axis, kernel: Kernel, sizes: GroupSizes) -> Transport:
    from megacp.attention.context_parallel.ring import RingAttention

    return RingAttention(axis, kernel)


def _all_gather(axis: Axis, kernel: Kernel, sizes: GroupSizes) -> Transport:
    from megacp.attention.context_parallel.all_gather import AllGatherAttention

    return AllGatherAttention(axis, kernel)


def _kv_exchange(axis: Axis, kernel: Kernel, sizes: GroupSizes) -> Transport:
    from megacp.attention.context_parallel.kv_exchange import KVExchange

    return KVExchange(axis, kernel)


def _a2a(axis: Axis, kernel: Kernel, sizes: GroupSizes) -> Transport:
    from megacp.attention.context_parallel.a2a import HeadsForSequence
    from megacp.attention.context_parallel.transport import of_one_rank

    return HeadsForSequence(axis, of_one_rank(kernel))


def _a2a_p2p(axis: Axis, kernel: Kernel, sizes: GroupSizes) -> Transport:
    from megacp.attention.context_parallel.a2a import HeadsForSequence
    from megacp.attention.context_parallel.transport import LocalAttention
    from megacp.distributed.grid import split_axis

    if len(sizes) != 2 or sizes[0] * sizes[1] != axis.size:
        given = " ".join(map(str, sizes)) or "none"
        raise ValueError(
            f"the transport a2a+p2p needs two sizes whose product is {axis.size}, got {given}"
        )
    # neighbouring ranks, often on one machine, exchange heads; the ring connects ranks of different
    # inner groups
    inner, outer = split_axis(axis, sizes[0])
    ring = _ring(outer, kernel, ()) if outer.size > 1 else LocalAttention(kernel)
    return HeadsForSequence(inner, ring)


_ROWS = (
    TransportRow(
        "p2p",
        _ring,
        layouts=("zigzag_document", "balanced"),
        engine=EngineTransport("p2p", windows=False, saves_own_tokens=True),
    ),
    TransportRow(
        "all_gather",
        _all_gather,
        keys="gathered",
        layouts=("zigzag_document",),
        engine=EngineTransport("all_gather", windows=True, saves_own_tokens=True),
    ),
    TransportRow(
        "a2a",
        _a2a,
        heads="all",
        layouts=("contiguous",),
        best_layout="contiguous",
        engine=EngineTransport("a2a", windows=True, saves_own_tokens=False),
    ),
    TransportRow(
        "a2a+p2p",
        _a2a_p2p,
        heads="inner",
        layouts=("zigzag_document",),
        engine=EngineTransport(
            "a2a+p2p", windows=False, saves_own_tokens=False, one_group="a2a", groups_of_one="p2p"
        ),
    ),
    TransportRow(
        "kv_exchange", _kv_exchange, keys="needed", layouts=("balanced",), best_layout="balanced"
    ),
)
TRANSPORTS = {row.name: row for row in _ROWS}
"""Transports by name."""

FEW_KEYS = 0.5
"""`kv_exchange` is chosen if a rank needs at most this share of the other ranks' K/V."""


def choose_transport(needed: float, cp: int, heads: int, groups: int) -> str:
    """Return the name of the transport to use for rows of one kind.

    `needed` is the share of the other ranks' K/V that a rank needs. `heads` and `groups` are counts
    per tensor-parallel rank. Rows of many documents need little K/V and use `kv_exchange`.

    For other rows, exchanging heads moves fewer bytes than sending K/V if
    `(cp - 1) * needed > 2/3 (1 + heads / groups)`, counting the forward and the backward pass. In
    all other cases, the ring is chosen because it hides its messages behind attention.
    """
    if needed <= FEW_KEYS:
        return "kv_exchange"
    if heads % cp == 0 and (cp - 1) * needed > 2 / 3 * (1 + heads / groups):
        return "a2a"
    return "p2p"
