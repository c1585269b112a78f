"""Tests of packed datasets on disk."""
