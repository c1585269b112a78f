"""Tests of places, URLs, retries and caches."""
