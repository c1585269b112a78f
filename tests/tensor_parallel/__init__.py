"""Tests of megacp/tensor_parallel."""
