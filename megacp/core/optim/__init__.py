"""AdamW on a rank's slice."""
