"""Tests of megacp/distributed."""
