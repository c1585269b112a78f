"""Machines that nobody has: constants of the cost model set by hand, so that a decision can be derived on paper."""

from __future__ import annotations

from megacp.core.context_parallel.auto.predict import KernelCost, Line, Machine, link_names


def machine(
    cp: int,
    heads: int,
    *,
    pair: float = 0.0,
    call: float = 0.0,
    per_byte: float = 0.0,
    latency: float = 0.0,
    overlap: float = 1.0,
) -> Machine:
    """Uniform links; the kernel's backward costs 2.5 times its forward; copies and rows of queries cost nothing."""
    forward, backward = (KernelCost(factor * pair, 0.0, factor * call) for factor in (1.0, 2.5))
    links = {name: Line(latency, per_byte) for name in link_names(cp, heads)}
    return Machine(forward, backward, copy=0.0, overlap=overlap, links=links)
