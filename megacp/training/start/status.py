"""Exit statuses of a run other than 0; signal N before the first step gives 128 + N."""

# The run failed, or a health check stopped it. Nothing was saved afterwards.
FAILED = 1
# Flags, files or data are wrong; one message explains why.
REFUSED = 2
# The run stopped early and saved first: start it again to continue.
STOPPED = 3
