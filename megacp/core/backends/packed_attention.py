"""Transformer Engine's `DotProductAttention` over the packed rows of a cp axis: its groups and its arguments.

The module is given, so this file imports nothing of the package. Rows of padding are zeroed on both sides, because
cuDNN may leave NaN there. One object serves all layers, since it holds nothing of a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megacp.core.backends.thd import Sequences
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.grid import Axis, split_axis


class PackedAttention:
    """The attention of all layers, `scale` on the scores.

    `comm_type` and `inner` (ranks of the all-to-all in a2a+p2p) matter from two ranks on; making the groups of a2a+p2p
    is collective.
    """

    def __init__(
        self, attention: Any, scale: float, cp: Axis, comm_type: str, inner: int, device: torch.device
    ) -> None:
        self.attention = attention
        self.scale = scale
        if cp.size == 1:
            return
        groups: Any = cp.group
        if comm_type == "a2a+p2p":
            parts = split_axis(cp, inner)
            if parts[0].group is None or parts[1].group is None:  # one of the two has a single rank
                comm_type = "p2p" if parts[0].group is None else "a2a"
            else:
                groups = [part.group for part in parts]
        self.attention.set_context_parallel_group(
            cp_group=groups,
            cp_global_ranks=list(cp.global_ranks),
            cp_stream=torch.cuda.Stream(device=device),
            cp_comm_type=comm_type,
        )

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, sequences: Sequences
    ) -> torch.Tensor:
        """`q[t, heads, d]`, `k, v[t, groups, d]` of this rank -> `[t, heads, d]`; rows of padding are 0 both ways.

        Cumulative lengths are those of the whole row; true and padded ones are one tensor where there is no padding,
        by which Transformer Engine knows it.
        """
        device = q.device
        places = plan.on_device("thd cu_padded", device, lambda: sequences.cu_padded)
        lengths = places
        if sequences.has_padding:
            lengths = plan.on_device("thd lengths", device, lambda: sequences.cu_lengths)
        padding = plan.part("thd padding", lambda: np.flatnonzero(plan.metadata.document[plan.local] < 0))
        empty = plan.on_device("thd padding", device, lambda: padding) if len(padding) else None
        if empty is not None:  # what cuDNN leaves there may be NaN, and 0 x NaN would reach every weight gradient
            q, k, v = (x.index_fill(0, empty, 0.0) for x in (q, k, v))
        out = self.attention(
            query_layer=q,
            key_layer=k,
            value_layer=v,
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=places,
            cu_seqlens_kv_padded=places,
            max_seqlen_q=sequences.longest,
            max_seqlen_kv=sequences.longest,
            attn_mask_type="padding_causal",
        ).view(q.shape)  # [t, heads * d] -> [t, heads, d]
        return out if empty is None else out.index_fill(0, empty, 0.0)
