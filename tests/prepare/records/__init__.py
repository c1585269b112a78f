"""Tests of records and their forms."""
