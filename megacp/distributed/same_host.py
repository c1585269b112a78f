"""Messages between CPU ranks of one machine; the receiver copies them from the sender's memory.

gloo sends through TCP, whose copies take both ranks more time than the matrix products of a small
model. Here a sender announces the address of its tensor and keeps the tensor until the receiver
confirms that it has read it. Small messages are part of the announcement. A rank that waits takes
all messages that have arrived, so no order of waits can deadlock two ranks.

Only Linux provides the copy (`process_vm_readv`). Every rank tests it with all other ranks of its
machine before the first message. gloo is used if a test fails, and between machines.
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
"""Size in bytes up to which a message is part of its announcement; its sender does not wait."""
_HEADER = struct.Struct("<cQQQ")  # kind, channel, address, bytes
# kinds of words: a tensor is at an address; a small tensor follows; the oldest announced tensor of
# the channel has been read
_TOLD, _SENT, _READ = b"t", b"s", b"r"
_CONNECT_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 1.0
"""Interval at which a rank that waits for a connection checks whether the other rank has ended."""
_PR_SET_PTRACER = 0x59616D61
"""Linux's number of a process option (prctl.h): the process that may, together with its children,
read this process's memory.
"""

Message = tuple[int, torch.Tensor]
"""Global rank of the other side, and the contiguous CPU tensor to send or to receive into."""

_libc = ctypes.CDLL(None, use_errno=True)
_read_memory: Any = getattr(_libc, "process_vm_readv", None)
_Stretch = ctypes.c_size_t * 2  # `struct iovec`: address and bytes


def _copy_from(process: int, source: int, target: int, size: int) -> None:
    """Copy memory of another process.

    Raise OSError if this is refused, and ProcessLookupError if the process has ended.
    """
    done = 0
    while done < size:  # a call copies at most 2 GiB
        mine = _Stretch(target + done, size - done)
        theirs = _Stretch(source + done, size - done)
        count = _read_memory(process, mine, 1, theirs, 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += count


class Operation:
    """Messages that were started together; `wait` has the signature of torch's `Work.wait`."""

    __slots__ = ("_channel", "_held", "left")

    def __init__(self, channel: LocalChannel, held: object) -> None:
        self._channel = channel
        self._held = held
        # ranks whose messages are not complete, with one entry per message
        self.left: list[int] = []

    def wait(self, timeout: object = None) -> bool:
        """Return once all messages are sent and received.

        Raise RuntimeError with the names of ranks that have ended or are late.
        """
        self._channel.host.wait(self, self._channel.seconds)
        self._held = None
        return True


@dataclass
class _Peer:
    """A connected rank. The messages of a channel are matched in the order in which they start."""

    rank: int
    process: int
    connection: socket.socket
    told: dict[int, deque[tuple[int, int, bytes]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Announced messages by channel that are not expected yet: address, bytes and small content."""
    receiving: dict[int, deque[tuple[Operation, int, int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Expected messages by channel that are not announced yet: operation, address and bytes."""
    sending: dict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    """Announced messages by channel that the rank has not read yet."""
    backlog: deque[bytes] = field(default_factory=deque)
    """Words that did not fit into the socket's buffer."""
    gone: bool = False


class SameHost:
    """The connected ranks of this machine.

    All threads may use it; threads that wait take turns.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.peers: dict[int, _Peer] = {}
        self.lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._made: Counter[str] = Counter()

    def add(self, rank: int, process: int, connection: socket.socket) -> None:
        """Register a rank with its connected socket."""
        connection.setblocking(False)
        self.peers[rank] = _Peer(rank, process, connection)
        self._selector.register(connection, selectors.EVENT_READ, self.peers[rank])

    def channel(
        self, name: str, ranks: Sequence[int], timeout: datetime.timedelta
    ) -> LocalChannel | None:
        """Return a channel among some global ranks, separate from all other channels.

        These ranks must make the same calls. Return None if one of them is not on this machine.
        """
        if any(rank != self.rank and rank not in self.peers for rank in ranks):
            return None
        # ranks with the same members and name create the same channels in the same order
        kind = f"{name} {tuple(ranks)}"
        # ranks create different channels in between, so the number counts only channels of this
        # kind
        self._made[kind] += 1
        digest = hashlib.blake2b(f"{kind} {self._made[kind]}".encode(), digest_size=8).digest()
        return LocalChannel(self, int.from_bytes(digest, "little"), timeout.total_seconds())

    def send(self, peer: _Peer, *words: bytes) -> None:
        """Send words now, or later if the socket is full; ranks that have ended get nothing."""
        # words keep their order: new ones follow the backlog
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
        """Stop listening to a rank whose connection is closed."""
        if not peer.gone:
            peer.gone = True
            self._selector.unregister(peer.connection)

    def ended(self) -> list[int]:
        """Return the connected ranks whose processes have ended."""
        return sorted(rank for rank, peer in self.peers.items() if _has_ended(peer.process))

    def wait(self, operation: Operation, seconds: float) -> None:
        """Wait for an operation; see `Operation.wait`.

        Also sends the backlog of this rank, because it may not wait here again for a long time.
        """
        end = time.monotonic() + seconds
        while True:
            with self.lock:
                # messages of this operation, and words that still have to be sent
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
                # upper bounds of the time for which this thread blocks other threads, or a full
                # socket delays further words
                # at most this time per round, because other threads wait for the lock
                for key, _ in self._selector.select(0.005 if full else 0.1):
                    self._listen(key.data)
                for peer in full:
                    self.send(peer)

    def _listen(self, peer: _Peer) -> None:
        """Process all words of a rank that have arrived."""
        try:
            while words := peer.connection.recv(_HEADER.size + _SMALL):
                kind, channel, address, size = _HEADER.unpack_from(words)
                if kind == _READ:
                    peer.sending[channel].popleft().left.remove(peer.rank)
                else:
                    peer.told[channel].append((address, size, words[_HEADER.size :]))
                    self.match(peer, channel)
            # an empty word means that the other side has closed the connection
            self._lose(peer)
        except BlockingIOError:
            pass
        except ConnectionError:
            self._lose(peer)

    def match(self, peer: _Peer, channel: int) -> None:
        """Copy announced messages into the tensors that expect them."""
        told = peer.told[channel]
        receiving = peer.receiving[channel]
        while told and receiving:
            address, size, content = told.popleft()
            operation, target, wanted = receiving.popleft()
            if size != wanted:
                raise RuntimeError(
                    f"rank {peer.rank} sends {size} bytes where {wanted} are expected"
                )
            # small messages arrived with the announcement; large ones are read from the sender
            if content:
                ctypes.memmove(target, content, size)
            else:
                # the sender may reuse its tensor only after this confirmation
                self._read(peer, address, target, size)
                self.send(peer, _HEADER.pack(_READ, channel, 0, 0))
            operation.left.remove(peer.rank)

    def _read(self, peer: _Peer, address: int, target: int, size: int) -> None:
        """Copy a tensor from the memory of a rank.

        Raise RuntimeError with the name of that rank, as for a closed connection. This rank is then
        only a victim, and `report_failure` waits for the reasons of the other ranks.
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
    """Messages of one axis.

    Messages between two ranks are matched in the order in which each side starts them.
    """

    host: SameHost
    number: int
    seconds: float

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Start to send and receive messages; empty tensors are skipped.

        Tensors that are sent must not change before the operation has ended.
        """
        operation = Operation(self, (sends, receives))
        number = self.number
        peers = self.host.peers
        with self.host.lock:
            # expected messages first, so that announcements that have already arrived can be
            # matched
            for rank, x in receives:
                if x.nbytes:
                    operation.left.append(rank)
                    peers[rank].receiving[number].append((operation, x.data_ptr(), x.nbytes))
            for rank, x in sends:
                if 0 < x.nbytes <= _SMALL:
                    # a small message is copied into the announcement and complete for the sender
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
    """Return the other ranks of this machine.

    Return None if there are none, or if one rank cannot read another's memory. All ranks of the
    world must call this function. `gather` returns a small object of every rank, in rank order.
    """
    if _read_memory is None:
        return None
    probe = ctypes.create_string_buffer(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"\0megacp {os.getpid()}")  # Linux's abstract namespace, which needs no file
        door.listen(1024)
        door.settimeout(_SECONDS_BETWEEN_LOOKS)
        # allow the launcher and its children to read this process; systems without the option need
        # no permission
        _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)
        # every rank of the world takes part in both gathers, also without neighbours
        places = gather((_machine(), os.getpid(), ctypes.addressof(probe)))
        here = [i for i, place in enumerate(places) if place[0] == _machine()]
        readable = gather(all(_is_read(*places[i][1:]) for i in here))
        if len(here) < 2 or not all(readable[i] for i in here):
            return None
        processes = {i: places[i][1] for i in here}
        # only ranks that can all read each other get here
        found = SameHost(rank)
        # each rank calls the lower ranks and is called by the higher ranks
        for other in here[: here.index(rank)]:
            found.add(other, processes[other], _call(other, processes[other], rank))
        awaited = here[here.index(rank) + 1 :]
        while missing := [other for other in awaited if other not in found.peers]:
            other, connection = _answer(door, {i: processes[i] for i in missing})
            found.add(other, processes[other], connection)
        return found


def _call(other: int, process: int, rank: int) -> socket.socket:
    """Connect to another rank and send it this rank's number.

    Raise RuntimeError with the other rank's name if it cannot be reached.
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
    """Return the next of the `missing` ranks that connects, and its connection.

    `missing` maps ranks to their processes. Raise RuntimeError with the name of a rank that has
    ended, or with all missing ranks if none connects in time.
    """
    end = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection, _address = door.accept()
            connection.settimeout(_CONNECT_SECONDS)
            if words := connection.recv(8):
                return int.from_bytes(words, "little"), connection
        # no rank called, or the caller ended before it sent its number
        for rank, process in missing.items():
            if _has_ended(process):
                raise RuntimeError(f"rank {rank} of this machine ended before it was connected")
    names = ", ".join(map(str, missing))
    raise RuntimeError(
        f"timed out: {_CONNECT_SECONDS:g} s waiting for rank {names} of this machine to connect"
    )


def _machine() -> str:
    """Return an identifier that is equal for processes that can read and reach each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "user")]
    return " ".join([boot, *namespaces])


def _is_read(process: int, probe: int) -> bool:
    """Return whether this process can read the memory of another process."""
    target = ctypes.create_string_buffer(8)
    with contextlib.suppress(OSError):
        _copy_from(process, probe, ctypes.addressof(target), len(target))
        return True
    return False


def _has_ended(process: int) -> bool:
    """Return whether a process has no memory any more.

    A process that its parent has not waited for has ended but still has a number.
    """
    try:
        _copy_from(process, 0, 0, 1)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False
