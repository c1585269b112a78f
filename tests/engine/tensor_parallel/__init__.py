"""Tests of linear layers, vocabulary and loss over tensor-parallel ranks."""
