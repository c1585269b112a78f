"""Each kind of layer described once: its tensors, its work, and what it keeps; without torch, from the config alone."""
