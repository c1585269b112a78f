"""Tests of megacp.attention."""
