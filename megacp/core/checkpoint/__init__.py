"""Tensors by global names, committed by a rename."""
