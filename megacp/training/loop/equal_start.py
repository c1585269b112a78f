"""Check that all ranks start with the same flags, data and software, and report differences.

Ranks exchange these values through the run's store, before the grid's process groups exist. If a
rank has a different grid, size or timeout, the run ends with a message instead of hanging.

Only the flags in MAY_DIFFER may differ: paths of a machine's own copy of the packs or of a Hugging
Face folder, and the number of reader threads. For these copies, fingerprints are compared instead
of paths. All other flags affect the results, the written files or the collectives.
"""

from __future__ import annotations

import json
import platform

import torch

import megacp
from megacp.engine.config.run import RunConfig, flag, flatten
from megacp.storage.files import source_digest
from megacp.storage.wording import listed
from megacp.training.loop.sources import Sources
from megacp.training.start.launch import Rendezvous, named

MAY_DIFFER = (
    "data_path",
    "valid_data_path",
    "load_hf",
    "vision_from_hf",
    "load_adapter",
    "num_workers",
)
"""Flags that may differ between machines."""


class AlikeError(ValueError):
    """Error that every rank of the run raises with the same message."""


def statement(config: RunConfig, sources: Sources, device_type: str) -> dict[str, str]:
    """Return the values that must be equal on all ranks, by their names in messages."""
    values = {}
    for name, value in flatten(config).items():
        if name not in MAY_DIFFER:
            values[flag(name)] = json.dumps(value)
    valid = getattr(sources.valid, "fingerprint", "none")
    return values | {
        "the fingerprint of --data-path": sources.fingerprint,
        "the fingerprint of --valid-data-path": valid,
        "the version of megacp": megacp.__version__,
        "the source of megacp (sha256)": source_digest(),
        "the version of torch": str(torch.__version__),
        "the version of Python": platform.python_version(),
        "the device": device_type,
    }


def require_equal_start(
    rendezvous: Rendezvous, stated: dict[str, str] | None, problem: str = ""
) -> None:
    """Raise AlikeError on every rank if ranks state different values or any rank has a `problem`.

    The message is the same on all ranks.
    """
    mine = json.dumps({"host": rendezvous.host, "stated": stated or {}, "problem": problem})
    verdict = rendezvous.decided_by_rank_0("start", mine, _differences)
    if verdict:
        raise AlikeError(verdict)


def _differences(values: list[str]) -> str:
    """Return a message about problems or differences, or "".

    `values` are the JSON reports of all ranks, in rank order.
    """
    reports = [json.loads(value) for value in values]  # one per rank
    problems: dict[str, list[int]] = {}
    for rank, one in enumerate(reports):
        if one["problem"]:
            problems.setdefault(one["problem"], []).append(rank)
    if problems:
        # a problem on all ranks needs no list of ranks
        if len(problems) == 1 and len(*problems.values()) == len(reports):
            return next(iter(problems))
        lines = []
        for text, ranks in problems.items():
            lines.append(f"{_ranks_and_hosts(ranks, reports)}: {text}")
        return "\n".join(lines)
    lines = []
    # a dict keeps the order in which ranks first state a value
    names = dict[str, None]()
    for one in reports:
        names |= dict.fromkeys(one["stated"])
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(reports):
            groups.setdefault(one["stated"].get(name, "absent"), []).append(rank)
        if len(groups) == 1:
            continue
        # the most common value comes last, after the deviating values
        usual, *deviating = sorted(groups, key=lambda value: -len(groups[value]))
        parts = [f"{value} on {_ranks_and_hosts(groups[value], reports)}" for value in deviating]
        usual_part = f"{usual} on {_ranks_and_hosts(groups[usual], reports)}"
        lines.append(f"  - {name}: {', '.join(parts)}; {usual_part}")
    head = (
        f"the {len(reports)} ranks of this run were started differently; start all of them with "
        "the same flags, data and software:"
    )
    return "\n".join([head, *lines]) if lines else ""


def _ranks_and_hosts(ranks: list[int], reports: list[dict[str, str]]) -> str:
    """Return text such as `rank 3 (host b)`."""
    hosts = list(dict.fromkeys(reports[rank]["host"] for rank in ranks))
    word = "host" if len(hosts) == 1 else "hosts"
    return f"{named(ranks)} ({word} {listed(hosts, 4)})"
