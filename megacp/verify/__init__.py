"""Two grids compared; GPU report."""
