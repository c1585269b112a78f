"""A training step: plan, shard, run, reduce, decide, update."""
