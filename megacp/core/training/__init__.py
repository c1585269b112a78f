"""Training: the loss of a step, the step itself, and the loop around it."""
