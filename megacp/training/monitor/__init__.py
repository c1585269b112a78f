"""Logs, traces, FLOPs and the console."""
