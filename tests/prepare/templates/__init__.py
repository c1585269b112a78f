"""Tests of chat templates."""
