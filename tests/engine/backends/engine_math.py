"""Reference math for Transformer Engine's cuDNN calls and its CUDA functions for packed sequences.

Each function loops over the sequences and gives the results of the CUDA code. Rows without a token
are NaN, because the real kernels guarantee nothing about them. 16-bit values are computed in
float64 and rounded where the real code writes them; log-sum-exps are float32.

The assertions check the requirements and assumptions of the C++ code for its arguments:
`csrc/extensions/attention.cpp` and `common/fused_attn/context_parallel.cu` of Transformer Engine.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megacp.engine.backends.transformer_engine import package_problem
from tests.engine.backends.engine_stub import NEWEST, claimed_cuda, engine

CONTEXT_PARALLEL = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention.backends"
FUSED = "transformer_engine.pytorch.cpp_extensions.fused_attn"
UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
EXTENSION = "transformer_engine_torch"


Mask = tuple[str, int]
"""Type of a mask, and the number of keys to the left that a query attends to; negative for all
keys.
"""


def stats(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exps for `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def demand_lengths(*places: torch.Tensor) -> None:
    """Require cumulative lengths to be int32 `[n + 1]` and contiguous, as the code reads their
    pointer.
    """
    for each in places:
        assert (
            each.dtype == torch.int32
            and each.dim() == 1
            and len(each) >= 2
            and each.is_contiguous()
        ), each


def demand_tokens(x: torch.Tensor, tokens: int) -> None:
    """Require `[tokens, heads, d]` that can be read through its pointer in units of 16 bytes."""
    assert x.dim() == 3 and len(x) == tokens and x.is_contiguous(), (x.shape, x.stride())
    assert x.shape[1] * x.shape[2] * x.element_size() % 16 == 0, x.shape


def visible(queries: int, keys: int, mask: Mask) -> torch.Tensor:
    """Return the mask, bool `[queries, keys]`.

    Causal masks are aligned at the top left or at the bottom right; a padding mask allows
    everything. A window extends this number of keys to the left of the diagonal.
    """
    kind, left = mask
    if "causal" not in kind:
        return torch.ones(queries, keys, dtype=torch.bool)
    back = (
        torch.arange(queries)[:, None]
        + (keys - queries if "bottom_right" in kind else 0)
        - torch.arange(keys)[None]
    )
    return (back >= 0) & ((back <= left) | (left < 0))


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: Mask) -> torch.Tensor:
    """Return the scores `[heads, n, m]` of `q[n, heads, d]` and `k[m, groups, d]`, -inf for masked
    pairs.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return found.masked_fill(~visible(q.shape[0], k.shape[0], mask), -torch.inf)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
) -> tuple[torch.Tensor, ...]:
    """Return `out[n, heads, d]` and `lse[n, heads]` of one sequence.

    Rows without a visible key get 0 and -inf.
    """
    s = scores(q, k, scale, mask)
    lse = torch.logsumexp(s, -1)  # [heads, n]
    weights = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum(
        "hnm,mhd->nhd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    ), lse.t()


def attend_backward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    mask: Mask,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of one sequence from the merged `out[n, heads, d]` and `lse[n, heads]`."""
    q, k, v = qkv
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    weights = torch.exp(scores(q, k, scale, mask) - lse.t()[..., None])
    d_weights = torch.einsum("nhd,mhd->hnm", dout, wide_v)
    inner = (dout * out).sum(-1).t()[..., None]
    d_scores = weights * (d_weights - inner) * scale
    dq = torch.einsum("hnm,mhd->nhd", d_scores, wide_k)
    dk, dv = torch.einsum("hnm,nhd->mhd", d_scores, q), torch.einsum("hnm,nhd->mhd", weights, dout)
    return dq, *(x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))


def spans_of(lengths: torch.Tensor, places: torch.Tensor) -> list[slice]:
    """Return the ranges of tokens without padding, one per sequence."""
    return [
        slice(start, start + n)
        for start, n in zip(places[:-1].tolist(), lengths.diff().tolist(), strict=True)
    ]


Call = dict[str, Any]
"""Arguments of a cuDNN call by the names of its real signature, including defaults."""


def named(function: Callable[..., Any], stand_in: Callable[[Call], Any]) -> Callable[..., Any]:
    """Return a replacement that accepts the arguments of `function` in any form."""
    signature = inspect.signature(function)

    def call(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return stand_in(bound.arguments)

    return call


def _bounds(call: Call) -> tuple[torch.Tensor, ...]:
    q, kv = call["cu_seqlens_q"], call["cu_seqlens_kv"]
    q_places, kv_places = call["cu_seqlens_q_padded"], call["cu_seqlens_kv_padded"]
    return q, kv, q if q_places is None else q_places, kv if kv_places is None else kv_places


def _sequences(call: Call) -> list[tuple[slice, slice]]:
    """Return the rows of queries and of keys of each sequence."""
    assert call["qkv_layout"] == "thd_thd_thd", call["qkv_layout"]  # each tensor is contiguous
    q_lengths, kv_lengths, q_places, kv_places = _bounds(call)
    demand_lengths(q_lengths, kv_lengths, q_places, kv_places)
    assert all(len(x) == len(q_lengths) for x in (kv_lengths, q_places, kv_places))
    assert {x.dtype for x in (call[name] for name in "qkv")} in ({torch.bfloat16}, {torch.float64})
    for name in "qkv":
        demand_tokens(call[name], len(call["q"]) if name == "q" else len(call["k"]))
    return list(zip(spans_of(q_lengths, q_places), spans_of(kv_lengths, kv_places), strict=True))


def fused_attn_fwd(call: Call) -> tuple[Any, ...]:
    """Replace cuDNN's forward: return the output and `[log-sum-exp, state of dropout]`."""
    mask, scale = (call["attn_mask_type"], call["window_size"][0]), call["attn_scale"]
    q, k, v = (call[name].double() for name in "qkv")
    for name in ("q", "kv"):
        assert call[f"max_seqlen_{name}"] >= int(call[f"cu_seqlens_{name}"].diff().max())
    out = torch.full_like(call["q"], torch.nan)
    lse = out.new_full((*q.shape[:2], 1), torch.nan, dtype=stats(out))  # [t, heads, 1]
    for mine, theirs in _sequences(call):
        out[mine], part_lse = attend(q[mine], k[theirs], v[theirs], scale, mask)
        lse[mine] = part_lse[..., None]
    return out, [lse, torch.zeros(2)]


def fused_attn_bwd(call: Call) -> tuple[Any, ...]:
    """Replace cuDNN's backward.

    Keys without a query get 0, because the caller adds up the gradients of several steps.
    """
    mask, scale = (call["attn_mask_type"], call["window_size"][0]), call["attn_scale"]
    q, k, v, o, d_o = (call[name].double() for name in ("q", "k", "v", "o", "d_o"))
    grads = [
        torch.full_like(call["q"], torch.nan),
        *(torch.zeros_like(call[name]) for name in "kv"),
    ]
    o, d_o, lse = o.view(q.shape), d_o.view(q.shape), call["aux_ctx_tensors"][0]
    assert (
        lse.dtype == stats(call["q"]) and call["o"].is_contiguous() and call["d_o"].is_contiguous()
    )
    for mine, theirs in _sequences(call):
        qkv = (q[mine], k[theirs], v[theirs])
        found = attend_backward(qkv, o[mine], d_o[mine], lse[mine][..., 0], scale, mask)
        for total, part, index in zip(grads, found, (mine, theirs, theirs), strict=True):
            total[index] = part
    return *grads, None


def _halves(places: torch.Tensor, half: int) -> torch.Tensor:
    """Return the rows of the first or second half of every sequence."""
    starts, stops = places[:-1].tolist(), places[1:].tolist()
    middle = [(start + stop) // 2 for start, stop in zip(starts, stops, strict=True)]
    bounds = zip(starts, middle, strict=True) if half == 0 else zip(middle, stops, strict=True)
    return torch.cat([torch.arange(first, last) for first, last in bounds])


def thd_read_half_tensor(x: torch.Tensor, places: torch.Tensor, half: int) -> torch.Tensor:
    """Return one half of every sequence: `[t, ...]` to `[t / 2, ...]`."""
    demand_lengths(places)
    demand_tokens(x, int(places[-1]))
    return x[_halves(places, half)]


def thd_out_correction(out: torch.Tensor, step: torch.Tensor, *rest: Any) -> None:
    """Merge a step into `out[t, heads, d]`; log-sum-exps are `[heads, t]`.

    Up to 2.19, `new` covers all steps and there is no `old`.
    """
    *olds, new, step_lse, places, second_half, packed = rest
    old = olds[0] if olds else new
    assert (
        packed
        and out.dtype == step.dtype
        and old.dtype == new.dtype == step_lse.dtype == stats(out)
    )
    demand_lengths(places)
    demand_tokens(out, int(places[-1]))
    rows = _halves(places, 1) if second_half else torch.arange(out.shape[0])
    before, now = (torch.exp(x - new[:, rows]).t()[..., None] for x in (old[:, rows], step_lse))
    out[rows] = (out[rows] * before + step.view(-1, *out.shape[1:]) * now).to(
        out.dtype
    )  # computed in float32 and rounded once


def thd_second_half_lse_correction(
    lse: torch.Tensor, step: torch.Tensor, places: torch.Tensor, packed: bool
) -> None:
    """Merge `step[heads, t / 2]` into the second halves of `lse[heads, t]`."""
    assert (
        packed
        and lse.dtype == step.dtype
        and lse.dim() == step.dim() == 2
        and len(lse) == len(step)
    )
    demand_lengths(places)
    rows = _halves(places, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], step)


def thd_read_second_half_lse(
    lse: torch.Tensor, places: torch.Tensor, packed: bool, length: int
) -> torch.Tensor:
    """Return the second halves of the log-sum-exps: `[heads, t]` to `[heads, t / 2]`."""
    rows = _halves(places, 1)
    demand_lengths(places)
    assert packed and length == len(rows) and lse.dim() == 2
    return lse[:, rows].contiguous()


def thd_grad_correction(
    grad: torch.Tensor, step: torch.Tensor, places: torch.Tensor, first: str, second: str
) -> None:
    """Write `step` to the halves of `grad` by `add`, `copy`, `zero` or `none`.

    `step` contains only the halves that are written from it.
    """
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "add": lambda old, new: old + new,
        "copy": lambda old, new: new,
    }
    whole = first in ways and second in ways
    demand_lengths(places)
    demand_tokens(grad, int(places[-1]))
    assert step.dtype == grad.dtype and step.is_contiguous() and {first, second} & set(ways)
    step = step.view(-1, *grad.shape[1:])
    for half, way in enumerate((first, second)):
        rows = _halves(places, half)
        if way in ways:
            grad[rows] = ways[way](grad[rows], step[rows] if whole else step)
        elif way == "zero":
            grad[rows] = 0.0


def thd_get_partitioned_indices(
    places: torch.Tensor, tokens: int, cp: int, rank: int
) -> torch.Tensor:
    """Return the rows of the batch on a rank: chunks `rank` and `2 cp - 1 - rank` of each sequence."""
    demand_lengths(places)
    assert tokens > 0 and tokens % (2 * cp) == 0 and not (places % (2 * cp)).any()
    found = []
    for start, stop in zip(places[:-1].tolist(), places[1:].tolist(), strict=True):
        chunks = torch.arange(start, stop).view(2 * cp, -1)
        found += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(found)


def thd_sequence_order_to_cp_rank_order(
    x: torch.Tensor, places: torch.Tensor, cp: int, tokens: int
) -> torch.Tensor:
    """Reorder rows from sequence order to the order of rank 0, rank 1, ..."""
    return x[
        torch.cat([thd_get_partitioned_indices(places, tokens, cp, rank) for rank in range(cp)])
    ]


def thd_cp_rank_order_to_sequence_order(
    x: torch.Tensor, places: torch.Tensor, cp: int, tokens: int
) -> torch.Tensor:
    """Invert `thd_sequence_order_to_cp_rank_order`."""
    order = torch.cat([thd_get_partitioned_indices(places, tokens, cp, rank) for rank in range(cp)])
    return x[order.argsort()]


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    total: torch.Tensor, part: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Copy the tokens of every sequence, without padding."""
    demand_lengths(places, lengths)
    assert total.shape == part.shape and total.dtype == part.dtype and total.is_contiguous()
    for span in spans_of(lengths, places):
        total[span] = part[span]


THD = (
    thd_read_half_tensor,
    thd_out_correction,
    thd_second_half_lse_correction,
    thd_read_second_half_lse,
    thd_grad_correction,
    thd_get_partitioned_indices,
    thd_sequence_order_to_cp_rank_order,
    thd_cp_rank_order_to_sequence_order,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
)


class WaitsOnce:
    """A request on which one may wait twice. The ring's backward does so, and gloo would hang."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        """Wait only the first time."""
        if self._request is not None:
            self._request.wait()
            self._request = None


class Float64AsHalf:
    """`torch` for a file that rejects everything but 16-bit dtypes: float64 replaces float16."""

    float16 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def cudnn_support(*asked: Any) -> Any:
    """Replace `get_fused_attn_backend`: return a backend, and the reason if it is refused.

    Up to 2.18 it returns only the backend, for 19 arguments.
    """
    if len(asked) == 1:
        words = (
            "num_attn_heads",
            "num_gqa_groups",
            "max_seqlen_q",
            "max_seqlen_kv",
            "head_dim_qk",
            "head_dim_v",
        )
        *sizes, qk, v = (getattr(asked[0], word) for word in words)
        assert asked[0].qkv_layout.name.endswith("THD_THD_THD") and min(
            asked[0].num_tokens_q, asked[0].num_tokens_kv
        )
    else:
        *sizes, qk, v = asked[8:14]
    assert min(sizes) > 0
    backends = sys.modules[EXTENSION].NVTE_Fused_Attn_Backend
    refusal = f"heads of {qk} and {v}" if qk % 8 or qk > 256 or qk != v else ""
    found = backends.NVTE_No_Backend if refusal else backends.NVTE_F16_arbitrary_seqlen
    return (found, refusal) if len(asked) == 1 else found


@contextmanager
def selecting(release: str = NEWEST) -> Iterator[Any]:
    """Provide `transformer_engine.pytorch` with its real selector and `cudnn_support`, on a Hopper
    GPU.
    """
    with engine(release) as te, claimed_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules[EXTENSION], "get_fused_attn_backend", cudnn_support, raising=False
        )
        package_problem()  # this sets the environment variables that the package reads
        yield te


@contextmanager
def emulated(release: str = NEWEST, dtype: torch.dtype = torch.float64) -> Iterator[Any]:
    """Provide a `transformer_engine.pytorch` whose attention computes on the CPU, over gloo.

    float64 is accepted as a 16-bit dtype.
    """
    with selecting(release) as te, pytest.MonkeyPatch.context() as patch:
        cp, backends, utils = (sys.modules[name] for name in (CONTEXT_PARALLEL, BACKENDS, UTILS))
        send = cp.flash_attn_p2p_communicate

        def once(*args: Any) -> list[WaitsOnce]:
            assert args[-1], "messages would go by a communicator for each pair of ranks"
            return [WaitsOnce(work) for work in send(*args)]

        patch.setattr(cp, "flash_attn_p2p_communicate", once)
        for module in (cp, backends, sys.modules[FUSED]):
            for stand_in in (fused_attn_fwd, fused_attn_bwd):
                name = stand_in.__name__
                patch.setattr(module, name, named(getattr(module, name), stand_in))
        for function in THD:
            patch.setattr(sys.modules[EXTENSION], function.__name__, function, raising=False)
        if dtype == torch.float64:
            patch.setattr(backends, "torch", Float64AsHalf())
            fused = cp.FusedAttnBackend["F16_arbitrary_seqlen"]
            choice = (False, None, True, fused, False, [False, True, False])
            patch.setattr(utils, "get_attention_backend", lambda parameters: choice)
        yield te
