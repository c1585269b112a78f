"""Partition of the layers into virtual stages: contiguous parts that minimise the largest cost.

Equal layer counts do not mean equal work, because the first virtual stage also has the embedding
and the last one the head. Costs are first converted to integers. This is exact, because every float
is an integer divided by a power of two. Exact comparisons ensure that all ranks compute the same
partition on any machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def partition(
    layer_costs: Sequence[float], first_extra: float, last_extra: float, num_virtual_stages: int
) -> list[range]:
    """Return the layers of each virtual stage, in order; every virtual stage gets at least one.

    `layer_costs[i]` is the cost of layer i. `first_extra` is the additional cost of the first
    virtual stage (embedding), and `last_extra` the additional cost of the last one (final norm,
    head, loss). All costs have the same unit and are finite and >= 0.

    The partition minimises the largest cost of a part. Ties are broken in favour of the smallest
    sum of squared costs, then the smallest sum of squared layer counts, and then fewer layers in
    earlier parts, because earlier stages keep more activations.
    """
    assert len(layer_costs) >= num_virtual_stages > 0, (
        f"{len(layer_costs)} layers are not enough for {num_virtual_stages} virtual stages, each "
        "of which needs at least one"
    )
    fractions = [Fraction(cost) for cost in (*layer_costs, first_extra, last_extra)]
    # multiplying by the common denominator makes all costs integers
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    *costs, first, last = (int(fraction * unit) for fraction in fractions)
    # parts are contiguous, so the extra costs can be added to the first and the last layer
    costs[0] += first
    costs[-1] += last
    return _evenest(costs, num_virtual_stages, _smallest_limit(costs, num_virtual_stages))


def _smallest_limit(costs: list[int], num_parts: int) -> int:
    """Return the smallest cost limit that `num_parts` contiguous parts can respect.

    The search also accepts fewer parts: with at least `num_parts` layers, a part can always be
    split further, and splitting does not increase the largest cost.
    """
    # binary search between one layer per part and all layers in one part
    low = max(costs)
    high = sum(costs)
    while low < high:
        # fill the parts greedily
        middle = (low + high) // 2
        parts = 1
        filled = 0  # cost of the last part so far
        for cost in costs:
            if filled + cost > middle:
                parts += 1
                filled = 0
            filled += cost
        if parts <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _evenest(costs: list[int], num_parts: int, limit: int) -> list[range]:
    """Return the most even partition into exactly `num_parts` parts that cost at most `limit`.

    This is dynamic programming, starting at the last part. For layers i and later in `parts` parts,
    `best[i]` is (sum of squared costs, sum of squared counts, end of the first part).
    """
    num_layers = len(costs)
    best: dict[int, tuple[int, int, int]] = {num_layers: (0, 0, num_layers)}
    # ends[j][i]: end of the first of j + 1 parts that begin at layer i
    ends: list[dict[int, int]] = []
    for parts in range(1, num_parts + 1):
        longer = {}
        for begin in range(num_parts - parts, num_layers - parts + 1):
            options = []
            cost = 0
            for end in range(begin + 1, num_layers - parts + 2):
                cost += costs[end - 1]
                if cost > limit:
                    break
                if end in best:
                    squares, counts, _ = best[end]
                    options.append((squares + cost * cost, counts + (end - begin) ** 2, end))
            if options:
                longer[begin] = min(options)
        ends.append({begin: choice[2] for begin, choice in longer.items()})
        best = longer
    # follow the stored ends from the first layer
    cuts = [0]
    for parts in range(num_parts, 0, -1):
        cuts.append(ends[parts - 1][cuts[-1]])
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]
