"""Masks, tile tables, attention kernels, rotary embeddings and recurrences on one device."""
