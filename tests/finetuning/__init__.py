"""Tests of megacp.finetuning."""
