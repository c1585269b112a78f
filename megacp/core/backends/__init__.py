"""Backends: the factories of layers that models are made of, one object chosen once per run."""
