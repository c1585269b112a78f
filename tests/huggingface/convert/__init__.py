"""Tests of names, files and tokenizers between megacp and Hugging Face."""
