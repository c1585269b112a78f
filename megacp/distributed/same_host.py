"""Messages between CPU ranks on one machine; the receiver copies them from the sender's memory.

gloo sends over TCP, whose copies take both ranks more time than the matrix products of a small
model. Here, a sender announces the address of its tensor and keeps the tensor until the receiver
confirms that it has read the contents. Small messages are part of the announcement. A waiting rank
processes all messages that have arrived, so no order of waits can deadlock two ranks.

The copy uses `process_vm_readv`, which only Linux provides. Every rank tests it with all other
ranks on its machine before the first message. gloo is used if a test fails, and between machines.
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
"""Maximum size in bytes of a message sent with its announcement; its sender does not wait."""
_HEADER = struct.Struct("<cQQQ")  # kind, channel, address, bytes
# kinds of words: a tensor is at an address; a small tensor follows; the oldest announced tensor of
# the channel has been read
_TOLD, _SENT, _READ = b"t", b"s", b"r"
_CONNECT_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 1.0
"""Interval at which a rank waiting for a connection checks whether the other rank has ended."""
_PR_SET_PTRACER = 0x59616D61
"""Linux's number for a process option (prctl.h): the process that may read this process's memory,
together with its children.
"""

Message = tuple[int, torch.Tensor]
"""Global rank of the other side, and the contiguous CPU tensor to send or to receive into."""

_libc = ctypes.CDLL(None, use_errno=True)
_read_memory: Any = getattr(_libc, "process_vm_readv", None)
_Stretch = ctypes.c_size_t * 2  # `struct iovec`: address and bytes


def _copy_from(process: int, source: int, target: int, size: int) -> None:
    """Copy memory from another process.

    Raise OSError if the system refuses, and ProcessLookupError if the process has ended.
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
    """Messages that are started together; `wait` has the signature of torch's `Work.wait`."""

    __slots__ = ("_channel", "_held", "left")

    def __init__(self, channel: LocalChannel, held: object) -> None:
        self._channel = channel
        self._held = held
        # ranks whose messages are not complete, with one entry per message
        self.left: list[int] = []

    def wait(self, timeout: object = None) -> bool:
        """Wait until all messages have been sent and received.

        Raise RuntimeError with the numbers of ranks that have ended or are late.
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
    """Announced messages that are not expected yet, by channel: address, bytes, small content."""
    receiving: dict[int, deque[tuple[Operation, int, int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Expected messages that are not announced yet, by channel: operation, address and bytes."""
    sending: dict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    """Announced messages that the rank has not read yet, by channel."""
    backlog: deque[bytes] = field(default_factory=deque)
    """Words that did not fit into the socket's buffer."""
    gone: bool = False


class SameHost:
    """The connected ranks on this machine.

    Several threads may use an instance; waiting threads take turns.
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
        """Return a new channel between some global ranks, or None if one is on another machine.

        Channels are independent. All of these ranks must make the same calls.
        """
        if any(rank != self.rank and rank not in self.peers for rank in ranks):
            return None
        # ranks with the same members and name create the same channels in the same order
        kind = f"{name} {tuple(ranks)}"
        # ranks create different channels in between, so count only channels of this kind
        self._made[kind] += 1
        digest = hashlib.blake2b(f"{kind} {self._made[kind]}".encode(), digest_size=8).digest()
        return LocalChannel(self, int.from_bytes(digest, "little"), timeout.total_seconds())

    def send(self, peer: _Peer, *words: bytes) -> None:
        """Send words now, or later if the socket is full; ranks that have ended are skipped."""
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

        This rank's backlog is sent too, because the next wait may be a long time away.
        """
        end = time.monotonic() + seconds
        while True:
            with self.lock:
                # wait for messages of this operation, and for words that are not sent yet
                full = [peer for peer in self.peers.values() if peer.backlog and not peer.gone]
                late = sorted({*operation.left, *(peer.rank for peer in full)})
                if not late:
                    return
                if lost := [rank for rank in late if self.peers[rank].gone]:
                    raise RuntimeError(
                        f"connection closed by rank {', '.join(map(str, lost))} on this machine"
                    )
                if time.monotonic() > end:
                    names = ", ".join(map(str, late))
                    raise RuntimeError(
                        f"timed out after {seconds:g} s of waiting for messages from rank {names} "
                        "on this machine"
                    )
                # the timeout limits how long this thread keeps the lock from other threads, or how
                # long a full socket delays further words
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
                    f"rank {peer.rank} sent {size} bytes, but {wanted} bytes were expected"
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

        Raise RuntimeError with the number of that rank, as for a closed connection. The error is
        then only a consequence, and `report_failure` waits for the causes from other ranks.
        """
        try:
            _copy_from(peer.process, address, target, size)
        except ProcessLookupError as error:
            raise RuntimeError(
                f"rank {peer.rank} on this machine ended while its memory was being read"
            ) from error
        except OSError as error:
            why = f"the memory of rank {peer.rank} on this machine cannot be read: {error.strerror}"
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
        """Start sending and receiving messages; empty tensors are skipped.

        Sent tensors must not change before the operation has ended.
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
                    # a small message is copied into its announcement, which completes the send
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
    """Return connections to the other ranks on this machine.

    Return None if there are no other ranks, or if one rank cannot read another's memory. All ranks
    of the world must call this function. `gather` returns a small object from every rank, in rank
    order.
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
        # every rank of the world takes part in both gathers, even if it is alone on its machine
        places = gather((_machine(), os.getpid(), ctypes.addressof(probe)))
        here = [i for i, place in enumerate(places) if place[0] == _machine()]
        readable = gather(all(_is_read(*places[i][1:]) for i in here))
        if len(here) < 2 or not all(readable[i] for i in here):
            return None
        processes = {i: places[i][1] for i in here}
        # only ranks that can all read each other get here
        found = SameHost(rank)
        # each rank connects to all lower ranks and accepts connections from all higher ranks
        for other in here[: here.index(rank)]:
            found.add(other, processes[other], _call(other, processes[other], rank))
        awaited = here[here.index(rank) + 1 :]
        while missing := [other for other in awaited if other not in found.peers]:
            other, connection = _answer(door, {i: processes[i] for i in missing})
            found.add(other, processes[other], connection)
        return found


def _call(other: int, process: int, rank: int) -> socket.socket:
    """Return a connection to another rank after sending it this rank's number.

    Raise RuntimeError with the other rank's number if it cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(f"\0megacp {process}")
        connection.send(rank.to_bytes(8, "little"))
    except OSError as error:
        why = "ended" if _has_ended(process) else f"did not answer ({error})"
        raise RuntimeError(
            f"rank {other} on this machine {why} while this rank was connecting to it"
        ) from error
    return connection


def _answer(door: socket.socket, missing: Mapping[int, int]) -> tuple[int, socket.socket]:
    """Return the next of the `missing` ranks that connects, and its connection.

    `missing` maps ranks to their processes. Raise RuntimeError with the number of a rank that has
    ended, or with all missing ranks if none of them connects in time.
    """
    end = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection, _address = door.accept()
            connection.settimeout(_CONNECT_SECONDS)
            if words := connection.recv(8):
                return int.from_bytes(words, "little"), connection
        # no rank connected, or the rank ended before it sent its number
        for rank, process in missing.items():
            if _has_ended(process):
                raise RuntimeError(f"rank {rank} on this machine ended before it connected")
    names = ", ".join(map(str, missing))
    raise RuntimeError(
        f"timed out after {_CONNECT_SECONDS:g} s of waiting for rank {names} on this machine to "
        "connect"
    )


def _machine() -> str:
    """Return an identifier shared by all processes that can read and reach each other."""
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
    """Return whether a process has ended and no longer has memory.

    A process that its parent has not waited for yet has ended, but still has a number.
    """
    try:
        _copy_from(process, 0, 0, 1)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False
