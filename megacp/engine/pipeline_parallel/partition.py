"""Cut the layers into virtual stages by cost: contiguous parts, of which the dearest is as cheap as
possible, exactly.

The embedding costs time on the first virtual stage and the head on the last one, so equal layer
counts are not equal work. Costs become integers first (every float is a fraction of a power of
two). Then "cheapest" and "equal" are exact, and all ranks cut alike on any machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def partition(
    layer_costs: Sequence[float], first_extra: float, last_extra: float, num_virtual_stages: int
) -> list[range]:
    """Layers of each virtual stage, in order; every virtual stage gets at least one.

    `layer_costs[i]` is the cost of layer i. `first_extra` is what the first virtual stage bears
    besides its layers (embedding), `last_extra` what the last one bears (final norm, head, loss).
    All are in one unit, finite and >= 0. The largest cost of a part is minimal. Among such cuts the
    sum of the squared costs is minimal, then that of the squared layer counts (even parts). Then
    earlier parts hold fewer layers, since they hold more activations.
    """
    assert len(layer_costs) >= num_virtual_stages > 0, (
        f"{len(layer_costs)} layers for {num_virtual_stages} stages"
    )
    fractions = [Fraction(cost) for cost in (*layer_costs, first_extra, last_extra)]
    unit = math.lcm(
        *(fraction.denominator for fraction in fractions)
    )  # its inverse makes all of them whole numbers
    *costs, first, last = (int(fraction * unit) for fraction in fractions)
    # what the first and the last virtual stage bear, the first and the last layer bear: the parts
    # are contiguous
    costs[0] += first
    costs[-1] += last
    return _evenest(costs, num_virtual_stages, _smallest_limit(costs, num_virtual_stages))


def _smallest_limit(costs: list[int], num_parts: int) -> int:
    """Smallest L such that the costs fall into at most `num_parts` contiguous parts of at most L
    each.

    At most is enough: with at least `num_parts` layers a part can always be split further, and
    costs do not grow by it.
    """
    low, high = max(costs), sum(costs)  # one layer in a part, all layers in one
    while low < high:
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
    """The evenest cut into exactly `num_parts` parts of at most `limit`, by dynamic programming
    from the last part.

    `best[i]` is (sum of squared costs, sum of squared counts, end of the first part) for layers i..
    in `k` parts.
    """
    num_layers = len(costs)
    best: dict[int, tuple[int, int, int]] = {num_layers: (0, 0, num_layers)}
    ends: list[
        dict[int, int]
    ] = []  # ends[j][i]: end of the first of j + 1 parts that begin at layer i
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
    cuts = [0]
    for parts in range(num_parts, 0, -1):
        cuts.append(ends[parts - 1][cuts[-1]])
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]
