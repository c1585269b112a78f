"""Building datasets."""
