"""Tensor parallelism with sequence parallelism: linears, vocabulary embedding and cross-entropy."""
