"""Comparison with other trainers: their processes, the table of their abilities, and the
measurement.
"""
