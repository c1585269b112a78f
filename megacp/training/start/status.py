"""Exit statuses of a run besides 0, and 128 and above: a signal ended it before its first step."""

FAILED = 1
"""A failure, or a limit on the numbers of a run that has ended it; nothing was saved after it."""
REFUSED = 2
"""Flags, files or data are wrong; one message says what."""
STOPPED = 3
"""The run stopped early and saved first: start it again to continue."""
