"""Context parallelism for other people's models: their own attention calls over a sharded sequence."""
