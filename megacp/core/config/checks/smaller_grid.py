"""The largest grid that fits a world of any size, for a run that goes on after it has lost machines.

A pure function of the config and the world size: every rank finds the same grid without asking.
"""

from __future__ import annotations

import itertools
import math

from megacp.core.config.checks.check import check
from megacp.core.config.run import RunConfig, Value, fields, flatten, with_values

_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")

_ONE_TP_RANK: dict[str, Value] = {"async_tensor_parallel": False}
_ONE_STAGE: dict[str, Value] = {"num_virtual_stages_per_pipeline_rank": 1, "pipeline_schedule": "1f1b"}


def largest_grid(config: RunConfig, world_size: int) -> tuple[RunConfig, int]:
    """The config with a grid that fits, and the ranks it takes; as given where it fits or --allow-smaller-grid is off.

    The given tp, cp and pp stay where any number of replicas of them fits the world and the global batch. Else they
    shrink to divisors: most ranks first, then most ranks of one model (least memory a rank), then largest tp, cp, pp.
    Instances of the sharded optimizer shrink with the replicas that they divide. One stage has one chunk and no
    schedule of its own, and one tp rank no messages to hide. A transport's groups and stages shrink with cp.
    Where nothing fits, the config comes back as it was: its checks say why.
    """
    if not config.parallel.allow_smaller_grid or not check(config, world_size):
        return config, world_size
    values = flatten(config)
    if any(info.problem(values[name]) for name, info in fields().items()):
        return config, world_size  # no grid makes a number right, and a mistyped one may be huge
    given = tuple(getattr(config.parallel, name) for name in _SIZES)
    most = [min(size, world_size) for size in given]
    divisors = ([d for d in range(high, 0, -1) if size % d == 0] for size, high in zip(given, most, strict=True))
    shapes = itertools.product(*divisors)
    found = []
    for shape in shapes:
        tp, _, pp = shape
        alone = {**(_ONE_TP_RANK if tp == 1 else {}), **(_ONE_STAGE if pp == 1 else {})}
        smaller = with_values(config, {**dict(zip(_SIZES, shape, strict=True)), **alone})
        for replicas in range(world_size // smaller.model_ranks, 0, -1):
            ranks = replicas * smaller.model_ranks
            instances = math.gcd(replicas, max(1, config.parallel.num_distributed_optimizer_instances))
            dependent = {"num_distributed_optimizer_instances": instances, **_transport(config, shape[1], replicas)}
            fitting = with_values(smaller, dependent)
            if not check(fitting, ranks):
                found.append(((shape == given, ranks, smaller.model_ranks, shape), fitting, ranks))
                break
    if not found:
        return config, world_size
    _, chosen, ranks = max(found, key=lambda candidate: candidate[0])
    return chosen, ranks


def _transport(config: RunConfig, cp: int, replicas: int) -> dict[str, Value]:
    """What a transport can have of its sizes on `cp` ranks; sizes that were wrong for the given cp stay wrong."""
    p, sizes = config.parallel, config.parallel.hierarchical_context_parallel_sizes
    others = cp * (replicas if p.dynamic_context_parallel else 1) - 1
    changed: dict[str, Value] = {}
    fits = p.dynamic_context_parallel or p.cp_exchange_stages < p.context_parallel_size
    if p.cp_comm_type == "kv_exchange" and fits:
        changed["cp_exchange_stages"] = min(p.cp_exchange_stages, max(1, others))
    if p.cp_comm_type == "a2a+p2p" and sizes is not None and sizes[0] * sizes[1] == p.context_parallel_size:
        group = math.gcd(sizes[0], cp)
        changed["hierarchical_context_parallel_sizes"] = (group, cp // group) if cp > 1 else None
    return changed
