"""Everything around a step: data, checkpoints, monitoring, the loop, and starting ranks.

It imports megacp.engine and the packages below it.
"""
