"""Tests that need a CUDA device: `pytest -m gpu`; skipped with the reason elsewhere."""
