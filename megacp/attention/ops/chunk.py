"""The chunk length of recurrent states."""

from __future__ import annotations

CHUNK = 64
"""Tokens per chunk; a recurrent state is updated chunk by chunk."""
