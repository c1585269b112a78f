"""Tests of schedules, their simulation, partition and the runtime."""
