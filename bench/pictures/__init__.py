"""The pictures of README.md and docs/: drawn from real plans, schedules and files, so that they
cannot disagree.
"""
