"""Tests of megacp/core/tensor_parallel."""
