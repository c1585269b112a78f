"""Messages between CPU ranks of one machine: the receiver copies them from the sender's memory,
once.

gloo sends through TCP, whose copies cost both ranks more time than a small model's products. Here a
sender tells where its tensor lies and keeps it until the receiver has said that it was read; small
messages travel in the telling. A rank that waits takes all messages that have come, so no order of
waits can stop two ranks.

Only Linux has the copy (`process_vm_readv`). Every rank tries it with all others of its machine
before the first message. Where one fails, and between machines, gloo is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import hashlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_SMALL = 4096
"""Bytes up to which a message travels in the telling, and its sender waits for nobody."""
_HEADER = struct.Struct("<cQQQ")  # kind, channel, address, bytes
_TOLD, _SENT, _READ = b"t", b"s", b"r"
"""Kinds: a tensor lies at an address; here it is; the oldest told one of the channel was read."""
_CONNECT_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 1.0
"""How long a rank waits for another one to connect before it looks whether that one has ended."""
_PR_SET_PTRACER = 0x59616D61
"""Linux's name of an option of a process (prctl.h): which process may, with its children, read this
one's memory.
"""

Message = tuple[int, torch.Tensor]
"""Global rank of the other side, and a contiguous CPU tensor: what is sent, or where it is to
arrive.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_read_memory: Any = getattr(_libc, "process_vm_readv", None)
_Stretch = ctypes.c_size_t * 2  # `struct iovec`: address and bytes


def _copy_from(process: int, source: int, target: int, size: int) -> None:
    """Read memory of another process. OSError if that is refused, ProcessLookupError if the process
    has ended.
    """
    done = 0
    while done < size:  # one call copies 2 GiB at most
        mine, theirs = _Stretch(target + done, size - done), _Stretch(source + done, size - done)
        count = _read_memory(process, mine, 1, theirs, 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += count


class Operation:
    """Messages under way together; `wait` is that of torch's `Work`."""

    __slots__ = ("_channel", "_held", "left")

    def __init__(self, channel: LocalChannel, held: object) -> None:
        self._channel, self._held = channel, held
        self.left: list[
            int
        ] = []  # ranks that have not sent or read what they are to, one entry a message

    def wait(self, timeout: object = None) -> bool:
        """Return once all is sent and received. RuntimeError names ranks that are gone or do not
        come in time.
        """
        self._channel.host.wait(self, self._channel.seconds)
        self._held = None
        return True


@dataclass
class _Peer:
    """A connected rank. Of each channel messages meet in the order in which they are made."""

    rank: int
    process: int
    connection: socket.socket
    told: dict[int, deque[tuple[int, int, bytes]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Messages by channel that nobody has asked for yet: address, bytes and small content."""
    receiving: dict[int, deque[tuple[Operation, int, int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sending: dict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    backlog: deque[bytes] = field(default_factory=deque)
    """What its socket had no room for."""
    gone: bool = False


class SameHost:
    """The connected ranks of this machine. All threads may use it; the ones that wait take
    turns.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.peers: dict[int, _Peer] = {}
        self.lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._made: Counter[str] = Counter()

    def add(self, rank: int, process: int, connection: socket.socket) -> None:
        """Talk to a rank over a connected socket."""
        connection.setblocking(False)
        self.peers[rank] = _Peer(rank, process, connection)
        self._selector.register(connection, selectors.EVENT_READ, self.peers[rank])

    def channel(
        self, name: str, ranks: Sequence[int], timeout: datetime.timedelta
    ) -> LocalChannel | None:
        """Messages apart from all others among these global ranks, which call it alike; None if one
        is not here.
        """
        if any(rank != self.rank and rank not in self.peers for rank in ranks):
            return None
        kind = f"{name} {tuple(ranks)}"
        self._made[kind] += (
            1  # ranks make different channels in between, so the number depends only on the members
        )
        digest = hashlib.blake2b(f"{kind} {self._made[kind]}".encode(), digest_size=8).digest()
        return LocalChannel(self, int.from_bytes(digest, "little"), timeout.total_seconds())

    def send(self, peer: _Peer, *words: bytes) -> None:
        """Send now, or when the other side has read what is before it; a rank that is gone hears
        nothing.
        """
        peer.backlog.extend(words)
        try:
            while peer.backlog and not peer.gone:
                peer.connection.send(peer.backlog[0])
                peer.backlog.popleft()
        except BlockingIOError:
            pass  # `wait` tries again
        except ConnectionError:
            self._lose(peer)

    def _lose(self, peer: _Peer) -> None:
        if not peer.gone:
            peer.gone = True
            self._selector.unregister(peer.connection)

    def ended(self) -> list[int]:
        """The connected ranks whose processes have ended."""
        return sorted(rank for rank, peer in self.peers.items() if _has_ended(peer.process))

    def wait(self, operation: Operation, seconds: float) -> None:
        """Wait as `Operation.wait` says. Unsent bytes of this rank go first: it may not wait here
        again for long.
        """
        end = time.monotonic() + seconds
        while True:
            with self.lock:
                full = [peer for peer in self.peers.values() if peer.backlog and not peer.gone]
                late = sorted({*operation.left, *(peer.rank for peer in full)})
                if not late:
                    return
                if lost := [rank for rank in late if self.peers[rank].gone]:
                    raise RuntimeError(
                        f"connection closed by rank {', '.join(map(str, lost))} of this machine"
                    )
                if time.monotonic() > end:
                    names = ", ".join(map(str, late))
                    raise RuntimeError(
                        f"timed out: {seconds:g} s waiting for messages of rank {names} of this "
                        "machine"
                    )
                # the longest that this thread keeps the others from their messages, and a full
                # socket from more words
                for key, _ in self._selector.select(0.005 if full else 0.1):
                    self._listen(key.data)
                for peer in full:
                    self.send(peer)

    def _listen(self, peer: _Peer) -> None:
        """Act on all words of a rank that have come."""
        try:
            while words := peer.connection.recv(_HEADER.size + _SMALL):
                kind, channel, address, size = _HEADER.unpack_from(words)
                if kind == _READ:
                    peer.sending[channel].popleft().left.remove(peer.rank)
                else:
                    peer.told[channel].append((address, size, words[_HEADER.size :]))
                    self.match(peer, channel)
            self._lose(peer)
        except BlockingIOError:
            pass
        except ConnectionError:
            self._lose(peer)

    def match(self, peer: _Peer, channel: int) -> None:
        """Bring what was told to the tensors that wait for it."""
        told, receiving = peer.told[channel], peer.receiving[channel]
        while told and receiving:
            address, size, content = told.popleft()
            operation, target, wanted = receiving.popleft()
            if size != wanted:
                raise RuntimeError(
                    f"rank {peer.rank} sends {size} bytes where {wanted} are expected"
                )
            if content:
                ctypes.memmove(target, content, size)
            else:
                self._read(peer, address, target, size)
                self.send(peer, _HEADER.pack(_READ, channel, 0, 0))
            operation.left.remove(peer.rank)

    def _read(self, peer: _Peer, address: int, target: int, size: int) -> None:
        """Copy a tensor from the memory of a rank.

        A RuntimeError names that rank, as one does when its connection closes: this rank was only
        hit by its end, and `report_failure` then waits for the reasons of the others.
        """
        try:
            _copy_from(peer.process, address, target, size)
        except ProcessLookupError as error:
            raise RuntimeError(
                f"rank {peer.rank} of this machine ended while its memory was read"
            ) from error
        except OSError as error:
            why = f"the memory of rank {peer.rank} of this machine cannot be read: {error.strerror}"
            raise RuntimeError(why) from error


@dataclass(frozen=True)
class LocalChannel:
    """Messages of one axis. Between two ranks they meet in the order in which each side starts
    them.
    """

    host: SameHost
    number: int
    seconds: float

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Send and receive together, empty tensors left out; nothing sent may change before the
        operation has ended.
        """
        operation, number, peers = Operation(self, (sends, receives)), self.number, self.host.peers
        with self.host.lock:
            for rank, x in receives:
                if x.nbytes:
                    operation.left.append(rank)
                    peers[rank].receiving[number].append((operation, x.data_ptr(), x.nbytes))
            for rank, x in sends:
                if 0 < x.nbytes <= _SMALL:
                    content = ctypes.string_at(x.data_ptr(), x.nbytes)
                    self.host.send(peers[rank], _HEADER.pack(_SENT, number, 0, x.nbytes) + content)
                elif x.nbytes:
                    operation.left.append(rank)
                    peers[rank].sending[number].append(operation)
                    self.host.send(peers[rank], _HEADER.pack(_TOLD, number, x.data_ptr(), x.nbytes))
            for rank, _ in receives:
                self.host.match(peers[rank], number)
        return operation


def connect_host(rank: int, gather: Callable[[object], list]) -> SameHost | None:
    """The other ranks of this machine, or None where there are none, or one cannot read another.

    All ranks of the world call it; `gather` brings a small object of every rank, in rank order.
    """
    if _read_memory is None:
        return None
    probe = ctypes.create_string_buffer(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"\0megacp {os.getpid()}")  # in Linux's own name space, which needs no file
        door.listen(1024)
        door.settimeout(_SECONDS_BETWEEN_LOOKS)
        _libc.prctl(
            _PR_SET_PTRACER, os.getppid(), 0, 0, 0
        )  # the launcher and its children; no such option: no need
        places = gather((_machine(), os.getpid(), ctypes.addressof(probe)))
        here = [i for i, place in enumerate(places) if place[0] == _machine()]
        readable = gather(all(_is_read(*places[i][1:]) for i in here))
        if len(here) < 2 or not all(readable[i] for i in here):
            return None
        processes = {i: places[i][1] for i in here}
        found = SameHost(rank)
        for other in here[: here.index(rank)]:
            found.add(other, processes[other], _call(other, processes[other], rank))
        awaited = here[here.index(rank) + 1 :]
        while missing := [other for other in awaited if other not in found.peers]:
            other, connection = _answer(door, {i: processes[i] for i in missing})
            found.add(other, processes[other], connection)
        return found


def _call(other: int, process: int, rank: int) -> socket.socket:
    """Connect to another rank and say which rank this is. RuntimeError names the other one if it
    cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(f"\0megacp {process}")
        connection.send(rank.to_bytes(8, "little"))
    except OSError as error:
        why = "ended" if _has_ended(process) else f"does not answer ({error})"
        raise RuntimeError(f"rank {other} of this machine {why} before it was connected") from error
    return connection


def _answer(door: socket.socket, missing: Mapping[int, int]) -> tuple[int, socket.socket]:
    """The next of the `missing` ranks (their processes by rank) that connects, and its connection.

    RuntimeError names a rank that has ended, or all that are missing if none comes in time.
    """
    end = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection, _address = door.accept()
            connection.settimeout(_CONNECT_SECONDS)
            if words := connection.recv(8):
                return int.from_bytes(words, "little"), connection
        # nobody called, or the caller ended before it said who it is
        for rank, process in missing.items():
            if _has_ended(process):
                raise RuntimeError(f"rank {rank} of this machine ended before it was connected")
    names = ", ".join(map(str, missing))
    raise RuntimeError(
        f"timed out: {_CONNECT_SECONDS:g} s waiting for rank {names} of this machine to connect"
    )


def _machine() -> str:
    """What processes that can read and reach each other have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join(
        [boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "user"))]
    )


def _is_read(process: int, probe: int) -> bool:
    """Whether this process can read that one's memory."""
    target = ctypes.create_string_buffer(8)
    with contextlib.suppress(OSError):
        _copy_from(process, probe, ctypes.addressof(target), len(target))
        return True
    return False


def _has_ended(process: int) -> bool:
    """Whether a process has no memory any more. One that its parent has not yet waited for still
    has a number.
    """
    try:
        _copy_from(process, 0, 0, 1)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False
