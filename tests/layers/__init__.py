"""Tests of `megacp.core.layers`."""
