"""Records become packs."""
