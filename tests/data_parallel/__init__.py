"""Tests of the gradient buckets."""
