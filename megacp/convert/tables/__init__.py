"""What each Hugging Face architecture calls its tensors and config fields: tables, read in either direction."""
