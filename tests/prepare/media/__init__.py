"""Tests of images and videos."""
