"""Tests of the language and vision models."""
