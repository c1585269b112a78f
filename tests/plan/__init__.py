"""Tests of costs, memory and the dry run's text."""
