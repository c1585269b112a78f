"""Tests of megacp/training."""
