"""Two rules for a training loop with sharded sequences: shift labels before sharding; sum, then
divide once.

The loss of a rank is the sum over its tokens, divided by a number that all ranks know before the
forward. Gradients are then summed over the ranks without scaling. A mean of means would be wrong if
ranks have different numbers of labels. The docstring of `context.py` shows such a loop.
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
    """Return labels shifted by one: each token gets the label of the next one in its document.

    The last token of a document gets `ignore_index`. `labels[..., S]` belong to the whole sequence,
    because a rank's part lacks neighbours. `document_ids[..., S]` broadcasts to `labels` and is -1
    at padding, which neither predicts nor is predicted.
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
    """Sum every `.grad` over the axis, in place. All ranks call this after backward.

    Nothing is divided: the loss was already divided by the number of labels on all ranks. Shards
    of parameters (DTensors) are summed directly; they must not be sharded over the axis. A
    gradient that is None on some ranks counts as zero there; if it is None on all ranks, it stays
    None. Gradients of the same dtype are sent together.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if axis.size == 1 or not wanted:
        return
    # A parameter may be unused on some ranks: agree on the gradients that exist anywhere.
    present = torch.tensor(
        [p.grad is not None for p in wanted], dtype=torch.int32, device=wanted[0].device
    )
    anywhere = all_reduce(present, axis, "max").tolist()
    for p, some in zip(wanted, anywhere, strict=True):
        if some and p.grad is None:
            p.grad = torch.zeros_like(p)
    # Group the gradients into messages, in the order of the parameters, which all ranks share.
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
