"""Slow, obvious twins of what the project computes cleverly."""
