"""Tests of megacp/core/models."""
