"""Tests of megacp/measure."""
