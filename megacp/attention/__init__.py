"""Exact attention and recurrent states across context-parallel ranks, for any mask.

`Metadata` describes a row of tokens: its documents, branches and spans. A layout from `LAYOUTS`
distributes the tokens among the ranks, and an `AttentionPlan` stores the result for one rank.
`context_parallel_attention(q, k, v, plan, axis)` then computes the same result as a single process
with the whole row.

The package depends only on torch, numpy and megacp.distributed. It reads no configuration or flags.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "AttentionPlan": "context_parallel.plan",
        "LAYOUTS": "context_parallel.layout",
        "Metadata": "ops.mask",
        "Reach": "ops.mask",
        "TRANSPORTS": "context_parallel.transports",
        "allowed": "ops.mask",
        "context_parallel_attention": "context_parallel.attention",
        "select_transport": "context_parallel.attention",
    },
)
