"""Tests of flags and YAML files."""
