"""The CUDA kernel for documents with a causal mask: cuDNN's attention via Transformer Engine.

A table is converted into calls on packed sequences, with one sequence per document. A rank's own
keys, or the keys of the whole row, need a single causal call. Keys of other ranks form stairs,
because a rank may have several stretches of a document. All queries attend to the keys of the first
call, all queries except the first stretch attend to the keys of the second call, and so on. None of
the calls for stairs needs a mask.

    queries of a rank    1 1 1 . . .    keys of other ranks, for one document:
                         1 1 1 2 2 2    call 1 has all queries,
                         1 1 1 2 2 2    call 2 only the second stretch

Each call contains all documents of a row. Tables with another mask, and calls that Transformer
Engine's selector rejects, are passed to another kernel. New releases of Transformer Engine insert
parameters, so all arguments are passed by keyword.
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
"""Oldest supported release of Transformer Engine. Since 2.18, fused attention accepts packed rows
(thd) with `all_gather`, and FusedAdam accepts empty tensors. `a2a` would already work with 2.10;
`a2a+p2p` needs 2.19, as the selector of 2.18 itself reports.
"""
WIDEST_HEAD = 128
"""Widest head with correct gradients. For wider heads, cuDNN's backward pass on packed rows is
wrong, and the selector does not report it. With a head width of 256, cuDNN 9.19 on an H200 returned
gradients of q, k and v that were ten million times too large.
"""
_ASKING = threading.Lock()
"""Lock for queries of the selector, which change its logger; loader threads query it too."""

Places = slice | torch.Tensor
"""Tokens of a tensor: a contiguous slice, or int64 indices."""


def engine_problem() -> str | None:
    """Return the reason why Transformer Engine cannot be used here, or None.

    Imports Transformer Engine if it is installed.
    """
    if find_spec("transformer_engine") is None:
        return (
            "Transformer Engine is not installed: with a CUDA build of torch, run "
            "pip install --no-build-isolation -e '.[gpu]'"
        )
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return (
            f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: "
            f"{error}"
        )
    found = transformer_engine.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST_RELEASE:
        least = ".".join(map(str, LEAST_RELEASE))
        return f"Transformer Engine {found} is installed, but {least} or newer is required"
    return None


def selector_refusal(heads: Heads, **asked: Any) -> str | None:
    """Return why the selector rejects its fused kernel for packed rows with these heads, or None.

    The selector logs its reason below the visible level, so a log filter collects it. `asked` sets
    further fields of `AttentionParams`; fields missing in the installed release are left out.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    # the query describes one call completely; the selector's answer depends on all fields
    asked |= {"num_heads": heads.heads, "num_gqa_groups": heads.groups, "qkv_layout": "thd_thd_thd"}
    asked |= {"head_dim_qk": heads.dim, "head_dim_v": heads.dim, "bottom_right_diagonal": False}
    asked |= {"core_attention_bias_shape": None, "core_attention_bias_requires_grad": False}
    fields = utils.AttentionParams.__dataclass_fields__
    known = {name: value for name, value in asked.items() if name in fields}
    logger = logging.getLogger("DotProductAttention")
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    level = utils.AttentionLogging._log_level
    with _ASKING:
        logger.addFilter(keep)
        # every call of the selector sets the logger to this level
        utils.AttentionLogging._log_level = logging.DEBUG
        try:
            fused = utils.get_attention_backend(utils.AttentionParams(**known))[2]
        finally:
            logger.removeFilter(keep)
            utils.AttentionLogging._log_level = level
    if fused:
        return None
    return "; ".join(line for line in messages if line.startswith("Disabling FusedAttention"))


@dataclass(frozen=True, eq=False)
class PackedCall:
    """One call on packed sequences.

    `queries` and `keys` index a table's tokens. Sequence i consists of the next `q_lengths[i]`
    queries and the next `k_lengths[i]` keys.
    """

    queries: np.ndarray
    keys: np.ndarray
    q_lengths: np.ndarray
    k_lengths: np.ndarray
    causal: bool
    """Whether the mask is causal; queries and keys are then the same tokens."""
    window: int = 0
    """Window of a causal mask, as in `Reach`."""

    @property
    def mask(self) -> dict[str, Any]:
        """The mask as arguments of Transformer Engine; a window is (tokens left, tokens right)."""
        window = (self.window - 1, 0) if self.causal else (-1, -1)
        return {
            "attn_mask_type": "padding_causal" if self.causal else "padding",
            "window_size": window,
        }

    @once
    def on(self, device: torch.device) -> tuple[Places, Places, dict[str, Any]]:
        """Return queries, keys, and the arguments with sequence bounds, on the device."""
        options: dict[str, Any] = {}
        for name, lengths in (("q", self.q_lengths), ("kv", self.k_lengths)):
            ends = np.concatenate([[0], np.cumsum(lengths)])
            bounds = to_device(ends.astype(np.int32), device)
            options |= {f"cu_seqlens_{name}": bounds, f"cu_seqlens_{name}_padded": bounds}
            options[f"max_seqlen_{name}"] = int(lengths.max())
        return _rows(self.queries, device), _rows(self.keys, device), options

    def _options(self, qkv: QKV, scale: float) -> dict[str, Any]:
        """Return the arguments shared by the forward and the backward pass."""
        from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

        rows, keys, bounds = self.on(qkv[0].device)
        # queries and keys are copied only if their rows are not contiguous
        q, k, v = (_take(x, where) for x, where in zip(qkv, (rows, keys, keys), strict=True))
        fixed = {
            "fused_attention_backend": FusedAttnBackend["F16_arbitrary_seqlen"],
            "fake_dtype": q.dtype,
        }
        fixed |= {"qkv_layout": "thd_thd_thd", "o_format": "thd", "bottom_right_diagonal": False}
        return {"q": q, "k": k, "v": v, "attn_scale": scale, **fixed, **bounds, **self.mask}

    def forward(self, qkv: QKV, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `out[n, heads, d]` and `lse[n, heads]` for this call's queries."""
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd

        # the log-sum-exp comes first among the auxiliary tensors
        out, (lse, *_) = fused_attn_fwd(is_training=True, **self._options(qkv, scale))
        return out, lse.squeeze(-1)

    def backward(self, saved: Saved, kv: KV, scale: float, deterministic: bool) -> QKV:
        """Return the gradients of this call's queries and keys.

        `saved.lse` contains only this call's queries; the other saved tensors contain all tokens.
        """
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd

        rows = self.on(saved.q.device)[0]
        # state of the dropout generator, which is unused
        state = torch.zeros(2, dtype=torch.int64, device=saved.q.device)
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
    """Return a slice if the indices are contiguous, otherwise the indices on the device."""
    if (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return to_device(indices, device)


def _take(x: torch.Tensor, rows: Places) -> torch.Tensor:
    """Return the tokens as a contiguous tensor, as cuDNN requires."""
    return x[rows].contiguous()


def _spread(x: torch.Tensor, rows: Places, tokens: int) -> torch.Tensor:
    """Return a tensor of `tokens` rows with `x` at `rows` and 0 elsewhere."""
    if len(x) == tokens and isinstance(rows, slice):
        return x
    whole = x.new_zeros((tokens, *x.shape[1:]))
    whole[rows] = x
    return whole


def _documents(tokens: Metadata) -> np.ndarray:
    """Return token indices sorted by document, in order within a document, without padding."""
    order = np.lexsort((tokens.order, tokens.leave))
    return order[tokens.leave[order] > 0]


@once
def packed_calls(table: TileTable) -> list[PackedCall] | None:
    """Return the calls for one pass over a table, or None if its mask is not causal per document.

    Together, the calls compute every allowed pair exactly once.
    """
    if table.num_tiles == 0:
        return []
    queries = _documents(table.q)
    keys = _documents(table.k)
    q = table.q.take(queries)
    k = table.k.take(keys)
    window = table.reach.window
    if np.array_equal(q.order, k.order):
        lengths = np.unique(q.leave, return_counts=True)[1]  # [documents]
        calls = [PackedCall(queries, keys, lengths, lengths, True, window)]
        # number of queries per document that do not attend to the first key
        far = np.maximum(0, lengths - window) if window else 0 * lengths
        area = int((lengths * (lengths + 1) - far * (far + 1)).sum()) // 2
        # the call counts its window in local tokens, which is wrong if a document has gaps here
        gaps = np.diff(q.order)[np.diff(q.leave) == 0] > 1
        unsupported = bool(window) and gaps.any()
    else:
        calls = _stairs(table, queries, keys)
        area = sum(int((call.q_lengths * call.k_lengths).sum()) for call in calls)
        unsupported = bool(window)
    # the calls contain only pairs that a causal mask per document allows, apart from chunks and
    # windows; if their number equals the table's, the masks are equal
    if table.reach.chunk or unsupported or area != table.area:
        return None
    return calls


def _stairs(table: TileTable, queries: np.ndarray, keys: np.ndarray) -> list[PackedCall]:
    """Return the calls for keys of other ranks; call i contains step i of every document."""
    q = table.q.take(queries)
    k = table.k.take(keys)
    # place all documents on one line, each in a separate range
    wide = 1 + max(q.order.max(initial=0), k.order.max(initial=0))
    line = k.leave * wide + k.order
    first = np.searchsorted(line, q.leave * wide)  # [queries], first key of the document
    seen = np.searchsorted(line, q.leave * wide + q.order, side="right") - first
    # queries at which a step begins: this query and all later ones attend to the step's keys
    new_document = np.diff(q.leave, prepend=-1) != 0
    more_keys = np.diff(seen, prepend=-1) != 0
    steps = np.flatnonzero(new_document | more_keys)
    steps = steps[seen[steps] > 0]
    # number of each step within its document
    follows = np.diff(q.leave[steps], prepend=-1) == 0
    number = np.arange(len(steps))
    number -= np.maximum.accumulate(np.where(follows, 0, number))
    # a step has queries [steps, stop) and the keys [begin, end) that the previous step lacks
    stop = np.searchsorted(q.leave, q.leave[steps], side="right")
    begin = first[steps] + np.where(follows, np.roll(seen[steps], 1), 0)
    end = first[steps] + seen[steps]
    calls = []
    for i in range(number.max(initial=-1) + 1):
        chosen = number == i
        call_queries = queries[expand(steps[chosen], stop[chosen])[0]]
        call_keys = keys[expand(begin[chosen], end[chosen])[0]]
        q_lengths = (stop - steps)[chosen]
        k_lengths = (end - begin)[chosen]
        calls.append(PackedCall(call_queries, call_keys, q_lengths, k_lengths, False))
    return calls


@once
def fused_calls(table: TileTable, heads: Heads, deterministic: bool) -> list[PackedCall] | str:
    """Return `packed_calls`, or the reason why cuDNN cannot compute them."""
    from transformer_engine.pytorch.utils import get_device_compute_capability

    if heads.dim > WIDEST_HEAD:
        return (
            f"cuDNN computes wrong gradients for heads wider than {WIDEST_HEAD}, and these are "
            f"{heads.dim} wide"
        )
    if get_device_compute_capability() == (12, 0):
        return "cuDNN returns log-sum-exps in a different form on this GPU"
    calls = packed_calls(table)
    if calls is None:
        return "their mask is not causal per document"
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
    """A `WholeKernel` for bfloat16.

    Tables with an unsupported mask are passed to `other`. `tell` logs which kernel is used.
    """

    def __init__(self, other: WholeKernel, tell: Callable[[str], None]) -> None:
        from transformer_engine.pytorch import DotProductAttention

        self._other = other
        self._tell = tell
        # the package's own attention combines torch's setting and an environment variable
        self.deterministic = DotProductAttention(num_attention_heads=1, kv_channels=8).deterministic

    def _calls(self, table: TileTable, heads: Heads) -> list[PackedCall] | None:
        """Return the calls for a table, or None for the other kernel; log the decision."""
        calls = fused_calls(table, heads, self.deterministic)
        if isinstance(calls, str):
            self._tell(f"attention: using FlexAttention for some rows, because {calls}")
            return None
        self._tell("attention: using cuDNN for documents with a causal mask")
        return calls

    def prepare(self, table: TileTable, heads: Heads) -> None:
        """Find the calls of the table, or prepare the other kernel; see `Kernel.prepare`."""
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
        """Attend to all keys of a row; see `WholeKernel.whole`."""
        calls = self._calls(table, Heads(q.shape[1], *k.shape[1:]))
        if not calls:  # unsupported, or a row of only padding
            return self._other.whole(q, k, v, table, scale, call)
        return call(lambda *qkv: _Whole.apply(*qkv, calls[0], scale, self.deterministic), q, k, v)

    @torch.no_grad()
    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge one source of keys into `partial`; see `Kernel.attend`."""
        calls = self._calls(table, Heads(qkv[0].shape[1], *qkv[1].shape[1:]))
        if calls is None:
            return self._other.attend(partial, qkv, table, scale)
        for call in calls:
            out, lse = call.forward(qkv, scale)
            rows = call.on(out.device)[0]
            # views for a slice, copies for indices
            out_rows = partial.out[rows]
            lse_rows = partial.lse[rows]
            if partial.untouched:
                out_rows.copy_(out)
                lse_rows.copy_(lse)
            else:
                merge_into(out_rows, lse_rows, out, lse)
            if not isinstance(rows, slice):
                partial.out[rows] = out_rows
                partial.lse[rows] = lse_rows
            partial.untouched = False

    @torch.no_grad()
    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        """Add the gradients of one source of keys; see `Kernel.attend_backward`."""
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
    """The single call for a whole row; saves q, k and v unchanged."""

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
        ctx.call = call
        ctx.scale = scale
        ctx.deterministic = deterministic
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = ctx.call.backward(Saved(q, out, lse, dout), (k, v), ctx.scale, ctx.deterministic)
        rows, keys, _ = ctx.call.on(q.device)
        spread = (_spread(x, at, len(q)) for x, at in zip(grads, (rows, keys, keys), strict=True))
        return *spread, None, None, None
