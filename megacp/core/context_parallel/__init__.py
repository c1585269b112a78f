"""Context parallelism: who holds which token, what each pair of ranks exchanges, and the attention that does it."""
