"""Tests of megacp/context_parallel."""
