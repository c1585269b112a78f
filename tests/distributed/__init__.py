"""Tests of megacp/core/distributed."""
