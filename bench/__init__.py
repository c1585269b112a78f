"""Measurements of our code and comparisons with other trainers."""
