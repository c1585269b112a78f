"""Exit statuses of a run besides 0, and 128 + N after signal N before the first step."""

FAILED = 1
"""The run failed, or stopped because its numbers exceeded a limit. Nothing was saved after that."""
REFUSED = 2
"""Flags, files or data are wrong; one message explains why."""
STOPPED = 3
"""The run stopped early and saved first: start it again to continue."""
