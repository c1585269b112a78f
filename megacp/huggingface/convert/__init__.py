"""Conversion between megacp and Hugging Face: tensor names, config fields, tokenizers and
adapters.
"""
