"""Tests of what a dry run reports."""
