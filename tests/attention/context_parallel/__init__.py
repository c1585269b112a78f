"""Tests of layouts, plans, transports and states over ranks."""
