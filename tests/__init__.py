"""Tests mirror the tree of `megacp`; `ranks.py` runs a function on several ranks."""
