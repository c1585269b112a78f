"""Names of tensors and config fields of each Hugging Face architecture: tables, read in either direction."""
