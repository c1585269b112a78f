"""Bytes that vision sends in one step on a rank of the first pipeline stage, over tp and over context parallelism.

Key property: sums over what each row's images make this rank do, equal to the byte to what ranks are seen to send.
Rejected: a mean over rows, which hides the rank that encodes most.

Symbols: c crops of N patches and m pooled tokens of w patches are encoded here, k features arrive, h is the width of
the tower, H that of the language model. Over tp every message is an all-reduce: a block of the tower has two of c N h
elements forward (its row linears) and two backward (its column linears); the connector has m h and m H forward, m h
backward, and 2 m h (1 + w) where a trained tower stands below it; with sequence parallelism k H where features meet
tokens. Over context parallelism features of other ranks' tokens go out, and their gradients back. What is frozen with
all that stands below it has no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacp.config.run import RunConfig

SMALL_ALL_REDUCE = 16_384
"""Elements up to which a gloo all-reduce is an all-gather and a local sum (as in distributed/collectives)."""


def all_reduce_bytes(elements: int, size: int, element_bytes: int) -> int:
    """An all-reduce: small ones send the whole tensor to every peer, (n - 1) B; large ones 2 (n - 1) / n B."""
    if elements <= SMALL_ALL_REDUCE:
        return (size - 1) * elements * element_bytes
    return 2 * elements * (size - 1) // size * element_bytes


@dataclass(frozen=True)
class RowImages:
    """What the images of one row make one rank do."""

    crops: int
    pooled: int
    """Pooled tokens that are encoded here."""
    window: int
    """Patches of a pooled token."""
    arriving: int
    """Features of tokens that are held here."""
    sent: int
    """Features that go to other ranks."""
    received: int
    """Features that come from other ranks."""
    largest: int
    """Most features that one rank encodes."""


def vision_tensor_bytes(config: RunConfig, rows: Sequence[RowImages]) -> int:
    """Over tp."""
    v, p = config.vision, config.parallel
    tp, size = p.tensor_model_parallel_size, config.training.element_bytes
    if tp == 1:
        return 0
    tower, connector = not v.freeze_vision, not (v.freeze_vision and v.freeze_connector)
    narrow, wide = v.vision_hidden_size, config.model.hidden_size
    total = 0
    for row in rows:
        patches = row.crops * v.patches_per_crop * narrow
        messages = [patches] * (2 * v.vision_num_layers * (1 + tower))
        messages += [row.pooled * narrow, row.pooled * wide] + [row.pooled * narrow] * connector
        messages += [2 * row.pooled * narrow, 2 * row.pooled * row.window * narrow] * tower
        encoded = messages if row.crops and row.pooled else []
        added = [row.arriving * wide] * (connector and p.sequence_parallel)
        total += sum(all_reduce_bytes(elements, tp, size) for elements in (*encoded, *added))
    return total


def vision_context_bytes(config: RunConfig, rows: Sequence[RowImages], ranks: int) -> int:
    """Over the ranks that the tokens of a row are dealt to."""
    v, size = config.vision, config.training.element_bytes * config.model.hidden_size
    trained = not (v.freeze_vision and v.freeze_connector)
    if config.parallel.vision_feature_exchange == "all_gather":
        return sum((1 + trained) * (ranks - 1) * row.largest * size for row in rows)
    return sum((row.sent + trained * row.received) * size for row in rows)
