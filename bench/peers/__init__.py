"""Comparison with other trainers: their processes, a table of supported grids, and measurements."""
