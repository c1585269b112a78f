"""Measurements and peers."""
