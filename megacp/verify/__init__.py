"""Two grids compared, and reports of GPUs."""
