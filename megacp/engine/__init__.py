"""One training step of any model on any grid.

A `RunConfig` describes a run, `check` returns the reasons why it cannot start, and a
`ParallelModel` contains this rank's part of the model and runs training steps. Of megacp, this
package imports only megacp.attention, megacp.distributed and megacp.storage.
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
