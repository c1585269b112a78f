"""Layouts, plans and transports: attention and states over ranks."""
