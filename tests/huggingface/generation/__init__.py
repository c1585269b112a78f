"""Tests of megacp/huggingface/generation."""
