"""The table of transports: how keys, values and queries travel between context-parallel ranks.

A row has everything that depends on the choice, so that a planner, a memory estimate and the checks
of a trainer ask the row instead of comparing names. It also builds the transport; only then is
torch imported.
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
"""Ranks of the inner all-to-all and of the outer ring, for the row that needs them; else empty."""


@dataclass(frozen=True)
class EngineTransport:
    """The same transport in Transformer Engine."""

    name: str
    """Its `cp_comm_type`."""
    windows: bool
    """Whether layers with a sliding window may use it."""
    saves_own_tokens: bool
    """Whether it saves tensors of the rank's own tokens; with all-to-all it saves some heads of all
    tokens.
    """
    one_group: str = ""
    """Its `cp_comm_type` if all ranks form a single group, of the row that needs sizes."""
    groups_of_one: str = ""
    """Its `cp_comm_type` if each rank is a group of its own, of the row that needs sizes."""


@dataclass(frozen=True)
class TransportRow:
    """A transport, and what follows from choosing it. `cp` is the number of ranks that share a
    row.
    """

    name: str
    build: Callable[[Axis, Kernel, GroupSizes], Transport]
    """Return the transport over an axis of two ranks or more. Collective if the row needs sizes."""
    heads: Literal["kept", "all", "inner"] = "kept"
    """Whether heads are exchanged for tokens: not at all, over all ranks, or over the inner ranks
    only.
    """
    keys: Literal["ring", "gathered", "needed"] = "ring"
    """How K/V of other ranks arrive: block by block around a ring, all at once, or only the rows
    that a query sees.
    """
    layouts: tuple[str, ...] = ()
    """Layouts that a search tries."""
    best_layout: str = ""
    """The layout that suits it whatever the mask is; none if it depends on the mask."""
    engine: EngineTransport | None = None

    @property
    def needs_sizes(self) -> bool:
        """Whether the ranks form groups whose two sizes must be given."""
        return self.heads == "inner"

    @property
    def whole_row(self) -> bool:
        """Whether every rank has the whole row, for its own heads."""
        return self.heads == "all"

    @property
    def spans_replicas(self) -> bool:
        """Whether the ranks of all replicas may share their rows (dynamic context parallelism)."""
        return self.keys == "needed"

    def head_ranks(self, cp: int, sizes: GroupSizes = ()) -> int:
        """Return the number of ranks over which the heads of a row are split."""
        if self.heads == "all":
            return cp
        if self.heads == "inner":
            return sizes[0] if sizes else 1
        return 1

    def key_ranks(self, cp: int, sizes: GroupSizes = ()) -> int:
        """Return the number of ranks (or of groups with split heads) between which K/V travel."""
        return cp // self.head_ranks(cp, sizes)

    def messages(self, cp: int, sizes: GroupSizes = ()) -> int:
        """Return the number of K/V messages of a forward."""
        return self.key_ranks(cp, sizes) - 1 if self.keys == "ring" else 2

    def hidden_share(self, cp: int, sizes: GroupSizes = ()) -> float:
        """Return the share of attention's time under which K/V messages are hidden: all blocks of a
        ring but one.
        """
        if self.keys != "ring":
            return 0.0
        return 1 - 1 / self.key_ranks(cp, sizes)


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
    # neighbours, often on one machine, exchange heads; ranks a whole inner group apart form the
    # ring
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
"""Share of the other ranks' K/V up to which sending only the needed rows is chosen."""


def choose_transport(needed: float, cp: int, heads: int, groups: int) -> str:
    """Return the name of the transport for rows in which a rank needs the share `needed` of the
    other ranks' K/V.

    `heads` and `groups` are those of one tensor-parallel rank. Rows of many documents need little.
    Rows that need most K/V send everything anyway; then exchanging heads moves fewer bytes than K/V
    from `(cp - 1) * needed > 2/3 (1 + heads / groups)` on, counting forward and backward. Otherwise
    a ring is chosen, which hides its messages under attention.
    """
    if needed <= FEW_KEYS:
        return "kv_exchange"
    if heads % cp == 0 and (cp - 1) * needed > 2 / 3 * (1 + heads / groups):
        return "a2a"
    return "p2p"
