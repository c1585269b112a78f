"""Tests of gradient buckets."""
