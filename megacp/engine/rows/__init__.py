"""Rows of tokens: batches, their shards on each rank, and which rank encodes which image."""
