"""Contradictions of context parallelism: transports against heads and sizes, layouts against rows."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.ranges import differ
from megacp.core.config.run import RunConfig


def packs_in_a_row(config: RunConfig, world: int) -> int:
    """Data-parallel ranks whose packs make one row."""
    return max(1, config.data_parallel_size(world)) if config.parallel.dynamic_context_parallel else 1


def context_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """What transports and layouts ask of heads, sizes and each other."""
    yield from _heads(config)
    p = config.parallel
    cp, comm, stages = p.context_parallel_size, p.cp_comm_type, p.cp_exchange_stages
    if stages > 1 and world % config.model_ranks == 0:
        others = cp * packs_in_a_row(config, world) - 1
        if comm != "kv_exchange":
            yield f"--cp-exchange-stages {stages} acts only with --cp-comm-type kv_exchange"
        elif stages > others:
            yield (
                f"--cp-exchange-stages {stages}: at --context-parallel-size {cp} there are at most {max(1, others)}, "
                "one for each other rank"
            )
    if p.dynamic_context_parallel and (comm, p.cp_layout) != ("kv_exchange", "balanced"):
        yield (
            "--dynamic-context-parallel keeps documents on few ranks and sends what is needed: it takes --cp-layout "
            f"balanced and --cp-comm-type kv_exchange, this run has {p.cp_layout} and {comm}"
        )
    measures = "auto" in (comm, p.cp_layout)
    if measures and config.training.attention_kernel == "dense":
        yield (
            "--attention-kernel dense is a reference without context parallelism: --cp-comm-type auto has nothing to "
            "choose"
        )


def _heads(config: RunConfig) -> Iterator[str]:
    """Transports that deal heads over ranks: `a2a` over all, `a2a+p2p` over the first of two sizes."""
    p, all_heads, name = config.parallel, config.model.num_attention_heads, "--hierarchical-context-parallel-sizes"
    cp, tp, comm = p.context_parallel_size, p.tensor_model_parallel_size, p.cp_comm_type
    heads, sizes = all_heads // tp, p.hierarchical_context_parallel_sizes
    if comm == "a2a" and differ(heads % cp, 0):
        yield (
            f"--cp-comm-type a2a deals heads over --context-parallel-size {cp}: {heads} heads of a tensor rank "
            f"(--num-attention-heads {all_heads} / tp {tp}) do not divide by it; use a2a+p2p with a first size that "
            f"divides {heads}, p2p or kv_exchange"
        )
    if sizes is None:
        if comm == "a2a+p2p" and cp > 1:
            yield f"--cp-comm-type a2a+p2p needs {name} A B with A x B = {cp}"
        return
    first, second = sizes
    if comm != "a2a+p2p":
        if first * second > 0:
            yield f"{name} {first} {second} acts only with --cp-comm-type a2a+p2p, this run has {comm}"
        return
    if differ(first * second, cp):
        yield f"{name} {first} {second} make {first * second} ranks, --context-parallel-size is {cp}"
    if first > 0 and differ(heads % first, 0):
        yield (
            f"{name} {first} {second}: {heads} heads of a tensor rank do not divide by the first size; make it a "
            f"divisor of {heads}"
        )
