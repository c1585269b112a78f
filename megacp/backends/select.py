"""Which backend a run uses: one table, read once.

Key property: the choice is made before any layer exists. Rejected: layers that test for optional packages.
"""

from __future__ import annotations

from megacp.backends.base import Backend
from megacp.backends.native import NativeBackend
from megacp.config.run import RunConfig
from megacp.context_parallel.stopwatch import Stopwatch
from megacp.distributed.grid import ProcessGrid


def select_backend(config: RunConfig, grid: ProcessGrid, watch: Stopwatch | None = None) -> Backend:
    """The backend of a checked config, bound to the grid; `watch` times its core attention."""
    return NativeBackend(
        grid,
        config.parallel,
        config.model,
        dtype=config.training.dtype,
        attention_kernel=config.training.attention_kernel,
        vision=config.vision,
        watch=watch,
    )
