"""Descriptions of all kinds of layers, without torch: tensors, FLOPs and memory."""
