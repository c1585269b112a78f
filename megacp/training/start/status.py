"""Exit statuses of a run besides 0, and 128 + N after signal N before the first step."""

# The run failed, or stopped because its numbers exceeded a limit. Nothing was saved after that.
FAILED = 1
# Flags, files or data are wrong; one message explains why.
REFUSED = 2
# The run stopped early and saved first: start it again to continue.
STOPPED = 3
