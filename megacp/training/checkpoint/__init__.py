"""Checkpoints: tensors under global names, committed with a rename."""
