"""Schedules as data, one loop."""
