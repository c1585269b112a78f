"""The optimizer: learning-rate schedule, global gradient norm, AdamW on this rank's slice of every bucket."""
