"""Memory, messages, FLOPs and shape of a layout, computed without running it.

`describe(config, world_size)` is the report of `--dry-run`. The package imports megacp.training and
the packages below it. Seconds are predicted by megacp.plan.
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
