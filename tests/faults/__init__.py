"""Faults of a run, a build or a file, and their stated outcome; the long half is marked `faults`."""
