"""Merging partial attention outputs by their log-sum-exp (the online softmax of Milakov and Gimelshein, 2018).

Key property: exact in any order; a part that saw nothing has lse -inf and changes nothing. Rejected: running maxima and
sums kept apart, which is the same arithmetic with one more tensor.
"""

from __future__ import annotations

import torch

from megacp.core.ops.compiled import fused


@fused
def merge_into(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part into `out[n, heads, d]`, `lse[n, heads]` in place; both accumulate in fp32 or wider."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -torch.inf, 0.0)  # a row that saw nothing keeps out 0: exp(-inf - 0) = 0
    out.mul_(torch.exp(lse - shift).unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), torch.exp(part_lse - shift).unsqueeze(-1).to(out.dtype))
    lse.copy_(total)
