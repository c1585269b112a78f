"""Compute the memory, messages, FLOPs and shape of a parallel layout without running it.

`describe(config, world_size)` returns the report of `--dry-run`. The package may import
megacp.training and lower packages. The package megacp.plan predicts times.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "describe": "report",
        "sample_packs": "packs",
        "stage_memory": "memory",
        "step_messages": "messages",
    },
)
