"""Memory and work of a layout, without running it."""
