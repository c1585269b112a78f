"""Tests of packed datasets and their loader."""
