"""Start of ranks: how a process learns its rank and meets the other ranks."""
