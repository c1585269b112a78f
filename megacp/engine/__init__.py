"""One training step of any model on any grid.

It imports megacp.attention, megacp.distributed and megacp.storage.
"""
