"""The decoder and the vision towers, written once against a backend."""
