"""Tests of megacp/core/context_parallel."""
