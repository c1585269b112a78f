"""Tests of megacp.engine."""
