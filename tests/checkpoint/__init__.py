"""Tests of the checkpoint room."""
