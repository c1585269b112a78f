"""Data parallelism: flat gradient buckets that are reduced while the backward pass runs."""
