"""Exact attention and recurrent states over context-parallel ranks, for any mask.

A row of tokens is described by `Metadata`: documents, branches and spans. A layout of `LAYOUTS`
deals its tokens to the ranks, and an `AttentionPlan` holds the result for one rank.
`context_parallel_attention(q, k, v, plan, axis)` then attends as one process with the whole row
would.

The package imports torch, numpy and megacp.distributed. It knows no flag and no configuration.
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
