"""Tests of the pipeline room: schedules, simulation, partition, runtime."""
