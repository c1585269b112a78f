"""Conversion to and from Hugging Face folders, and generation."""
