"""One training step of any model on any grid.

A `RunConfig` says what to run, `check` lists the reasons why it cannot run, and a `ParallelModel`
holds this rank's share of the model and steps it. The package imports megacp.attention,
megacp.distributed and megacp.storage.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "PackedBatch": "rows.batch",
        "ParallelModel": "step.step",
        "RunConfig": "config.run",
        "StepResult": "step.step",
        "check": "checks",
        "parse": "config.cli",
        "require": "checks",
        "with_values": "config.run",
    },
)
