"""Context parallelism inside transformers' Trainer, TRL and Accelerate."""
