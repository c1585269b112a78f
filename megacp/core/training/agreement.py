"""What every rank states before the run depends on it, and how a difference is told.

Key property: statements are compared in the run's store before any process group of the grid exists. Another grid, size
or timeout on one rank is then a message and not a hang. Rejected: a hash alone, which says that ranks differ but not in
what.

Only the flags in MAY_DIFFER may differ. They say where a machine keeps its copy of the packs and of a Hugging Face
folder, whose fingerprints are compared instead, and how many threads read packs. All other flags act on the result, on
files or on when ranks meet.
"""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
from pathlib import Path

import torch

import megacp
from megacp.core.checkpoint.directory import LATEST_FILE
from megacp.core.config.run import RunConfig, flag, flatten
from megacp.core.distributed.launch import Meeting, named
from megacp.core.storage.files import seen, source_digest
from megacp.core.storage.place import Place, place_of, read_content, write_content
from megacp.core.storage.wording import listed
from megacp.core.training.sources import Sources

MAY_DIFFER = (
    "data_path",
    "valid_data_path",
    "load_hf",
    "vision_from_hf",
    "num_workers",
)
"""Flags that may differ from machine to machine."""
_LATE_SECONDS = 40.0
"""How long another machine may see a file late on NFS: its caches of names hold for 30 s."""


class AlikeError(ValueError):
    """A refusal that every rank of the run raises with the same words."""


def statement(config: RunConfig, sources: Sources, device_type: str) -> dict[str, str]:
    """Everything that must be equal on all ranks, by the name that a message gives it."""
    values = {flag(name): json.dumps(value) for name, value in flatten(config).items() if name not in MAY_DIFFER}
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


def require_agreement(meeting: Meeting, stated: dict[str, str] | None, problem: str = "") -> None:
    """Return when all ranks state the same and none has a `problem`; else raise AlikeError on every rank."""
    mine = json.dumps({"host": meeting.host, "stated": stated or {}, "problem": problem})
    verdict = meeting.judged("start", mine, _differences)
    if verdict:
        raise AlikeError(verdict)


def require_shared_folder(meeting: Meeting, folder: str | None, seconds: float = _LATE_SECONDS) -> None:
    """Return when every rank sees a file that rank 0 writes into `folder`, made where there is none (None: no folder).

    Raises AlikeError on every rank, naming the ranks and machines that do not see it within `seconds`.
    """
    if folder is None or meeting.size == 1:
        return
    place = place_of(folder)
    token = (
        place / f".{LATEST_FILE}.{secrets.token_hex(6)}.partial"
    )  # what a crash leaves of this name is removed with its like
    name, problem = "", ""
    if meeting.rank == 0:
        try:
            if isinstance(place, Path):
                place.mkdir(parents=True, exist_ok=True)
            write_content(token, token.name.encode())
            name = token.name
        except (OSError, ValueError) as error:
            problem = f"cannot be written by rank 0 on {meeting.host}: {getattr(error, 'strerror', None) or error}"
    try:
        name = meeting.judged("token", name, lambda values: values[0])
        if name and meeting.rank != 0:
            problem = _unseen(place, name, seconds)
        seen_by = json.dumps({"host": meeting.host, "problem": problem})
        verdict = meeting.judged("folder", seen_by, lambda values: _blind(folder, values), also=seconds)
    finally:
        with contextlib.suppress(OSError, ValueError):  # it could not be made, or the directory has gone
            if meeting.rank == 0:
                token.unlink()
    if verdict:
        raise AlikeError(verdict)


def _unseen(folder: Place, name: str, seconds: float) -> str:
    """Why this rank does not see rank 0's file; empty when it does."""

    def look() -> bytes:
        if isinstance(folder, Path):
            place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
            list(place.iterdir())  # has NFS ask its server instead of a cache that remembers what was missing
        return read_content(folder / name)

    try:
        content = seen(look, seconds)
    except (OSError, ValueError) as error:
        return f"does not see it ({getattr(error, 'strerror', None) or error})"
    return "" if content == name.encode() else "sees another content"


def _blind(folder: str, values: list[str]) -> str:
    told = [json.loads(value) for value in values]
    failed = {rank: text for rank, text in enumerate(told) if text["problem"]}
    if not failed:
        return ""
    if 0 in failed:
        return f"--save {folder} {failed[0]['problem']}"
    by_host: dict[tuple[str, str], list[int]] = {}
    for rank, text in failed.items():
        by_host.setdefault((text["host"], text["problem"]), []).append(rank)
    lines = [f"  - {named(ranks)} on {host} {problem}" for (host, problem), ranks in by_host.items()]
    head = f"--save {folder} is not one directory for all machines: rank 0 on {told[0]['host']} wrote a file there, and"
    return "\n".join([head, *lines, "use a file system that all machines share, and a path that is the same on all"])


def _differences(values: list[str]) -> str:
    """What the ranks do not agree on, in words; empty when they do."""
    told = [json.loads(value) for value in values]
    problems: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        if one["problem"]:
            problems.setdefault(one["problem"], []).append(rank)
    if problems:
        if len(problems) == 1 and len(*problems.values()) == len(told):
            return next(iter(problems))
        return "\n".join(f"{_places(ranks, told)}: {text}" for text, ranks in problems.items())
    lines = []
    for name in dict.fromkeys(name for one in told for name in one["stated"]):
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            groups.setdefault(one["stated"].get(name, "absent"), []).append(rank)
        if len(groups) > 1:
            usual, *others = sorted(groups, key=lambda value: -len(groups[value]))
            odd = ", ".join(f"{value} on {_places(groups[value], told)}" for value in others)
            lines.append(f"  - {name}: {odd}; {usual} on {_places(groups[usual], told)}")
    head = f"the {len(told)} ranks of this run were not started alike; give all of them the same flags and software:"
    return "\n".join([head, *lines]) if lines else ""


def _places(ranks: list[int], told: list[dict[str, str]]) -> str:
    """`rank 3 (host b)`."""
    hosts = list(dict.fromkeys(told[rank]["host"] for rank in ranks))
    return f"{named(ranks)} ({'host' if len(hosts) == 1 else 'hosts'} {listed(hosts, 4)})"
