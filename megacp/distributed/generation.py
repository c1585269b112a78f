"""A part of the launcher's store that no earlier life of the run has written to.

Key property: after a restart torchrun gives the new ranks the old store (torch 2.13 shares one for the life of the
agent), with the addresses of dead processes under the names that new ones look up; here the ranks first agree on a name
that contains a random word of each of them. Rejected: TORCHELASTIC_RESTART_COUNT as that name, which differs between
machines once one of them has failed alone.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import torch.distributed as dist

_ROOM = "megacp_generation"


def fresh_store(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """The agreed part of `store`; every rank calls it. Raises RuntimeError when not all have come after `seconds`.

    Rank 0 proposes the words it finds, each rank agrees to a proposal that holds its own, and rank 0 settles it when
    all have. An earlier life's agreement holds another word of rank 0, so it is never taken for this one.
    """
    mine = secrets.token_hex(8)
    store.set(f"{_ROOM}/word/{rank}", mine)
    deadline = time.monotonic() + seconds
    agreed = ""
    while time.monotonic() < deadline:
        if rank == 0:
            proposal = ",".join(_read(store, f"word/{other}") for other in range(size))
            store.set(f"{_ROOM}/proposal", proposal)
        else:
            proposal = _read(store, "proposal")
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
        time.sleep(0.02)
    raise RuntimeError(f"rank {rank} waited {seconds:g} s for the {size} ranks of this run to start")


def _read(store: dist.Store, key: str) -> str:
    """The value of a key, empty where there is none yet."""
    return store.get(f"{_ROOM}/{key}").decode() if store.check([f"{_ROOM}/{key}"]) else ""
