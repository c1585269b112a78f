"""Everything around a step: data, checkpoints, logs, the loop, and starting ranks.

A `Trainer` is one rank of a run. A `PackedDataset` is read through a `PackedLoader`. The package
imports megacp.engine and the packages below it.
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
