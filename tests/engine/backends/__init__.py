"""Tests of native and Transformer Engine layers."""
