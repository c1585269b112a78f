"""Packed datasets on disk, and the steps that turn packs into rows."""
