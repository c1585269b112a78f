"""Tests of logs, timers, utilisation and peak memory."""
