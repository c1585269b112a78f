"""Tests of the dry run's report."""
