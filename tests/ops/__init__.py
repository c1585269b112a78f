"""Tests of megacp/ops."""
