"""Tests of megacp/verify."""
