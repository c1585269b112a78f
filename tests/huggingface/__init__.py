"""Tests of megacp.huggingface."""
