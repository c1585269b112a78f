"""Tensor parallelism with sequence parallelism: linears, vocabulary embedding, a head's loss in chunks."""
