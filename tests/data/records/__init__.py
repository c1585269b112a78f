"""Tests of megacp/data."""
