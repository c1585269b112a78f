"""Mixtures of experts: grids, groups, routes and rejected settings."""
