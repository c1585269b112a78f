"""The step and the loop."""
