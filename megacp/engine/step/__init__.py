"""One training step: plan, shard, run, reduce, decide and update."""
