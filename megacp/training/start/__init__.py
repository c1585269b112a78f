"""Start of a run: how a process obtains its rank and connects to the other ranks."""
