"""Tests of megacp.prepare."""
