"""megacp: training of language models on long packed sequences over a grid of DP x TP x PP x CP ranks.

Key property: the attention mask and the placement of tokens are data (a few integers per token), planned once per
microbatch on the host; everything that moves tensors only executes the plan. Rejected: masks and layouts wired into
each parallel strategy, which makes every strategy exact for some masks only.
"""

__version__ = "0.1.0"
