"""Contradictions of context parallelism: transports against heads and sizes, layouts against rows.

Key property: rows of the same table as `checks`, in a file of their own because they are about one subject. Rejected:
letting transports refuse when they are built, which is after the process group exists and tells one reason only.
"""

from __future__ import annotations

from megacp.config.checks.rules import Rule, registrar
from megacp.config.run import RunConfig

CONTEXT_RULES: list[Rule] = []
_rule = registrar(CONTEXT_RULES)

_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_SIZES = "hierarchical_context_parallel_sizes"


def _heads_of_a_rank(config: RunConfig) -> int:
    return config.model.num_attention_heads // config.parallel.tensor_model_parallel_size


@_rule("cp_comm_type", "num_attention_heads", _TP, _CP)
def _heads_over_a2a(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    heads = _heads_of_a_rank(config)
    if p.cp_comm_type != "a2a" or p.context_parallel_size <= heads:
        return None
    return (
        f"--cp-comm-type a2a gives every rank a head of its own: --context-parallel-size {p.context_parallel_size} is "
        f"above {heads} heads of a tensor rank (--num-attention-heads {config.model.num_attention_heads} / tp "
        f"{p.tensor_model_parallel_size}); use a2a+p2p with a first size of at most {heads}, p2p or kv_exchange"
    )


@_rule("cp_comm_type", _SIZES, _CP)
def _hierarchy_is_the_degree(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    sizes, cp = p.hierarchical_context_parallel_sizes, p.context_parallel_size
    if p.cp_comm_type != "a2a+p2p" or (sizes is None and cp == 1):
        return None
    if sizes is None:
        return f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A B with A x B = {cp}"
    if sizes[0] * sizes[1] == cp:
        return None
    return (
        f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} make {sizes[0] * sizes[1]} ranks, "
        f"--context-parallel-size is {cp}"
    )


@_rule("cp_comm_type", _SIZES, "num_attention_heads", _TP, _CP)
def _heads_over_hierarchy(config: RunConfig, world: int) -> str | None:
    sizes, heads = config.parallel.hierarchical_context_parallel_sizes, _heads_of_a_rank(config)
    if config.parallel.cp_comm_type != "a2a+p2p" or sizes is None or sizes[0] <= heads:
        return None
    return (
        f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]}: {sizes[0]} ranks of a group need as many heads, "
        f"a tensor rank has {heads}; make the first size at most {heads}"
    )


@_rule("cp_comm_type", _SIZES)
def _hierarchy_is_for_a2a_p2p(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    sizes = p.hierarchical_context_parallel_sizes
    if sizes is None or p.cp_comm_type == "a2a+p2p":
        return None
    return (
        f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} acts only with --cp-comm-type a2a+p2p, "
        f"this run has {p.cp_comm_type}"
    )


@_rule("cp_comm_type", "cp_exchange_stages", "dynamic_context_parallel", _TP, _PP, _CP)
def _stages_are_for_the_exchange(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    if p.cp_exchange_stages == 1 or world % config.model_ranks:
        return None
    if p.cp_comm_type != "kv_exchange":
        return f"--cp-exchange-stages {p.cp_exchange_stages} acts only with --cp-comm-type kv_exchange"
    ranks = p.context_parallel_size * (config.data_parallel_size(world) if p.dynamic_context_parallel else 1)
    if p.cp_exchange_stages < ranks:
        return None
    return (
        f"--cp-exchange-stages {p.cp_exchange_stages}: at --context-parallel-size {p.context_parallel_size} there are "
        f"at most {max(1, ranks - 1)}, one for each other rank"
    )


@_rule("dynamic_context_parallel", "cp_comm_type", "cp_layout")
def _dynamic_exchanges_what_is_needed(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    if not p.dynamic_context_parallel or (p.cp_comm_type, p.cp_layout) == ("kv_exchange", "balanced"):
        return None
    return (
        f"--dynamic-context-parallel keeps documents on few ranks and sends what is needed: it takes --cp-layout "
        f"balanced and --cp-comm-type kv_exchange, this run has {p.cp_layout} and {p.cp_comm_type}"
    )


@_rule("cp_comm_type", "cp_layout", "cp_calibration")
def _calibration_is_for_auto(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    if p.cp_calibration is None or "auto" in (p.cp_comm_type, p.cp_layout):
        return None
    return f"--cp-calibration {p.cp_calibration} acts only with --cp-comm-type auto or --cp-layout auto"


@_rule("attention_kernel", "cp_comm_type", "cp_layout")
def _auto_measures_a_real_kernel(config: RunConfig, world: int) -> str | None:
    p = config.parallel
    if config.training.attention_kernel != "dense" or "auto" not in (p.cp_comm_type, p.cp_layout):
        return None
    return (
        "--attention-kernel dense is a reference without context parallelism: --cp-comm-type auto has nothing to choose"
    )
