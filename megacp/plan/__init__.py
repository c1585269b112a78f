"""The dry run: memory and work of a layout; the plan: the best of all of them."""
