"""Tests for building datasets."""
