"""Check that grids train like one process, simulate steps without a GPU, and test a GPU."""
