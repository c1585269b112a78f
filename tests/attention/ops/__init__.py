"""Tests of masks, kernels and recurrences on one device."""
