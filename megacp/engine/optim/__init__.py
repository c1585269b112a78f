"""Optimizers: update rules applied to each rank's slices."""
