"""Measurements and comparisons: what the tools count, time and hold against a reference. No run needs it."""
