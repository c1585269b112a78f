"""The decoder, written once against a backend."""
