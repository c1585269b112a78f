"""The chunk of a row in which a recurrent state moves."""

from __future__ import annotations

CHUNK = 64
"""Tokens of a chunk, in which a state moves."""
