"""A part of the launcher's store that no earlier life of the run has written to.

Key property: after a restart torchrun gives the new ranks the old store, which holds addresses of dead processes under
the names that new ones look up. In torch 2.13 the agent keeps one store for its life. So the ranks first agree on a new
name, which contains a random word of each rank. Rejected: TORCHELASTIC_RESTART_COUNT as that name, which differs
between machines once one of them has failed alone.

A word also says where its process runs and how many ranks it expects. It reveals a rank number that was given twice, a
rank that never came, and two world sizes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time

import torch.distributed as dist

from megacp.core.distributed.failure import named

_ROOM = "megacp_generation"
_LINGER = 2.0
"""Seconds that a refused rank 0 stays for the others to read why: its process may hold the store."""
_SHOWN = 16
"""Ranks that a message names before it only counts."""


def fresh_store(store: dist.Store, rank: int, size: int, seconds: float, by_hand: bool = True) -> dist.Store:
    """The agreed part of `store`; every rank calls it. Raises ValueError when not all have come after `seconds`.

    Rank 0 proposes the words it finds, each rank agrees to a proposal that holds its own, and rank 0 settles it when
    all have. An earlier life's agreement holds another word of rank 0, so it is never taken for this one. A rank whose
    number another process has taken ends; unless the numbers were given `by_hand`, it was only slow to be replaced and
    the others go on without it.
    """
    mine = f"{secrets.token_hex(8)} {size} {socket.gethostname()} {os.getpid()}"
    store.set(f"{_ROOM}/word/{rank}", mine)
    deadline = time.monotonic() + seconds
    agreed = proposal = mark = ""
    while time.monotonic() < deadline:
        if rank == 0:
            found = ",".join(_read(store, f"word/{other}") for other in range(size))
            if found != proposal:
                proposal = found
                store.set(f"{_ROOM}/proposal", proposal)
                store.add(f"{_ROOM}/proposals", 1)
        elif (newest := str(store.add(f"{_ROOM}/proposals", 0))) != mark:  # many ranks: fetched once, not in each round
            mark, proposal = newest, _read(store, "proposal")
        words = proposal.split(",")
        if len(words) == size and words[rank] == mine:
            name = hashlib.sha256(proposal.encode()).hexdigest()[:16]
            if name != agreed:
                store.set(f"{_ROOM}/agreed/{rank}", name)
                agreed = name
            if rank == 0 and all(_read(store, f"agreed/{other}") == name for other in range(size)):
                store.set(f"{_ROOM}/settled", name)
            if _read(store, "settled") == name:
                return dist.PrefixStore(f"{_ROOM}/{name}", store)
        if twin := _twin(store, rank, mine):
            if by_hand:
                _refuse(store, rank, size, twin)
            raise ValueError(twin)
        if told := _refusal(store, mine):
            _let_others_read(rank)
            raise ValueError(told)
        time.sleep(0.02 * max(1.0, size / 128))
    told = f"rank {rank} on {socket.gethostname()} waited {seconds:g} s for the {size} ranks of this run to start"
    told += _absent(store, size, agreed)
    _refuse(store, rank, size, told)
    raise ValueError(told)


def _twin(store: dist.Store, rank: int, mine: str) -> str:
    """What to say when another process has taken this rank's number; else empty."""
    word = _read(store, f"word/{rank}")
    if word == mine:
        return ""
    here, there = (" process ".join(text.split(" ")[2:]) for text in (mine, word))
    return (
        f"rank {rank} was started twice, on {here} and on {there}: give each process its own RANK, "
        f"and end what is left of an earlier run"
    )


def _refuse(store: dist.Store, rank: int, size: int, text: str) -> None:
    """Tell `text` to the ranks that wait now: it is for those whose words are there."""
    words = ",".join(_read(store, f"word/{other}") for other in range(size))
    store.set(f"{_ROOM}/refusal", f"{words}\n{text}")
    _let_others_read(rank)


def _let_others_read(rank: int) -> None:
    """Rank 0 has the store in its process, so it leaves last."""
    if rank == 0:
        time.sleep(_LINGER)


def _refusal(store: dist.Store, mine: str) -> str:
    """What another rank has told to the ranks of this life; what is left of an earlier one is not for them."""
    words, _, text = _read(store, "refusal").partition("\n")
    return text if mine in words.split(",") else ""


def _absent(store: dist.Store, size: int, agreed: str) -> str:
    """Who is missing, and who expects another number of ranks, in words."""
    words = {rank: _read(store, f"word/{rank}") for rank in range(size)}
    missing = [rank for rank, word in words.items() if not word]
    if agreed and not missing:
        missing = [rank for rank in words if _read(store, f"agreed/{rank}") != agreed]
    sizes = {rank: word.split(" ")[1] for rank, word in words.items() if word}
    others = [f"rank {rank} has WORLD_SIZE={found}" for rank, found in sizes.items() if found != str(size)]
    parts = [f"no word from {named(missing)}"] if missing else []
    parts += others[:_SHOWN]
    advice = "start every rank, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    return f": {'; '.join(parts)}; {advice}" if parts else f"; {advice}"


def _read(store: dist.Store, key: str) -> str:
    """The value of a key, empty where there is none yet."""
    return store.get(f"{_ROOM}/{key}").decode() if store.check([f"{_ROOM}/{key}"]) else ""
