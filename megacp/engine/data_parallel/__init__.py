"""Data parallelism: gradient buckets and full sharding."""
