"""A row of packed documents in the terms of Transformer Engine: cumulative lengths, true and
padded, and its order.

Its packed format (thd) pads each sequence to a multiple of 2 cp and cuts every sequence by itself:
rank r holds the slices r and 2 cp - 1 - r of each. Whether a row stands in this order is computed
from the plan that every rank holds; where it does not, the answer is the reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megacp.attention.context_parallel.layout import document_bounds, zigzag_slices
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.device import to_device
from megacp.attention.ops.kernel import Caller, at_once
from megacp.attention.ops.mask import Metadata, Reach
from megacp.attention.ops.once import once
from megacp.distributed.grid import Axis, split_axis


@dataclass(frozen=True)
class Sequences:
    """Sequences of a row: int32 `true[n]` and `padded[n]` lengths; sequence i fills `padded[i]`
    places of the row.
    """

    true: np.ndarray
    padded: np.ndarray

    @functools.cached_property
    def cu_lengths(self) -> np.ndarray:
        """int32 `[n + 1]`: `cu_seqlens`, of true tokens."""
        return np.concatenate([[0], np.cumsum(self.true)]).astype(np.int32)

    @functools.cached_property
    def cu_padded(self) -> np.ndarray:
        """int32 `[n + 1]`: `cu_seqlens_padded`, of places."""
        return np.concatenate([[0], np.cumsum(self.padded)]).astype(np.int32)

    def order(self, cp: int) -> np.ndarray:
        """Places `[cp, t]` that each rank holds, in Transformer Engine's order."""
        if cp == 1:
            return np.arange(self.cu_padded[-1])[None]
        ranks: list[list[np.ndarray]] = [[] for _ in range(cp)]
        for start, stop in zip(
            self.cu_padded[:-1].tolist(), self.cu_padded[1:].tolist(), strict=True
        ):
            slices = np.arange(start, stop).reshape(2 * cp, -1)
            for rank in range(cp):
                ranks[rank].append(slices[list(zigzag_slices(cp, rank))].reshape(-1))
        return np.stack([np.concatenate(parts) for parts in ranks])

    def tokens(self, first: np.ndarray) -> np.ndarray:
        """Index in the row of the token at each place, -1 for padding; sequence i's tokens begin at
        `first[i]`.
        """
        inside = np.arange(self.cu_padded[-1]) - np.repeat(self.cu_padded[:-1], self.padded)
        token = np.repeat(first, self.padded) + inside
        return np.where(inside < np.repeat(self.true, self.padded), token, -1)


def mask_reason(metadata: Metadata, reach: Reach) -> str | None:
    """Why a row's mask is none of Transformer Engine's; None when documents are causal."""
    start, stop = document_bounds(metadata)
    found = []
    if metadata.span[metadata.leave > 0].any():
        found.append("image spans")
    if (metadata.leave[metadata.leave > 0] != np.repeat(stop, stop - start)).any():
        found.append("branches")
    if reach.chunk:
        found.append("chunks")
    return (
        f"the row's mask has {' and '.join(found)}, which is no mask of Transformer Engine's"
        if found
        else None
    )


def _per_document(metadata: Metadata, cp: int) -> tuple[Sequences, np.ndarray]:
    """Each document is padded by itself; the rest of the row is one sequence without tokens."""
    start, stop = document_bounds(metadata)
    true = stop - start
    padded = -(-true // (2 * cp)) * 2 * cp  # [documents], up to the next multiple of 2 cp
    rest = len(metadata) - int(padded.sum())
    if rest > 0:  # below 0 the row was padded for another layout
        start, true, padded = np.append(start, 0), np.append(true, 0), np.append(padded, rest)
    return Sequences(true.astype(np.int32), padded.astype(np.int32)), start


def _whole_row(metadata: Metadata, cp: int) -> tuple[Sequences, np.ndarray]:
    """One sequence that fills the row; only its beginning may hold tokens."""
    true = int((metadata.leave > 0).sum())
    return Sequences(np.array([true], np.int32), np.array([len(metadata)], np.int32)), np.zeros(
        1, np.int64
    )


def _as_it_stands(metadata: Metadata, cp: int) -> tuple[Sequences, np.ndarray]:
    """One rank holds the row: each document with the padding behind it is a sequence, also padding
    in front.
    """
    start, stop = document_bounds(metadata)
    true, edges = stop - start, np.append(start, len(metadata))
    if start[0] > 0:
        true, edges, start = np.append(0, true), np.append(0, edges), np.append(0, start)
    return Sequences(true.astype(np.int32), np.diff(edges).astype(np.int32)), start


@once
def thd_sequences(plan: AttentionPlan) -> Sequences | str:
    """The row as Transformer Engine's sequences, or why it cannot be handed over; alike on all
    ranks of the group.
    """
    metadata, cp = plan.metadata, plan.cp
    reason = mask_reason(metadata, plan.reach)
    if reason:
        return reason
    start, _ = document_bounds(metadata)
    if not len(start):
        return "the row holds padding alone"
    ways = (
        [_as_it_stands]
        if cp == 1
        else [_per_document] + ([_whole_row] if len(start) == 1 and start[0] == 0 else [])
    )
    for way in ways:
        sequences, first = way(metadata, cp)
        if sequences.cu_padded[-1] != len(metadata) or (
            cp > 1 and (sequences.padded % (2 * cp)).any()
        ):
            continue
        expected = sequences.tokens(first)[sequences.order(cp)]  # [T] -> [cp, t]
        held = np.where(metadata.leave[plan.indices] > 0, plan.indices, -1)
        if np.array_equal(held, expected):
            return sequences
    return (
        "the tokens do not stand where Transformer Engine looks for them, in a zigzag over each document "
        "(--cp-layout zigzag_document)"
    )


@once
def _bounds_on(sequences: Sequences, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative lengths of the row, true and padded: one tensor where equal, by which Transformer
    Engine knows it.
    """
    padded = to_device(sequences.cu_padded, device)
    equal = (sequences.true == sequences.padded).all()
    return padded if equal else to_device(sequences.cu_lengths, device), padded


@once
def _padding_on(plan: AttentionPlan, device: torch.device) -> torch.Tensor | None:
    """Which of this rank's rows are padding; None where none are."""
    rows = np.flatnonzero(plan.metadata.leave[plan.local] == 0)
    return to_device(rows, device) if len(rows) else None


def window_of(tokens: int) -> tuple[int, int]:
    """Transformer Engine's word for a window of so many tokens, 0 for none: how far to the left,
    and to the right.
    """
    return tokens - 1, 0


class PackedAttention:
    """The attention of all layers, `scale` on the scores.

    `comm_type` and `inner` (ranks of the all-to-all in a2a+p2p) matter from two ranks on; making
    the groups of a2a+p2p is collective.
    """

    def __init__(
        self,
        attention: Any,
        scale: float,
        cp: Axis,
        comm_type: str,
        inner: int,
        device: torch.device,
    ) -> None:
        self.attention = attention
        self.scale = scale
        self.least_sequence = 2 * cp.size if cp.size > 1 else 1
        """Places that a sequence fills at least, and a multiple of which it fills."""
        self.cp: dict[str, Any] = {"context_parallel": cp.size > 1, "cp_size": cp.size}
        """What the selector of its kernels is given about context parallelism."""
        row = TRANSPORTS[comm_type]
        engine = row.engine
        assert engine is not None, f"Transformer Engine has no transport {comm_type}"
        self.windows = cp.size == 1 or engine.windows
        """Whether rows may have a sliding window."""
        self.keeps = cp.size == 1 or engine.saves_own_tokens
        """Whether it saves tensors of this rank's tokens; under a2a heads of all tokens are more
        than its result.
        """
        if cp.size == 1:
            return
        groups: Any = cp.group
        name = engine.name
        heads_over = 1
        if row.needs_sizes:
            inside, between = split_axis(cp, inner)
            if inside.group is None:
                name = engine.groups_of_one
            elif between.group is None:
                name = engine.one_group
            else:
                groups = [inside.group, between.group]
                heads_over = inner
        self.cp |= {"cp_comm_type": name, "cp_size_a2a": heads_over}
        self.attention.set_context_parallel_group(
            cp_group=groups,
            cp_global_ranks=list(cp.global_ranks),
            cp_stream=torch.cuda.Stream(device=device),
            cp_comm_type=name,
        )

    def sequences(self, plan: AttentionPlan) -> Sequences | str:
        """`thd_sequences` of a plan."""
        if plan.reach.window and not self.windows:
            able = " or ".join(
                row.name
                for row in TRANSPORTS.values()
                if row.engine is not None and row.engine.windows
            )
            return (
                f"Transformer Engine has no sliding window under {self.cp['cp_comm_type']}: "
                f"choose {able}"
            )
        return thd_sequences(plan)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        sequences: Sequences,
        call: Caller = at_once,
    ) -> torch.Tensor:
        """`q[t, heads, d]`, `k, v[t, groups, d]` of this rank -> `[t, heads, d]`; rows of padding
        are 0 both ways.
        """
        lengths, places = _bounds_on(sequences, q.device)
        longest = int(sequences.padded.max())
        empty = _padding_on(plan, q.device)
        if (
            empty is not None
        ):  # what cuDNN leaves there may be NaN, and 0 x NaN would reach every weight gradient
            q, k, v = (x.index_fill(0, empty, 0.0) for x in (q, k, v))
        attention = functools.partial(
            self.attention,
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=places,
            cu_seqlens_kv_padded=places,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attn_mask_type="padding_causal",
            window_size=window_of(plan.reach.window),
        )
        call = call if self.keeps else at_once
        out = call(lambda q, k, v: attention(query_layer=q, key_layer=k, value_layer=v), q, k, v)
        out = out.view(q.shape)  # [t, heads * d] -> [t, heads, d]
        return out if empty is None else out.index_fill(0, empty, 0.0)
