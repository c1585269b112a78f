"""Everything that can be wrong with a configuration, found before any process group exists."""
