"""Packs on disk, and the way to a row."""
