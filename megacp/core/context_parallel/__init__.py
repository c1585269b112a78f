"""Layouts, plans, transports."""
