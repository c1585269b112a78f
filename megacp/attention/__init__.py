"""Exact attention and recurrent states over context-parallel ranks, for any mask.

It imports torch, numpy and megacp.distributed.
"""
