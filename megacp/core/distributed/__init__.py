"""The process grid, its collectives and their duals: the only room that talks to `torch.distributed`."""
