"""Tests of tensor names, files and tokenizers in conversions to and from Hugging Face folders."""
