"""The grid and its collectives."""
