"""Costs of a layout by pure arithmetic: parameters, FLOPs, bytes per rank, and the report of a dry run."""
