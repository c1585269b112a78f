"""Files and object stores: durable writes, locks, hashes, and reading from URLs. It imports nothing of megacp."""
