"""Dropout whose mask is a function of (key, token, column): the same on any grid, and on recomputation.

Key property: there is no generator state. Ranks of a cp or tp group draw other bits because they hold other tokens, and
full recomputation draws the same bits again. Rejected: per-rank CUDA generators with saved and restored states
(Megatron's tracker), under which the result depends on the grid.
"""

from __future__ import annotations

import torch

from megacp.core.ops.compiled import fused

_MASK32 = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby), on int64 tensors holding 32-bit values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK32
    return x ^ (x >> 16)


@fused
def _kept(
    token_names: torch.Tensor, low: torch.Tensor, high: torch.Tensor, column: torch.Tensor, least: int
) -> torch.Tensor:
    """`keep_mask` from the halves of the key; they are tensors, as a number would make a compiled form for each key."""
    rows = _mix((token_names * 0x9E3779B1 + low) & _MASK32)  # [n], of the low halves
    rows = _mix((rows + (token_names >> 32) * 0x85EBCA77 + high) & _MASK32)  # a pack's number is in both
    bits = _mix((rows[:, None] + column[None] * 0x27D4EB2F) & _MASK32)  # [n, 1] + [1, columns] -> [n, columns]
    return bits >= least


def keep_mask(key: int, token_names: torch.Tensor, columns: int, probability: float, first: int = 0) -> torch.Tensor:
    """Bool `[n, columns]`, False with `probability`; `token_names[n]` int64 names each token within its microbatch.

    `first`: the number of the first column here, where tp ranks hold parts of a row.
    """
    low, high = (token_names.new_full((), half) for half in (key & _MASK32, key >> 32 & _MASK32))
    column = torch.arange(first, first + columns, device=token_names.device)
    return _kept(token_names, low, high, column, int(probability * 2**32))


def dropout(x: torch.Tensor, key: int, token_names: torch.Tensor, probability: float, first: int = 0) -> torch.Tensor:
    """`x[n, h]` with elements zeroed with `probability` and the rest scaled by `1 / (1 - probability)`.

    `first` as in `keep_mask`.
    """
    if probability == 0.0:
        return x
    return x * keep_mask(key, token_names, x.shape[-1], probability, first) / (1.0 - probability)
