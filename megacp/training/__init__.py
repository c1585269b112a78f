"""Everything around a training step: data, checkpoints, logs, the loop, and the start of ranks.

A `Trainer` runs one rank. It reads a `PackedDataset` through a `PackedLoader`. This package may
import megacp.engine and lower packages.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "PackedDataset": "data.reader",
        "PackedLoader": "data.loader",
        "Trainer": "loop.trainer",
        "collate": "data.collate",
        "load_checkpoint": "checkpoint.commit",
        "step_batches": "data.loader",
    },
)
