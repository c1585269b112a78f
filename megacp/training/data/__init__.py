"""Packed datasets on disk, and the path from a pack to a row."""
