"""Gradient buckets and full sharding."""
