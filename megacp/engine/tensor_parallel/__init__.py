"""Tensor-parallel linear layers and vocabulary tables, and the chunked loss."""
