"""Linear layers, vocabulary and chunked loss over tensor-parallel ranks."""
