"""Checkpoints: tensors by global names, committed by a rename."""
