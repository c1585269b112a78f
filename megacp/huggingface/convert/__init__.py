"""Conversion between megacp and Hugging Face: tensor names, config fields, tokenizers and
adapters.

In these modules, "the library" is Hugging Face's transformers.
"""
