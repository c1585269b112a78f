"""Why a call of `scaled_dot_product_attention` cannot run over a sharded sequence, and what to do instead.

Key property: every reason is found from shapes and flags before a message is sent, so ranks that make the same call
refuse it alike. Rejected: passing such a call through, whose result would be wrong and finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def refuse(problems: Sequence[str]) -> None:
    """Raise one ValueError with all `problems`, when there are any."""
    if problems:
        raise ValueError("context_parallel: " + "; ".join(problems))


def mask_problems(attn_mask: torch.Tensor | None) -> list[str]:
    """A mask of the call. transformers makes masks from values, so some ranks may have one and others none."""
    if attn_mask is None:
        return []
    return [
        f"attn_mask {tuple(attn_mask.shape)} is of this rank's tokens alone: describe the mask by document_ids (or "
        f"a Metadata). transformers makes one of position_ids that jump or restart, of an attention_mask with "
        f"zeros and of sliding windows: use register_with_transformers and its attn_implementation, not sdpa"
    ]


def dropout_problems(dropout_p: float) -> list[str]:
    """Dropout of the call."""
    if dropout_p > 0:
        return [f"dropout_p = {dropout_p:g}: attention dropout is not supported, set the model's to 0"]
    return []


def stock_problems() -> list[str]:
    """A call by the `sdpa` of transformers."""
    return [
        'attn_implementation="sdpa" of transformers makes masks, windows and packing of this rank\'s tokens alone, or '
        "none where it should: call register_with_transformers() and load the model with the name it returns "
        '("megacp"), or model.set_attn_implementation("megacp")'
    ]


def shape_problems(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> list[str]:
    """Shapes and dtypes of `q[B, H, s, D]`, `k, v[B, Hkv, s, D]`; `grouped` is the call's `enable_gqa`."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return [f"attention wants [B, H, s, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"]
    found = []
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[3] > k.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        found.append(f"{shapes} must agree in batch and head dim, k and v in heads and tokens; v may be narrower")
    heads, groups = q.shape[1], k.shape[1]
    if heads != groups and not grouped:
        found.append(f"{heads} query heads and {groups} key heads need enable_gqa=True")
    elif groups == 0 or heads % groups:
        found.append(f"{heads} query heads are no multiple of {groups} key heads")
    if not q.dtype == k.dtype == v.dtype:
        found.append(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    return found


def length_problems(queries: int, keys: int, held: int, whole: int) -> list[str]:
    """Tokens of the call, `held` on a rank of `whole` in the sequence."""
    if queries != keys:
        return [
            f"{queries} queries and {keys} keys: cross attention and a KV cache are not sharded, use them outside of "
            f"the block (use_cache=False)"
        ]
    if queries != held:
        return [
            f"{queries} tokens, the buffers hold {held} of {whole} on this rank: cut every input of the sequence "
            f"(buffers), and run other towers outside of the block"
        ]
    return []
