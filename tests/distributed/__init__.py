"""Tests of grids, collectives and fake worlds."""
