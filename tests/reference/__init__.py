"""Slow, obvious references for optimised code of the project."""
