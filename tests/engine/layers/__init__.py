"""Tests of the table of layers."""
