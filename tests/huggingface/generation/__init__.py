"""Tests of megacp/core/training."""
