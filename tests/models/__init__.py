"""Tests of megacp/models."""
