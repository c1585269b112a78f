"""Tests of the integration into transformers' Trainer, TRL and Accelerate."""
