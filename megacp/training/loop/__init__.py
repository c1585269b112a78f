"""The training loop: reading, stepping, validating, saving and stopping."""
