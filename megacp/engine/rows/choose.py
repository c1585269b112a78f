"""`--cp-comm-type auto` and `--cp-layout auto`: a rule on the counts of the plans of a run's first
rows.

What decides is `needed`: the share of the other ranks' K/V rows that a rank's queries see, under
the balanced layout.

`choose_transport` of the table of transports decides from this share. The layout is the best one of
the transport, if it has one. Otherwise it is `balanced`, unless zigzag gives all ranks the same
area, as it does for one long document. The rule depends only on packs and config, so all ranks
choose alike without a message. From then on the config holds the choice, as if flags had given it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megacp.attention.context_parallel.balance import row_area
from megacp.attention.context_parallel.kv_exchange import needed_rows
from megacp.attention.context_parallel.layout import BALANCED, ZIGZAG, Layout
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
"""Largest area of a rank over the mean up to which zigzag is taken: its tiles are larger."""


def resolve_auto(
    config: RunConfig, first_rows: Callable[[], Sequence[PackedBatch]]
) -> tuple[RunConfig, str | None]:
    """The config with transport and layout chosen for rows like `first_rows()`, which are the same
    on every rank.

    The line says what was chosen and why; None where nothing had to be: no auto, or one cp rank.
    """
    p = config.parallel
    if not (p.chooses_transport or p.chooses_layout):
        return config, None
    comm: str = p.cp_comm_type
    layout: str = p.cp_layout
    line = None
    if p.context_parallel_size == 1:
        # one rank ignores both: the defaults of the flags stand for auto, and no row is read
        comm = DEFAULT.cp_comm_type if p.chooses_transport else comm
        layout = DEFAULT.cp_layout if p.chooses_layout else layout
    else:
        rows = first_rows()
        needed = float(np.mean([needed_share(_dealt(config, row, BALANCED)) for row in rows]))
        comm = transport_for(config, needed) if p.chooses_transport else comm
        if p.chooses_layout:
            layout = TRANSPORTS[comm].best_layout or _even_layout(config, rows)
        line = (
            f"context parallelism: {comm}, {layout}; a rank needs {needed:.0%} of the other "
            "ranks' keys"
        )
    return with_values(config, {"cp_comm_type": comm, "cp_layout": layout}), line


def transport_for(config: RunConfig, needed: float) -> str:
    """Return the transport for rows in which a rank needs the share `needed` of the other ranks'
    K/V rows.
    """
    cp = config.parallel.context_parallel_size
    tp = config.parallel.tensor_model_parallel_size
    return choose_transport(
        needed, cp, config.model.num_attention_heads // tp, config.model.query_groups // tp
    )


def _even_layout(config: RunConfig, rows: Sequence[PackedBatch]) -> str:
    """Return the name of the layout that deals these rows evenly: zigzag if it does, for its larger
    tiles.
    """
    dealt = (_dealt(config, row, ZIGZAG) for row in rows)
    areas = [
        row_area(metadata, mix_of(config.model))[indices].sum(1) for metadata, indices in dealt
    ]  # [cp, t] -> [cp]
    worst = max(area.max() / max(1.0, area.mean()) for area in areas)
    return ZIGZAG.name if worst <= EVEN else BALANCED.name


def _dealt(config: RunConfig, row: PackedBatch, layout: Layout) -> tuple[Metadata, np.ndarray]:
    """A row padded for a layout, and its tokens `[cp, t]` dealt by it."""
    p = config.parallel
    tp = p.tensor_model_parallel_size if p.sequence_parallel else 1
    _, metadata = padded_row(row, layout, p.context_parallel_size, tp)
    return metadata, layout.deal(metadata, p.context_parallel_size, mix_of(config.model))


def needed_share(dealt: tuple[Metadata, np.ndarray]) -> float:
    """K/V rows that ranks need of each other over those that others hold: 0 to 1, summed over
    ranks.
    """
    metadata, indices = dealt
    cp, tokens = indices.shape
    # a rank's own rows are seen too, but do not travel
    foreign = sum(
        int(seen.sum() - seen[mine].sum())
        for seen, mine in zip(
            needed_rows(AttentionPlan(indices, metadata, 0)), indices, strict=True
        )
    )
    return foreign / (cp * (cp - 1) * tokens)
