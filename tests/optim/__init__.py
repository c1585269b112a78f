"""Tests of the optimizer room."""
