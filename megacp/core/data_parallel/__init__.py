"""Gradient buckets, full sharding."""
