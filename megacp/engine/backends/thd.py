"""Conversion of a row of packed documents to Transformer Engine's packed format (thd).

The format requires cumulative lengths, with and without padding, and a certain order of tokens. It
pads each sequence to a multiple of 2 cp and splits every sequence separately: rank r has slices r
and 2 cp - 1 - r of each sequence. The plan, which is the same on every rank, determines whether a
row has this order. If not, the functions return the reason.
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
    """Sequences of a row.

    The int32 lengths are `true[n]` without padding and `padded[n]` with padding. Sequence i
    occupies `padded[i]` places of the row.
    """

    true: np.ndarray
    padded: np.ndarray

    @functools.cached_property
    def cu_lengths(self) -> np.ndarray:
        """Cumulative lengths without padding (`cu_seqlens`): int32 `[n + 1]`."""
        return np.concatenate([[0], np.cumsum(self.true)]).astype(np.int32)

    @functools.cached_property
    def cu_padded(self) -> np.ndarray:
        """Cumulative lengths with padding (`cu_seqlens_padded`): int32 `[n + 1]`."""
        return np.concatenate([[0], np.cumsum(self.padded)]).astype(np.int32)

    def order(self, cp: int) -> np.ndarray:
        """Return the places of each rank, `[cp, t]`, in Transformer Engine's order."""
        if cp == 1:
            return np.arange(self.cu_padded[-1])[None]
        ranks: list[list[np.ndarray]] = [[] for _ in range(cp)]
        starts = self.cu_padded[:-1].tolist()
        stops = self.cu_padded[1:].tolist()
        for start, stop in zip(starts, stops, strict=True):
            # split each sequence into 2 cp slices; a rank gets two of them
            slices = np.arange(start, stop).reshape(2 * cp, -1)
            for rank in range(cp):
                own = list(zigzag_slices(cp, rank))
                ranks[rank].append(slices[own].reshape(-1))
        return np.stack([np.concatenate(parts) for parts in ranks])

    def tokens(self, first: np.ndarray) -> np.ndarray:
        """Return the row index of the token at each place; -1 for padding.

        The tokens of sequence i begin at row index `first[i]`.
        """
        # position of each place within its sequence
        inside = np.arange(self.cu_padded[-1]) - np.repeat(self.cu_padded[:-1], self.padded)
        token = np.repeat(first, self.padded) + inside
        return np.where(inside < np.repeat(self.true, self.padded), token, -1)


def mask_reason(metadata: Metadata, reach: Reach) -> str | None:
    """Return why Transformer Engine does not support a row's mask; None if it does."""
    start, stop = document_bounds(metadata)
    found = []
    if metadata.span[metadata.leave > 0].any():
        found.append("image spans")
    # without branches, a token is visible until the end of its document
    if (metadata.leave[metadata.leave > 0] != np.repeat(stop, stop - start)).any():
        found.append("branches")
    if reach.chunk:
        found.append("chunks")
    if not found:
        return None
    return f"the row's mask has {' and '.join(found)}, which Transformer Engine does not support"


def _per_document(metadata: Metadata, cp: int) -> tuple[Sequences, np.ndarray]:
    """Return one separately padded sequence per document, and the row index of its first token.

    The rest of the row is a sequence without tokens.
    """
    start, stop = document_bounds(metadata)
    true = stop - start
    padded = -(-true // (2 * cp)) * 2 * cp  # [documents], rounded up to a multiple of 2 cp
    rest = len(metadata) - int(padded.sum())
    if rest > 0:  # if it is negative, the row was padded for another layout
        start = np.append(start, 0)
        true = np.append(true, 0)
        padded = np.append(padded, rest)
    return Sequences(true.astype(np.int32), padded.astype(np.int32)), start


def _whole_row(metadata: Metadata, cp: int) -> tuple[Sequences, np.ndarray]:
    """Return a single sequence for the row, whose tokens must precede all padding."""
    true = int((metadata.leave > 0).sum())
    sequences = Sequences(np.array([true], np.int32), np.array([len(metadata)], np.int32))
    return sequences, np.zeros(1, np.int64)


def _as_it_stands(metadata: Metadata, cp: int) -> tuple[Sequences, np.ndarray]:
    """Return one sequence per document, including the padding after it; only for one rank.

    Padding before the first document is a sequence without tokens.
    """
    start, stop = document_bounds(metadata)
    true = stop - start
    edges = np.append(start, len(metadata))
    if start[0] > 0:
        true = np.append(0, true)
        edges = np.append(0, edges)
        start = np.append(0, start)
    return Sequences(true.astype(np.int32), np.diff(edges).astype(np.int32)), start


@once
def thd_sequences(plan: AttentionPlan) -> Sequences | str:
    """Return the row as sequences for Transformer Engine, or the reason why that is impossible.

    All ranks of the group get the same result.
    """
    metadata = plan.metadata
    cp = plan.cp
    reason = mask_reason(metadata, plan.reach)
    if reason:
        return reason
    start, _ = document_bounds(metadata)
    if not len(start):
        return "the row contains only padding"
    # try the possible ways to divide the row into sequences
    if cp == 1:
        ways = [_as_it_stands]
    else:
        ways = [_per_document]
        if len(start) == 1 and start[0] == 0:
            ways.append(_whole_row)
    for way in ways:
        sequences, first = way(metadata, cp)
        if sequences.cu_padded[-1] != len(metadata):
            continue
        if cp > 1 and (sequences.padded % (2 * cp)).any():
            continue
        # compare the plan's order of tokens with Transformer Engine's
        expected = sequences.tokens(first)[sequences.order(cp)]  # [T] -> [cp, t]
        held = np.where(metadata.leave[plan.indices] > 0, plan.indices, -1)
        if np.array_equal(held, expected):
            return sequences
    return (
        "the tokens are not in the order that Transformer Engine expects, which is a zigzag within "
        "each document (--cp-layout zigzag_document)"
    )


@once
def _bounds_on(sequences: Sequences, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row's cumulative lengths without and with padding, on the device.

    If they are equal, return the same tensor twice, because Transformer Engine checks for identity.
    """
    padded = to_device(sequences.cu_padded, device)
    equal = (sequences.true == sequences.padded).all()
    return padded if equal else to_device(sequences.cu_lengths, device), padded


@once
def _padding_on(plan: AttentionPlan, device: torch.device) -> torch.Tensor | None:
    """Return the indices of this rank's padding rows, on the device; None without padding."""
    # computed on the host, so that the host need not wait for the device
    rows = np.flatnonzero(plan.metadata.leave[plan.local] == 0)
    return to_device(rows, device) if len(rows) else None


def window_of(tokens: int) -> tuple[int, int]:
    """Return a window's (left, right) extent for Transformer Engine; 0 tokens mean no window."""
    return tokens - 1, 0


class PackedAttention:
    """Transformer Engine's attention for all layers, with scores multiplied by `scale`.

    `comm_type` and `inner` (number of ranks in the all-to-all of a2a+p2p) only matter for two or
    more ranks. With a2a+p2p, construction is collective because it creates process groups.
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
        """Minimum padded length of a sequence; all padded lengths are multiples of it."""
        self.cp: dict[str, Any] = {"context_parallel": cp.size > 1, "cp_size": cp.size}
        """Arguments about context parallelism for the kernel selector."""
        row = TRANSPORTS[comm_type]
        engine = row.engine
        assert engine is not None, f"Transformer Engine has no transport for {comm_type}"
        self.windows = cp.size == 1 or engine.windows
        """Whether layers may have a sliding window."""
        self.keeps = cp.size == 1 or engine.saves_own_tokens
        """Whether the tensors saved for the backward pass cover only this rank's tokens.

        With a2a, they cover some heads of all tokens, which are larger than the result.
        """
        if cp.size == 1:
            return
        groups: Any = cp.group
        name = engine.name
        heads_over = 1  # number of ranks that share the heads
        if row.needs_sizes:
            # a2a+p2p: all-to-all within groups, a ring between them; groups of one rank need
            # another name
            inside, between = split_axis(cp, inner)
            if inside.group is None:
                name = engine.groups_of_one
            elif between.group is None:
                name = engine.one_group
            else:
                groups = [inside.group, between.group]
                heads_over = inner
        self.cp |= {"cp_comm_type": name, "cp_size_a2a": heads_over}
        # set the ranks and the transport for keys and values
        self.attention.set_context_parallel_group(
            cp_group=groups,
            cp_global_ranks=list(cp.global_ranks),
            cp_stream=torch.cuda.Stream(device=device),
            cp_comm_type=name,
        )

    def sequences(self, plan: AttentionPlan) -> Sequences | str:
        """Return `thd_sequences` for a plan, or the reason why its window is not supported."""
        if plan.reach.window and not self.windows:
            able = []
            for row in TRANSPORTS.values():
                if row.engine is not None and row.engine.windows:
                    able.append(row.name)
            return (
                f"Transformer Engine has no sliding window with {self.cp['cp_comm_type']}: "
                f"use --cp-comm-type {' or '.join(able)}"
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
        """Return the attention output `[t, heads, d]` for this rank's `q[t, heads, d]`.

        `k` and `v` are `[t, groups, d]`. Padding rows of outputs and gradients are 0.
        """
        # copies to the device are cached, so all layers of a row share them
        lengths, places = _bounds_on(sequences, q.device)
        longest = int(sequences.padded.max())
        empty = _padding_on(plan, q.device)
        if empty is not None:
            # cuDNN may leave NaN in padding, and 0 x NaN would spread to every weight gradient
            q, k, v = (x.index_fill(0, empty, 0.0) for x in (q, k, v))
        # self-attention: queries and keys have the same lengths
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
        # with a2a, the saved tensors are too large to keep during recomputation
        call = call if self.keeps else at_once
        out = call(lambda q, k, v: attention(query_layer=q, key_layer=k, value_layer=v), q, k, v)
        out = out.view(q.shape)  # [t, heads * d] -> [t, heads, d]
        return out if empty is None else out.index_fill(0, empty, 0.0)
