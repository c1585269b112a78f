"""What every rank states before the run depends on it, and how a difference is reported.

Statements are compared in the run's store before any process group of the grid exists. Another
grid, size or timeout on one rank is then a message and not a hang.

Only the flags in MAY_DIFFER may differ. They say where a machine keeps its copy of the packs and of
a Hugging Face folder, whose fingerprints are compared instead, and how many threads read packs. All
other flags act on the result, on files or on when ranks meet.
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
"""Flags that may differ from machine to machine."""


class AlikeError(ValueError):
    """A refusal that every rank of the run raises with the same words."""


def statement(config: RunConfig, sources: Sources, device_type: str) -> dict[str, str]:
    """Everything that must be equal on all ranks, by the name that a message gives it."""
    values = {
        flag(name): json.dumps(value)
        for name, value in flatten(config).items()
        if name not in MAY_DIFFER
    }
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
    """Return when all ranks state the same and none has a `problem`; else raise AlikeError on every
    rank.
    """
    mine = json.dumps({"host": rendezvous.host, "stated": stated or {}, "problem": problem})
    verdict = rendezvous.decided_by_rank_0("start", mine, _differences)
    if verdict:
        raise AlikeError(verdict)


def _differences(values: list[str]) -> str:
    """What the ranks do not agree on, in words; empty when they do."""
    reports = [json.loads(value) for value in values]
    problems: dict[str, list[int]] = {}
    for rank, one in enumerate(reports):
        if one["problem"]:
            problems.setdefault(one["problem"], []).append(rank)
    if problems:
        if len(problems) == 1 and len(*problems.values()) == len(reports):
            return next(iter(problems))
        return "\n".join(
            f"{_ranks_and_hosts(ranks, reports)}: {text}" for text, ranks in problems.items()
        )
    lines = []
    for name in dict.fromkeys(name for one in reports for name in one["stated"]):
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(reports):
            groups.setdefault(one["stated"].get(name, "absent"), []).append(rank)
        if len(groups) > 1:
            usual, *others = sorted(groups, key=lambda value: -len(groups[value]))
            odd = ", ".join(
                f"{value} on {_ranks_and_hosts(groups[value], reports)}" for value in others
            )
            lines.append(
                f"  - {name}: {odd}; {usual} on {_ranks_and_hosts(groups[usual], reports)}"
            )
    head = (
        f"the {len(reports)} ranks of this run were not started alike; give all of them the "
        "same flags and software:"
    )
    return "\n".join([head, *lines]) if lines else ""


def _ranks_and_hosts(ranks: list[int], reports: list[dict[str, str]]) -> str:
    """`rank 3 (host b)`."""
    hosts = list(dict.fromkeys(reports[rank]["host"] for rank in ranks))
    return f"{named(ranks)} ({'host' if len(hosts) == 1 else 'hosts'} {listed(hosts, 4)})"
