"""Checkpoints: global names, payload files, and the commit that makes a directory count."""
