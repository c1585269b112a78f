"""Chat templates."""
