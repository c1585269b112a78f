"""Tests of megacp/core/ops."""
