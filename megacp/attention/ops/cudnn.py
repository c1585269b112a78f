"""The kernel for CUDA where a table is documents under the causal rule: cuDNN's attention, by
Transformer Engine.

A table becomes calls over packed sequences, one of each document. A rank's own keys, or those of
the whole row, are one call under a triangle. Other keys are stairs, as a rank may have several
stretches of a document: the first call has the keys that all of its queries see, the next those
that all but the first stretch see, none under a mask.

    queries of a rank    1 1 1 . . .    keys of others, of one document: call 1 has two stretches of
    queries,
                         1 1 1 2 2 2    call 2 the second of them
                         1 1 1 2 2 2

A row has such calls for all of its documents at once. Another mask, and what Transformer Engine's
own selector refuses, is left to another kernel. Guest packages insert parameters, so arguments go
by keyword.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from megacp.attention.ops.device import to_device
from megacp.attention.ops.kernel import (
    KV,
    QKV,
    Caller,
    Heads,
    Partial,
    Saved,
    WholeKernel,
    at_once,
    merge_into,
)
from megacp.attention.ops.mask import Metadata, TileTable, expand
from megacp.attention.ops.once import once

LEAST_RELEASE = (2, 18)
"""The first whose fused attention takes packed rows (thd) under `all_gather`; under `a2a` 2.10
does, under `a2a+p2p` 2.19, which the selector of 2.18 says itself. 2.18 is also the first FusedAdam
to bear empty tensors.
"""
WIDEST_HEAD = 128
"""Above it cuDNN's backward of packed rows is not right, its selector says nothing: cuDNN 9.19 made
gradients of q, k and v ten million times too large on an H200, of heads of 256.
"""
_ASKING = threading.Lock()
"""A question to the selector changes its logger, and the loader's threads ask too."""

Places = slice | torch.Tensor
"""Tokens of a tensor: a stretch, or int64 indices."""


def engine_problem() -> str | None:
    """Why Transformer Engine cannot be used in this environment; None when it can. Imports it where
    it is installed.
    """
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install --no-build-isolation -e '.[gpu]' beside CUDA torch"
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return (
            f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: "
            f"{error}"
        )
    found = transformer_engine.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST_RELEASE:
        return f"Transformer Engine is {found}, {'.'.join(map(str, LEAST_RELEASE))} is the least"
    return None


def selector_refusal(heads: Heads, **asked: Any) -> str | None:
    """What the selector says against its fused kernel for packed rows of such heads, which it logs
    below the level that is shown; None: it takes it.

    A release that does not know a field does not ask about it.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    asked |= {"num_heads": heads.heads, "num_gqa_groups": heads.groups, "qkv_layout": "thd_thd_thd"}
    asked |= {"head_dim_qk": heads.dim, "head_dim_v": heads.dim, "bottom_right_diagonal": False}
    asked |= {"core_attention_bias_shape": None, "core_attention_bias_requires_grad": False}
    known = {
        name: value
        for name, value in asked.items()
        if name in utils.AttentionParams.__dataclass_fields__
    }
    logger, level, said = (
        logging.getLogger("DotProductAttention"),
        utils.AttentionLogging._log_level,
        [],
    )

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    with _ASKING:
        logger.addFilter(keep)
        utils.AttentionLogging._log_level = (
            logging.DEBUG
        )  # each call of the selector sets the logger's level to it
        try:
            fused = utils.get_attention_backend(utils.AttentionParams(**known))[2]
        finally:
            logger.removeFilter(keep)
            utils.AttentionLogging._log_level = level
    return (
        None
        if fused
        else "; ".join(line for line in said if line.startswith("Disabling FusedAttention"))
    )


@dataclass(frozen=True, eq=False)
class PackedCall:
    """One call: sequence i holds the next `q_lengths[i]` of `queries` and `k_lengths[i]` of `keys`,
    indices of a table's tokens.
    """

    queries: np.ndarray
    keys: np.ndarray
    q_lengths: np.ndarray
    k_lengths: np.ndarray
    causal: bool
    """Whether under a triangle, where queries and keys are the same tokens."""
    window: int = 0
    """The triangle's, as in `Reach`."""

    @property
    def mask(self) -> dict[str, Any]:
        """The mask in Transformer Engine's words; a window is how far to the left, and to the
        right.
        """
        window = (self.window - 1, 0) if self.causal else (-1, -1)
        return {
            "attn_mask_type": "padding_causal" if self.causal else "padding",
            "window_size": window,
        }

    @once
    def on(self, device: torch.device) -> tuple[Places, Places, dict[str, Any]]:
        """Queries, keys, and the bounds of the sequences."""
        options: dict[str, Any] = {}
        for name, lengths in (("q", self.q_lengths), ("kv", self.k_lengths)):
            bounds = to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
            options |= {f"cu_seqlens_{name}": bounds, f"cu_seqlens_{name}_padded": bounds}
            options[f"max_seqlen_{name}"] = int(lengths.max())
        return _rows(self.queries, device), _rows(self.keys, device), options

    def _options(self, qkv: QKV, scale: float) -> dict[str, Any]:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

        rows, keys, bounds = self.on(qkv[0].device)
        q, k, v = (_take(x, where) for x, where in zip(qkv, (rows, keys, keys), strict=True))
        fixed = {
            "fused_attention_backend": FusedAttnBackend["F16_arbitrary_seqlen"],
            "fake_dtype": q.dtype,
        }
        fixed |= {"qkv_layout": "thd_thd_thd", "o_format": "thd", "bottom_right_diagonal": False}
        return {"q": q, "k": k, "v": v, "attn_scale": scale, **fixed, **bounds, **self.mask}

    def forward(self, qkv: QKV, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`out[n, heads, d]`, `lse[n, heads]` of this call's queries."""
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd

        out, (lse, *_) = fused_attn_fwd(is_training=True, **self._options(qkv, scale))
        return out, lse.squeeze(-1)

    def backward(self, saved: Saved, kv: KV, scale: float, deterministic: bool) -> QKV:
        """Gradients of this call's queries and keys; of `saved` the lse is that of its queries
        alone.
        """
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd

        rows = self.on(saved.q.device)[0]
        state = torch.zeros(
            2, dtype=torch.int64, device=saved.q.device
        )  # of dropout, of which there is none
        dq, dk, dv, *_ = fused_attn_bwd(
            o=_take(saved.out, rows),
            d_o=_take(saved.dout, rows),
            aux_ctx_tensors=[saved.lse.contiguous().unsqueeze(-1), state],
            do_format="thd",
            dqkv_layout="thd_thd_thd",
            deterministic=deterministic,
            **self._options((saved.q, *kv), scale),
        )
        return dq, dk, dv


def _rows(indices: np.ndarray, device: torch.device) -> Places:
    stretch = (np.diff(indices) == 1).all()
    return slice(int(indices[0]), int(indices[-1]) + 1) if stretch else to_device(indices, device)


def _take(x: torch.Tensor, rows: Places) -> torch.Tensor:
    """The tokens in one block, as cuDNN reads them."""
    return x[rows].contiguous()


def _spread(x: torch.Tensor, rows: Places, tokens: int) -> torch.Tensor:
    """The rows of `tokens`, of which the others are 0."""
    if len(x) == tokens and isinstance(rows, slice):
        return x
    whole = x.new_zeros((tokens, *x.shape[1:]))
    whole[rows] = x
    return whole


def _documents(tokens: Metadata) -> np.ndarray:
    """Indices of tokens, document by document and in their order; padding left out."""
    order = np.lexsort((tokens.order, tokens.leave))
    return order[tokens.leave[order] > 0]


@once
def packed_calls(table: TileTable) -> list[PackedCall] | None:
    """The calls of one pass over a table, which compute every allowed pair once; None where its
    mask is another.
    """
    queries, keys = _documents(table.q), _documents(table.k)
    q, k, window = table.q.take(queries), table.k.take(keys), table.reach.window
    if table.num_tiles == 0:
        return []
    if np.array_equal(q.order, k.order):
        lengths = np.unique(q.leave, return_counts=True)[1]
        calls = [PackedCall(queries, keys, lengths, lengths, True, window)]
        far = (
            np.maximum(0, lengths - window) if window else 0 * lengths
        )  # queries that do not see the first key
        area = int((lengths * (lengths + 1) - far * (far + 1)).sum()) // 2
        window = (
            window if (np.diff(q.order)[np.diff(q.leave) == 0] > 1).any() else 0
        )  # counted in the tokens at hand
    else:
        calls = _stairs(table, queries, keys)
        area = sum(int((call.q_lengths * call.k_lengths).sum()) for call in calls)
    # keys up to the query of the same document are allowed, chunks and windows aside: as many pairs
    # are all pairs
    return None if table.reach.chunk or window or area != table.area else calls


def _stairs(table: TileTable, queries: np.ndarray, keys: np.ndarray) -> list[PackedCall]:
    """The calls for keys that are none of the queries' own tokens; step i of every document is in
    call i.
    """
    q, k = table.q.take(queries), table.k.take(keys)
    wide = 1 + max(
        q.order.max(initial=0), k.order.max(initial=0)
    )  # all documents on one line, each in its own part
    line = k.leave * wide + k.order
    first = np.searchsorted(line, q.leave * wide)  # [queries]: the first key of the document
    seen = np.searchsorted(line, q.leave * wide + q.order, side="right") - first
    steps = np.flatnonzero((np.diff(q.leave, prepend=-1) != 0) | (np.diff(seen, prepend=-1) != 0))
    steps = steps[seen[steps] > 0]  # queries at which a step begins: all from there on see its keys
    follows = np.diff(q.leave[steps], prepend=-1) == 0
    number = np.arange(len(steps))
    number -= np.maximum.accumulate(np.where(follows, 0, number))
    begin = first[steps] + np.where(follows, np.roll(seen[steps], 1), 0)
    stop, end = np.searchsorted(q.leave, q.leave[steps], side="right"), first[steps] + seen[steps]
    calls = []
    for i in range(number.max(initial=-1) + 1):
        those = number == i
        some = (
            queries[expand(steps[those], stop[those])[0]],
            keys[expand(begin[those], end[those])[0]],
        )
        calls.append(PackedCall(*some, (stop - steps)[those], (end - begin)[those], False))
    return calls


@once
def fused_calls(table: TileTable, heads: Heads, deterministic: bool) -> list[PackedCall] | str:
    """`packed_calls`, or why cuDNN cannot be called."""
    from transformer_engine.pytorch.utils import get_device_compute_capability

    if heads.dim > WIDEST_HEAD:
        return (
            f"cuDNN's gradients of heads wider than {WIDEST_HEAD} are wrong, these are "
            f"{heads.dim} wide"
        )
    if get_device_compute_capability() == (12, 0):
        return "cuDNN gives log-sum-exps in another form on this GPU"
    calls = packed_calls(table)
    if calls is None:
        return "their mask is more than documents under the causal rule"
    for call in calls:
        refusal = selector_refusal(
            heads,
            qkv_dtype=torch.bfloat16,
            batch_size=len(call.q_lengths),
            max_seqlen_q=int(call.q_lengths.max()),
            max_seqlen_kv=int(call.k_lengths.max()),
            num_tokens_q=len(call.queries),
            num_tokens_kv=len(call.keys),
            deterministic=deterministic,
            softmax_scale=heads.dim**-0.5,
            **call.mask,
        )
        if refusal is not None:
            return f"Transformer Engine has no kernel for them: {refusal}"
    return calls


class CudnnKernel:
    """A `WholeKernel` for bfloat16, which leaves tables of another mask to `other` and tells once
    that it does.
    """

    def __init__(self, other: WholeKernel, tell: Callable[[str], None]) -> None:
        from transformer_engine.pytorch import DotProductAttention

        self._other, self._tell = other, tell
        # what the package's own attention makes of torch's setting and of its own variable
        self.deterministic = DotProductAttention(num_attention_heads=1, kv_channels=8).deterministic

    def _calls(self, table: TileTable, heads: Heads) -> list[PackedCall] | None:
        calls = fused_calls(table, heads, self.deterministic)
        if isinstance(calls, str):
            self._tell(f"attention: FlexAttention for some rows, {calls}")
            return None
        self._tell("attention: cuDNN's for documents under the causal rule")
        return calls

    def prepare(self, table: TileTable, heads: Heads) -> None:
        if isinstance(fused_calls(table, heads, self.deterministic), str):
            self._other.prepare(table, heads)

    def whole(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: TileTable,
        scale: float,
        call: Caller = at_once,
    ) -> torch.Tensor:
        calls = self._calls(table, Heads(q.shape[1], *k.shape[1:]))
        if not calls:  # a row of padding has none
            return self._other.whole(q, k, v, table, scale, call)
        return call(lambda *qkv: _Whole.apply(*qkv, calls[0], scale, self.deterministic), q, k, v)

    @torch.no_grad()
    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        calls = self._calls(table, Heads(qkv[0].shape[1], *qkv[1].shape[1:]))
        if calls is None:
            return self._other.attend(partial, qkv, table, scale)
        for call in calls:
            out, lse = call.forward(qkv, scale)
            rows = call.on(out.device)[0]
            mine = partial.out[rows], partial.lse[rows]  # of a stretch views, else copies
            if partial.untouched:
                mine[0].copy_(out)
                mine[1].copy_(lse)
            else:
                merge_into(*mine, out, lse)
            if not isinstance(rows, slice):
                partial.out[rows], partial.lse[rows] = mine
            partial.untouched = False

    @torch.no_grad()
    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        calls = self._calls(table, Heads(saved.q.shape[1], *kv[0].shape[1:]))
        if calls is None:
            return self._other.attend_backward(saved, kv, table, scale, grads)
        for call in calls:
            rows, keys, _ = call.on(saved.q.device)
            of_call = Saved(saved.q, saved.out, saved.lse[rows], saved.dout)
            parts = call.backward(of_call, kv, scale, self.deterministic)
            for total, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                if isinstance(where, slice):
                    total[where].add_(part)
                else:
                    total.index_add_(0, where, part.to(total.dtype))


class _Whole(torch.autograd.Function):
    """The one call of a whole row; q, k and v are saved as they came."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: PackedCall,
        scale: float,
        deterministic: bool,
    ) -> torch.Tensor:
        out, lse = call.forward((q, k, v), scale)
        out = _spread(out, call.on(q.device)[0], len(q))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.scale, ctx.deterministic = call, scale, deterministic
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = ctx.call.backward(Saved(q, out, lse, dout), (k, v), ctx.scale, ctx.deterministic)
        rows, keys, _ = ctx.call.on(q.device)
        whole = (
            _spread(x, where, len(q)) for x, where in zip(grads, (rows, keys, keys), strict=True)
        )
        return *whole, None, None, None
