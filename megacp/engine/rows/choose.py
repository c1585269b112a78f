"""`--cp-comm-type auto` and `--cp-layout auto`: a choice based on the first rows of a run.

The choice of transport depends on `needed`, the share of other ranks' K/V rows that a rank's
queries attend to under the balanced layout. `choose_transport` makes the decision.

The layout is the transport's best layout, if it has one. Otherwise, it is `balanced`, unless zigzag
gives all ranks the same attention area, as for a single long document. The rule depends only on
packs and config, so all ranks make the same choice without communication. The chosen values replace
`auto` in the config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megacp.attention.context_parallel.balance import row_area
from megacp.attention.context_parallel.kv_exchange import needed_rows
from megacp.attention.context_parallel.layout import (
    BALANCED,
    ZIGZAG,
    Layout,
)
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transports import TRANSPORTS, choose_transport
from megacp.attention.ops.mask import Metadata
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.mix import mix_of
from megacp.engine.rows.shard import padded_row

DEFAULT = ParallelConfig()
EVEN = 1.05
"""Maximum imbalance (largest area / mean area) at which zigzag, whose tiles are larger, is used."""


def resolve_auto(
    config: RunConfig,
    first_rows: Callable[[], Sequence[PackedBatch]],
) -> tuple[RunConfig, str | None]:
    """Return the config with transport and layout chosen for rows like those of `first_rows()`.

    The rows must be the same on every rank. The second result is a log line with the choice and the
    reason, or None if no choice was necessary (no `auto`, or only one cp rank).
    """
    p = config.parallel
    if not (p.chooses_transport or p.chooses_layout):
        return config, None
    comm: str = p.cp_comm_type
    layout: str = p.cp_layout
    line = None
    if p.context_parallel_size == 1:
        # a single rank ignores both, so replace auto with the flags' defaults and read no rows
        if p.chooses_transport:
            comm = DEFAULT.cp_comm_type
        if p.chooses_layout:
            layout = DEFAULT.cp_layout
    else:
        rows = first_rows()
        # the mean over rows, so that one unusual row does not decide
        needed = float(np.mean([needed_share(_dealt(config, row, BALANCED)) for row in rows]))
        if p.chooses_transport:
            comm = transport_for(config, needed)
        if p.chooses_layout:
            layout = TRANSPORTS[comm].best_layout or _even_layout(config, rows)
        line = (
            f"context parallelism: {comm}, {layout}; a rank needs {needed:.0%} of the other ranks' "
            "keys"
        )
    return with_values(config, {"cp_comm_type": comm, "cp_layout": layout}), line


def transport_for(config: RunConfig, needed: float) -> str:
    """Return the transport for rows in which ranks need this share of other ranks' K/V."""
    cp = config.parallel.context_parallel_size
    tp = config.parallel.tensor_model_parallel_size
    # all-to-all transports need numbers of heads and groups that are divisible by cp
    heads = config.model.num_attention_heads // tp
    groups = config.model.query_groups // tp
    return choose_transport(needed, cp, heads, groups)


def _even_layout(config: RunConfig, rows: Sequence[PackedBatch]) -> str:
    """Return "zigzag", which has larger tiles, if it balances these rows well enough.

    Otherwise, return "balanced".
    """
    imbalances = []
    for row in rows:
        metadata, indices = _dealt(config, row, ZIGZAG)
        area = row_area(metadata, mix_of(config.model))[indices].sum(1)  # [cp, t] -> [cp]
        imbalances.append(area.max() / max(1.0, area.mean()))
    return ZIGZAG.name if max(imbalances) <= EVEN else BALANCED.name


def _dealt(config: RunConfig, row: PackedBatch, layout: Layout) -> tuple[Metadata, np.ndarray]:
    """Pad a row for a layout; return its mask metadata and the tokens `[cp, t]` of each rank."""
    p = config.parallel
    # with sequence parallelism, the padded length must also be a multiple of tp
    tp = p.tensor_model_parallel_size if p.sequence_parallel else 1
    _, metadata = padded_row(row, layout, p.context_parallel_size, tp)
    return metadata, layout.deal(metadata, p.context_parallel_size, mix_of(config.model))


def needed_share(dealt: tuple[Metadata, np.ndarray]) -> float:
    """Return the share of other ranks' K/V rows that ranks need, averaged over ranks: 0 to 1."""
    metadata, indices = dealt
    cp, tokens = indices.shape
    plan = AttentionPlan(indices, metadata, 0)
    foreign = 0
    for seen, mine in zip(needed_rows(plan), indices, strict=True):
        # the rank also attends to its own rows, but does not receive them
        foreign += int(seen.sum() - seen[mine].sum())
    return foreign / (cp * (cp - 1) * tokens)
