"""The decoder and the vision towers, written once for all backends."""
