"""Slow and obvious references for optimised code of the project."""
