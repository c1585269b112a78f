"""Comparison of two grids, fake steps, and the report of a GPU machine."""
