"""A dataset is built here: records to documents, documents to packs, shard by shard,
restartable.
"""
