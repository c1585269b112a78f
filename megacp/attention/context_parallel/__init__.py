"""Layouts, plans and transports for attention and recurrent states across cp ranks."""
