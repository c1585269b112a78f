"""Two rules for any training loop around a sharded sequence: shift before sharding, sum then divide once.

Key property: the loss of a rank is a sum over its tokens, divided by a number that all ranks know before the forward.
Gradients are then added over the ranks and nothing is scaled. Rejected: a mean over each rank's tokens and a mean of
gradients, which is wrong as soon as ranks count unequal numbers of tokens.

    shifted = shift_labels(labels, document_ids)             # before the sequence is cut
    counted = (shifted != -100).sum()                        # of the whole sequence (and batch, and dp ranks)
    ...
    loss = cross_entropy(logits, local_shifted, ignore_index=-100, reduction="sum") / counted
    loss.backward()
    sum_gradients(model.parameters(), axis)                  # the loss itself is summed alike, for logging
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.fully_shard import shard_of
from megacp.core.distributed.grid import Axis

_AT_ONCE = 16 << 20
"""Gradient elements of a message, at least, before the next one begins."""


def shift_labels(
    labels: torch.Tensor, document_ids: torch.Tensor | None = None, ignore_index: int = -100
) -> torch.Tensor:
    """The label of each token: that of its right neighbour in the same document, else `ignore_index`.

    `labels[..., S]` are those of the whole sequence: a rank's part lacks neighbours. `document_ids[..., S]` broadcasts
    to it and has -1 at padding, which neither predicts nor is predicted. Returns a new tensor like `labels`. Raises
    ValueError when the shapes do not fit.
    """
    if labels.dim() == 0:
        raise ValueError("shift_labels needs labels [..., S], got a scalar")
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if document_ids is None:
        return shifted
    if document_ids.shape[-1:] != labels.shape[-1:] or document_ids.dim() > labels.dim():
        raise ValueError(
            f"shift_labels: document_ids {tuple(document_ids.shape)} do not fit labels {tuple(labels.shape)}; "
            f"both are those of the whole sequence"
        )
    document = document_ids.to(labels.device)
    last = (document[..., :-1] != document[..., 1:]) | (document[..., :-1] < 0)
    shifted[..., :-1].masked_fill_(last, ignore_index)
    return shifted


def sum_gradients(parameters: Iterable[torch.nn.Parameter], axis: Axis) -> None:
    """Add every `.grad` over the axis, in place; all ranks call it alike, after backward.

    Nothing is divided: the loss was divided by the number of all ranks' tokens before. Parameters sharded by torch
    (DTensors) are summed shard by shard: their ranks must be others than those of the axis. A gradient that is None on
    some rank counts as zero there, one that is None on all stays None. Gradients of one dtype travel together.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if axis.size == 1 or not wanted:
        return
    device = wanted[0].device
    present = torch.tensor([p.grad is not None for p in wanted], dtype=torch.int32, device=device)
    anywhere = all_reduce(present, axis, "max").tolist()
    for p in (p for p, some in zip(wanted, anywhere, strict=True) if some and p.grad is None):
        p.grad = torch.zeros_like(p)
    for gradients in _messages([shard_of(p.grad.detach()) for p in wanted if p.grad is not None]):
        total = all_reduce(torch.cat([x.reshape(-1) for x in gradients]), axis)
        for x, part in zip(gradients, total.split([x.numel() for x in gradients]), strict=True):
            x.copy_(part.view(x.shape))


def _messages(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of one dtype and device that travel together, in an order that is the same on every rank."""
    waiting: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    elements: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for x in gradients:
        kind = (x.dtype, x.device)
        waiting[kind].append(x)
        elements[kind] += x.numel()
        if elements[kind] >= _AT_ONCE:
            elements[kind] = 0
            yield waiting.pop(kind)
    yield from waiting.values()
