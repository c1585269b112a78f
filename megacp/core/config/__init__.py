"""Flags, YAML, checks."""
