"""Tests of megacp/core/data."""
