"""The sharded optimizer, its update rules and the learning rate schedule."""
