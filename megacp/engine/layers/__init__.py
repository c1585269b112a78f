"""Descriptions of all kinds of layers (tensors, FLOPs and memory), without torch."""
