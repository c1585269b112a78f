"""Mixtures of experts: grids, groups, routes, what is refused."""
