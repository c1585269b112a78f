"""Context parallelism for other people's models: their attention calls over a sharded sequence."""
