"""Tests of the descriptions of layers."""
