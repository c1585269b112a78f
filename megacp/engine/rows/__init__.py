"""Rows of tokens: batches, their shards on each rank, and the assignment of images to ranks."""
