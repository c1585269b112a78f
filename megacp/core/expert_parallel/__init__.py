"""Mixtures of experts: a router, rows that travel to the ranks of their experts and back, and the experts."""
