# Types of the names that __init__.py imports when they are first used.
from megacp.engine.checks import check as check
from megacp.engine.checks import require as require
from megacp.engine.config.cli import parse as parse
from megacp.engine.config.run import RunConfig as RunConfig
from megacp.engine.config.run import with_values as with_values
from megacp.engine.rows.batch import PackedBatch as PackedBatch
from megacp.engine.step.step import ParallelModel as ParallelModel
from megacp.engine.step.step import StepResult as StepResult
