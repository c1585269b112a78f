"""Training on long packed sequences over DP x TP x PP x CP ranks."""

__version__ = "0.1.0"
