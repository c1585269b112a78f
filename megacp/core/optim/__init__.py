"""Rules that step a rank's slices."""
