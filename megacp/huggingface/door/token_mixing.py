"""Functions of torch that mix the tokens of a sequence without attention, seen while a model runs.

Key property: a function counts when it runs along the number of tokens that this rank holds. A convolution over the
pixels of an image or the softmax of a router passes. Rejected: refusing every convolution, which forbids models whose
images are embedded by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_SCANS = ("selective_scan", "chunk_scan", "causal_conv1d", "delta_rule", "rwkv", "mamba")
"""Parts of the names of custom operators of state-space models."""
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def mixing_problem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], held: int) -> str:
    """Why this call would mix the `held` tokens of this rank with each other alone; "" when it would not."""
    name = getattr(func, "__name__", "")
    mixes = False
    if name in ("conv1d", "conv2d"):
        mixes = _convolves_tokens(_tensor(args, kwargs, 0, "input"), _tensor(args, kwargs, 1, "weight"), held)
    elif name in ("softmax", "_softmax", "_safe_softmax"):
        mixes = _is_scores(_tensor(args, kwargs, 0, "input"), held)
    elif name in _RECURRENT:
        x = _tensor(args, kwargs, 0, "input")
        mixes = x is not None and x.dim() == 3 and held in x.shape[:2]
    elif any(part in name for part in _SCANS):
        mixes = True
    if not mixes:
        return ""
    shape = next((str(tuple(x.shape)) for x in args if isinstance(x, torch.Tensor)), "")
    if "softmax" in name:
        return (
            f"a softmax over scores {shape}: this model computes attention itself (eager) and would see this rank's "
            f"{held} tokens alone; choose an attn_implementation that calls scaled_dot_product_attention"
        )
    return (
        f"{name} on {shape} runs along this rank's {held} tokens alone: convolutions and recurrent layers over the "
        f"sequence are not supported; run other towers outside of the block"
    )


def _tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str) -> torch.Tensor | None:
    value = args[place] if len(args) > place else kwargs.get(name)
    return value if isinstance(value, torch.Tensor) else None


def _is_scores(x: torch.Tensor | None, held: int) -> bool:
    """Whether these are scores of every token with every token, `[..., s, s]`."""
    return x is not None and x.dim() >= 3 and held > 1 and x.shape[-2:] == (held, held)


def _convolves_tokens(x: torch.Tensor | None, weight: torch.Tensor | None, held: int) -> bool:
    """Whether a kernel that is wide along one dim runs over a dim of this rank's tokens, padded before or inside."""
    if x is None or weight is None:
        return False
    wide = [place for place, size in enumerate(weight.shape[2:]) if size > 1]
    if len(wide) != 1:
        return False
    length = x.shape[x.dim() - (weight.dim() - 2) + wide[0]]
    size = weight.shape[2 + wide[0]]
    depthwise = weight.shape[1] == 1 and weight.shape[0] > 1
    rows_end_to_end = depthwise and held > 1 and length % held == 0
    return rows_end_to_end or held <= length <= held + 2 * (size - 1)
