"""All that trains from packs."""
