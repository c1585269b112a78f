"""Linears, vocabulary, chunked loss."""
