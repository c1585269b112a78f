"""Attention kernels behind one interface: they walk a tile table, merge forward parts and accumulate gradients.

Key property: forward and backward see only non-empty tiles; backward starts from the merged `(out, lse)`, so a
transport may call it once per source of keys and the sum is exact. Partial sums are held in fp32 or wider. Rejected:
one masked call over all keys, which pays for emptiness and needs an S x S mask.

Tensors are token-major: `q[n, heads, d]`, `k, v[m, groups, d]` with `heads % groups == 0` (grouped queries).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megacp.ops.mask import CAUSAL, FULL, Row, TileTable
from megacp.ops.merge import merge_into

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""


GATHERED_ELEMENTS = 16_384
"""Elements of K up to which a tile is copied beside others into one kernel call (about 30 microseconds either way)."""


@dataclass
class Partial:
    """A running attention result: `out[n, heads, d]`, `lse[n, heads]`, in the accumulation dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    untouched: bool = True
    """No row has seen a key yet, so the first tile of each row is written instead of merged."""


@dataclass(frozen=True)
class Saved:
    """What backward needs of the forward: `q`, merged `out` (dtype of q), merged `lse`, and the incoming `dout`."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Kernel(Protocol):
    """Attention of queries over one table of tiles: forward merges into a running result, backward adds gradients."""

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge into `partial` what `q` sees of these keys; rows that see nothing are left alone."""

    def attend_backward(
        self, saved: Saved, kv: tuple[torch.Tensor, torch.Tensor], table: TileTable, scale: float, grads: QKV
    ) -> None:
        """Add this table's share to `grads = (dq, dk, dv)`, held in the accumulation dtype."""


KeySource = tuple[tuple[slice, ...], bool]
"""Slices of keys that one kernel call sees together, and whether they are a causal triangle."""


def key_sources(row: Row, width: int) -> list[KeySource]:
    """How the tiles of a row become kernel calls; `width` is the number of elements of a key.

    Small full tiles are copied together, as a call costs more than the copy; large ones are used where they are.
    """
    sources: list[KeySource] = []
    small: list[slice] = []
    for tile in row.tiles:
        keys = slice(tile.k_start, tile.k_stop)
        if tile.kind == FULL and (tile.k_stop - tile.k_start) * width <= GATHERED_ELEMENTS:
            small.append(keys)
        else:
            sources.append(((keys,), tile.kind == CAUSAL))
    if small:
        sources.append((tuple(small), False))
    return sources


def _gather(x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
    return x[slices[0]] if len(slices) == 1 else torch.cat([x[part] for part in slices])


def _scatter_add(x: torch.Tensor, slices: tuple[slice, ...], values: torch.Tensor) -> None:
    lengths = [part.stop - part.start for part in slices]
    for part, piece in zip(slices, values.split(lengths), strict=True):
        x[part] += piece


class TileKernel:
    """A kernel that walks the table and computes one full or causal block of keys at a time."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out[n, heads, d]`, `lse[n, heads]` of one full or causal block."""
        raise NotImplementedError

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq, dk, dv` of one block, shaped like q, k, v."""
        raise NotImplementedError

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """See `Kernel.attend`."""
        q, k, v = qkv
        for row in table.rows:
            rows = slice(row.q_start, row.q_stop)
            for number, (slices, causal) in enumerate(key_sources(row, k.shape[1] * k.shape[2])):
                out, lse = self.forward(q[rows], _gather(k, slices), _gather(v, slices), causal, scale)
                if partial.untouched and number == 0:
                    partial.out[rows], partial.lse[rows] = out, lse
                else:
                    merge_into(partial.out[rows], partial.lse[rows], out, lse)
        partial.untouched &= not table.rows

    def attend_backward(
        self, saved: Saved, kv: tuple[torch.Tensor, torch.Tensor], table: TileTable, scale: float, grads: QKV
    ) -> None:
        """See `Kernel.attend_backward`."""
        (k, v), (dq, dk, dv) = kv, grads
        for row in table.rows:
            rows = slice(row.q_start, row.q_stop)
            part = Saved(saved.q[rows], saved.out[rows], saved.lse[rows], saved.dout[rows])
            for slices, causal in key_sources(row, k.shape[1] * k.shape[2]):
                found = self.backward(part, _gather(k, slices), _gather(v, slices), causal, scale)
                dq[rows] += found[0]
                _scatter_add(dk, slices, found[1])
                _scatter_add(dv, slices, found[2])


class FlashKernel(TileKernel):
    """torch's flash attention for CPU: fp32, bf16, float64, grouped queries, returns the LSE."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TileKernel.forward`; the op wants [1, heads, n, d] views and returns lse [1, heads, n]."""
        batch = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [n, heads, d] -> [1, heads, n, d]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, causal, scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `TileKernel.backward`."""
        dout, q, key, value, out = (
            x.transpose(0, 1).unsqueeze(0) for x in (saved.dout, saved.q, k, v, saved.out)
        )  # [n, heads, d] -> [1, heads, n, d]
        lse = saved.lse.t().unsqueeze(0)  # [n, heads] -> [1, heads, n]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, key, value, out, lse, 0.0, causal, scale=scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


class MathKernel(TileKernel):
    """Plain torch on any device, in blocks of query rows: memory `block x m` per head, never n x m."""

    def __init__(self, block: int = 1024) -> None:
        self.block = block

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TileKernel.forward`."""
        outs, lses = [], []
        for start in range(0, len(q), self.block):
            scores = self._scores(q, k, start, causal, scale)  # [groups, heads/groups, b, m]
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse.unsqueeze(-1))
            out = torch.einsum("grnm,mgd->ngrd", weights, v.to(weights.dtype))
            outs.append(out.flatten(1, 2))  # [b, groups, r, d] -> [b, heads, d]
            lses.append(lse.flatten(0, 1).t())  # [groups, r, b] -> [b, heads]
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `TileKernel.backward`; formulas of FlashAttention-2 (Dao, 2023), section 3.1."""
        groups, wide = k.shape[1], accumulation_dtype(saved.q.dtype)
        dq = torch.empty_like(saved.q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for start in range(0, len(saved.q), self.block):
            rows = slice(start, min(start + self.block, len(saved.q)))
            scores = self._scores(saved.q, k, start, causal, scale)
            lse = saved.lse[rows].t().unflatten(0, (groups, -1)).to(wide)  # [b, heads] -> [groups, r, b]
            weights = torch.exp(scores - lse.unsqueeze(-1))
            q, out, dout = (
                x[rows].unflatten(1, (groups, -1)).to(wide) for x in (saved.q, saved.out, saved.dout)
            )  # [b, heads, d] -> [b, groups, r, d]
            delta = (out * dout).sum(-1).permute(1, 2, 0)  # [b, groups, r] -> [groups, r, b]
            dv += torch.einsum("grnm,ngrd->mgd", weights, dout)
            dscores = weights * (torch.einsum("ngrd,mgd->grnm", dout, v.to(wide)) - delta.unsqueeze(-1)) * scale
            dq[rows] = torch.einsum("grnm,mgd->ngrd", dscores, k.to(wide)).flatten(1, 2)
            dk += torch.einsum("grnm,ngrd->mgd", dscores, q)
        return dq, dk, dv

    def _scores(self, q: torch.Tensor, k: torch.Tensor, start: int, causal: bool, scale: float) -> torch.Tensor:
        """Masked scores `[groups, heads/groups, b, m]` of the query block that begins at `start`."""
        wide = accumulation_dtype(q.dtype)
        rows = q[start : start + self.block].unflatten(1, (k.shape[1], -1)).to(wide)  # [b, heads, d] -> [b, g, r, d]
        scores = torch.einsum("ngrd,mgd->grnm", rows, k.to(wide)) * scale
        if causal:
            place = torch.arange(start, start + rows.shape[0], device=q.device)
            scores.masked_fill_(torch.arange(len(k), device=q.device)[None] > place[:, None], -torch.inf)
        return scores


def _flex_kernel() -> Kernel:
    from megacp.ops.flex import FlexKernel  # which imports this module

    return FlexKernel()


@dataclass(frozen=True)
class KernelChoice:
    """A row of the table of kernels: how to build it, and where alone it runs."""

    build: Callable[[], Kernel]
    device: str = ""
    """The only device type, or any."""
    float64: bool = True
    """Whether it adds up in float64 for a float64 model."""


KERNELS = {
    "flash": KernelChoice(FlashKernel, "cpu"),
    "math": KernelChoice(MathKernel),
    "flex": KernelChoice(_flex_kernel, "cuda", float64=False),
}
"""The values of `--attention-kernel` besides auto, and dense."""

FASTEST = {"cpu": "flash", "cuda": "flex"}
"""What auto means on a type of device, where it adds up in the model's dtype; else math."""


def kernel_problem(name: str, device_type: str, dtype: str = "float32") -> str | None:
    """Why a kernel cannot run on a type of device (`cpu`, `cuda`) in a `--dtype`; None for names without a row."""
    choice = KERNELS.get(name)
    if choice is None:
        return None
    if choice.device not in ("", device_type):
        only = {"cpu": "the CPU", "cuda": "CUDA"}[choice.device]
        return f"--attention-kernel {name} runs on {only}, this run is on {device_type}; choose auto or math"
    if dtype == "float64" and not choice.float64:
        return f"--attention-kernel {name} adds up in float32, this run has --dtype float64; choose auto or math"
    return None


def kernel_name(name: str, device_type: str, dtype: str = "float32") -> str:
    """What a `--attention-kernel` value means: `auto` is flash on CPU, flex on CUDA, and math for float64 there and on
    any other device; other values mean themselves. Raises ValueError with the reason of `kernel_problem`.
    """
    if name == "auto":
        fastest = FASTEST.get(device_type, "math")
        return "math" if kernel_problem(fastest, device_type, dtype) else fastest
    problem = kernel_problem(name, device_type, dtype)
    if problem:
        raise ValueError(problem)
    return name


def select_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel of a `--attention-kernel` value; raises ValueError where it is unknown or cannot run.

    It knows no dtype: for a float64 model `kernel_name` must have resolved `auto` before.
    """
    chosen = kernel_name(name, device.type)
    if chosen not in KERNELS:
        raise ValueError(f"--attention-kernel {name} is unknown; choose auto, {', '.join(KERNELS)}")
    return KERNELS[chosen].build()


def empty_partial(q: torch.Tensor) -> Partial:
    """The result of having seen no key: out 0, lse -inf."""
    dtype = accumulation_dtype(q.dtype)
    return Partial(torch.zeros_like(q, dtype=dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device))


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """The obvious reference: softmax over an explicit bool mask `visible[n, m]`, differentiated by autograd.

    Rows that see nothing give zero output and zero gradient. Returns `out[n, heads, d]`.
    """
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)  # [m, groups, d] -> [m, heads, d]
    scores = torch.einsum("nhd,mhd->hnm", q, keys).to(accumulation_dtype(q.dtype)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    nothing = ~visible.any(-1)  # [n]
    weights = torch.softmax(scores.masked_fill(nothing[None, :, None], 0.0), -1)
    weights = weights.masked_fill(nothing[None, :, None], 0.0)
    return torch.einsum("hnm,mhd->nhd", weights.to(q.dtype), values)
