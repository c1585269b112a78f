"""Mask, kernels, norms on one device."""
