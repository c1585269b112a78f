"""Each kind of layer described once: its tensors, its work and its memory, without torch."""
