"""Two rules for any training loop around a sharded sequence: shift before sharding, sum then divide
once.

The loss of a rank is a sum over its tokens, divided by a number that all ranks know before the
forward. Gradients are then added over the ranks and nothing is scaled: a mean of means is wrong
where ranks count unequal numbers of tokens. `context` begins with such a loop.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.fully_shard import shard_of

_AT_ONCE = 16 << 20
"""Gradient elements of a message, about."""


def shift_labels(
    labels: torch.Tensor, document_ids: torch.Tensor | None = None, ignore_index: int = -100
) -> torch.Tensor:
    """The label of each token: that of its right neighbour in the same document, else
    `ignore_index`.

    `labels[..., S]` are those of the whole sequence: a rank's part lacks neighbours.
    `document_ids[..., S]` broadcasts to it and has -1 at padding, which neither predicts nor is
    predicted. Returns a new tensor like `labels`.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if document_ids is not None:
        document = document_ids.to(labels.device).expand_as(labels)
        last = (document[..., :-1] != document[..., 1:]) | (document[..., :-1] < 0)
        shifted[..., :-1].masked_fill_(last, ignore_index)
    return shifted


def sum_gradients(parameters: Iterable[torch.nn.Parameter], axis: Axis) -> None:
    """Add every `.grad` over the axis, in place; all ranks call it alike, after backward.

    Nothing is divided: the loss was divided by the number of all ranks' tokens before. Parameters
    sharded by torch (DTensors) are summed shard by shard: their ranks must be others than those of
    the axis. A gradient that is None on some rank counts as zero there, one that is None on all
    stays None. Gradients of one dtype travel together.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if axis.size == 1 or not wanted:
        return
    present = torch.tensor(
        [p.grad is not None for p in wanted], dtype=torch.int32, device=wanted[0].device
    )
    anywhere = all_reduce(present, axis, "max").tolist()
    for p in (p for p, some in zip(wanted, anywhere, strict=True) if some and p.grad is None):
        p.grad = torch.zeros_like(p)
    messages: dict[
        tuple[str, str, int], list[torch.Tensor]
    ] = {}  # in the order of the parameters, as on every rank
    elements = 0
    for x in (shard_of(p.grad.detach()) for p in wanted if p.grad is not None):
        elements += x.numel()
        messages.setdefault((str(x.dtype), str(x.device), elements // _AT_ONCE), []).append(x)
    for message in messages.values():
        total = all_reduce(torch.cat([x.reshape(-1) for x in message]), axis)
        for x, part in zip(message, total.split([x.numel() for x in message]), strict=True):
            x.copy_(part.view(x.shape))
