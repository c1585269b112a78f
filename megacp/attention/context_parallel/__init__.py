"""Layouts, plans and transports for attention and recurrent states over context-parallel ranks."""
