"""Build packed datasets: convert records to documents, and documents to packs, shard by shard.

An interrupted build can be resumed.
"""
