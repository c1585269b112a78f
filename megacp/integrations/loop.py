"""Helpers for a training loop with sharded sequences: shift labels first, and sum gradients.

A rank's loss is the sum over its tokens, divided by the number of labels on all ranks, which is
known before the forward pass. Gradients are then summed across ranks without scaling. A mean of the
ranks' means would be wrong if ranks have different numbers of labels. The docstring of `context.py`
shows an example.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.fully_shard import shard_of

# Approximate number of gradient elements per message.
_AT_ONCE = 16 << 20


def shift_labels(
    labels: torch.Tensor, document_ids: torch.Tensor | None = None, ignore_index: int = -100
) -> torch.Tensor:
    """Return labels shifted by one: each token gets the label of its document's next token.

    The last token of a document gets `ignore_index`. `labels[..., S]` must cover the whole
    sequence, because the next token may be on another rank. `document_ids[..., S]` broadcasts to
    `labels` and is -1 at padding, which has no label and is no token's label.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if document_ids is not None:
        document = document_ids.to(labels.device).expand_as(labels)
        # the last token of each document, and all padding
        last = (document[..., :-1] != document[..., 1:]) | (document[..., :-1] < 0)
        shifted[..., :-1].masked_fill_(last, ignore_index)
    return shifted


def sum_gradients(parameters: Iterable[torch.nn.Parameter], axis: Axis) -> None:
    """Sum every `.grad` across the axis, in place. All ranks call this after the backward pass.

    Gradients are not divided, because the loss was already divided by the number of labels on all
    ranks. For DTensors, the local shards are summed; they must not be sharded along the axis. A
    gradient that is None on some ranks counts as zero there; if it is None on all ranks, it stays
    None. Gradients of the same dtype are sent together.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if axis.size == 1 or not wanted:
        return
    # A parameter may be unused on some ranks, so find out which gradients exist on any rank.
    present = torch.tensor(
        [p.grad is not None for p in wanted], dtype=torch.int32, device=wanted[0].device
    )
    anywhere = all_reduce(present, axis, "max").tolist()
    for p, some in zip(wanted, anywhere, strict=True):
        if some and p.grad is None:
            p.grad = torch.zeros_like(p)
    # Group the gradients into messages in parameter order, which is the same on all ranks.
    messages: dict[tuple[str, str, int], list[torch.Tensor]] = {}
    elements = 0
    for p in wanted:
        if p.grad is None:
            continue
        x = shard_of(p.grad.detach())
        elements += x.numel()
        key = str(x.dtype), str(x.device), elements // _AT_ONCE
        messages.setdefault(key, []).append(x)
    # Send each message as one flat tensor, and copy the sums back into the gradients.
    for message in messages.values():
        total = all_reduce(torch.cat([x.reshape(-1) for x in message]), axis)
        for x, part in zip(message, total.split([x.numel() for x in message]), strict=True):
            x.copy_(part.view(x.shape))
