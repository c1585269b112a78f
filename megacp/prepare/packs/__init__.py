"""Build packed datasets: records become documents, and documents become packs, shard by shard.

An interrupted build can be restarted.
"""
