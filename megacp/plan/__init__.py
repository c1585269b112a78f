"""The dry run: memory and work of a layout."""
