"""Messages between CPU ranks of one machine: the receiver copies them from the sender's memory, once.

Key property: a message is one copy at the speed of memory, made by the rank that waits for it. gloo sends it through
TCP, whose copies cost both ranks more time than a small model's products, and wakes two threads for it. A sender tells
where its tensor lies and keeps it until the receiver has said that it was read. Small messages travel in the telling.
A rank that waits for one message takes all others that have come, so no order of waits can stop two ranks for ever.

Linux alone has the copy (`process_vm_readv`), where a process may read another one of the same user. Every rank tries
that with all others of its machine before the first message. Where one fails, and between machines, gloo is used.

Rejected: shared memory, which costs a second copy and must be dealt out in advance. Rejected: a thread that receives,
which takes the cores from the ranks that compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_SMALL = 4096
"""Bytes up to which a message travels in the telling, and its sender waits for nobody."""
_HEADER = struct.Struct("<cQQQ")  # kind, channel, address, bytes
_TOLD, _SENT, _READ = b"t", b"s", b"r"
"""Kinds: a tensor lies at an address; here it is; the oldest told one of the channel was read."""
_LARGEST = _HEADER.size + _SMALL
_POLL_SECONDS = 0.1
"""Longest that a waiting thread keeps the other threads of its rank from their messages."""
_CONNECT_SECONDS = 60.0
_PR_SET_PTRACER = 0x59616D61
"""Linux's name of an option of a process (prctl.h): which process may, with its children, read this one's memory."""


class _Stretch(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_read_memory = getattr(_libc, "process_vm_readv", None)


def _copy_from(process: int, source: int, target: int, size: int) -> None:
    """Read memory of another process; OSError where that is refused or it is gone."""
    assert _read_memory is not None, "ranks met without a way to read each other"
    done = 0
    while done < size:
        mine, theirs = _Stretch(target + done, size - done), _Stretch(source + done, size - done)
        count = _read_memory(process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += count


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is, as it tells the others."""

    machine: str
    """Equal where processes have numbers and sockets in common; empty where messages cannot be read."""
    process: int
    socket: str
    probe: int
    secret: bytes
    """What lies at the address `probe`."""


Message = tuple[int, torch.Tensor]
"""Global rank of the other side, and a contiguous CPU tensor: what is sent, or where it is to arrive."""


class Operation:
    """Messages under way together; `wait` is that of torch's `Work`."""

    __slots__ = ("_channel", "_held", "left")

    def __init__(self, channel: NearChannel, held: object) -> None:
        self._channel, self._held = channel, held
        self.left: list[int] = []
        """Ranks that have not sent or read what they are to; one entry for each message."""

    def wait(self, timeout: object = None) -> bool:
        """Return once all is sent and received. RuntimeError names ranks that are gone or do not come in time."""
        self._channel.neighbours.wait(self, self._channel.seconds)
        self._held = None
        return True


@dataclass
class _Waiting:
    """A tensor's memory that waits for its message, or a told tensor that waits to be read."""

    operation: Operation
    address: int
    size: int


class _Lane:
    """One direction pair of one channel with one rank: messages meet in the order in which they are made."""

    def __init__(self) -> None:
        self.told: deque[tuple[int, int, bytes]] = deque()  # address, bytes, content of small ones
        self.receiving: deque[_Waiting] = deque()
        self.sending: deque[_Waiting] = deque()


class _Peer:
    """A connected rank."""

    def __init__(self, rank: int, process: int, connection: socket.socket) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self.lanes: dict[int, _Lane] = defaultdict(_Lane)
        self.backlog: deque[bytes] = deque()
        self.gone = False


class Neighbours:
    """The connected ranks of this machine. All threads may use it; the ones that wait take turns."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._peers: dict[int, _Peer] = {}
        self._poll = select.poll()
        self._by_file: dict[int, _Peer] = {}
        self._lock = threading.RLock()
        self._channels: dict[str, int] = defaultdict(int)

    def add(self, rank: int, process: int, connection: socket.socket) -> None:
        """Talk to a rank over a connected socket."""
        connection.setblocking(False)
        self._peers[rank] = self._by_file[connection.fileno()] = _Peer(rank, process, connection)
        self._poll.register(connection, select.POLLIN)

    def channel(self, name: str, ranks: Sequence[int], timeout: datetime.timedelta) -> NearChannel | None:
        """Messages apart from all others among these global ranks, which call it alike; None if one is not here."""
        if any(rank != self.rank and rank not in self._peers for rank in ranks):
            return None
        kind = f"{name} {tuple(ranks)}"
        self._channels[kind] += 1
        digest = hashlib.blake2b(f"{kind} {self._channels[kind]}".encode(), digest_size=8).digest()
        return NearChannel(self, int.from_bytes(digest, "little"), timeout.total_seconds())

    def start(self, channel: NearChannel, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Tell where tensors lie, and take what has come already."""
        operation = Operation(channel, (sends, receives))
        with self._lock:
            for rank, x in receives:
                if size := _bytes(x):
                    operation.left.append(rank)
                    self._peers[rank].lanes[channel.number].receiving.append(_Waiting(operation, x.data_ptr(), size))
            for rank, x in sends:
                if size := _bytes(x):
                    self._tell(self._peers[rank], channel.number, _Waiting(operation, x.data_ptr(), size))
            for rank, _ in receives:
                self._match(self._peers[rank], channel.number)
        return operation

    def _tell(self, peer: _Peer, channel: int, sent: _Waiting) -> None:
        if sent.size <= _SMALL:
            content = ctypes.string_at(sent.address, sent.size)
            self._send(peer, _HEADER.pack(_SENT, channel, 0, sent.size) + content)
            return
        sent.operation.left.append(peer.rank)
        peer.lanes[channel].sending.append(sent)
        self._send(peer, _HEADER.pack(_TOLD, channel, sent.address, sent.size))

    def _send(self, peer: _Peer, words: bytes) -> None:
        """Now, or when the other side has read what is before it; a rank that is gone hears nothing."""
        if peer.gone:
            return
        if not peer.backlog:
            with contextlib.suppress(BlockingIOError):
                self._unless_gone(peer, lambda: peer.connection.send(words))
                return
            self._poll.modify(peer.connection, select.POLLIN | select.POLLOUT)
        peer.backlog.append(words)

    def _unless_gone(self, peer: _Peer, work: Callable[[], int | bytes]) -> int | bytes:
        try:
            return work()
        except (BrokenPipeError, ConnectionError):
            self._lose(peer)
            return b""

    def _lose(self, peer: _Peer) -> None:
        if not peer.gone:
            peer.gone = True
            peer.backlog.clear()
            self._poll.unregister(peer.connection)

    def wait(self, operation: Operation, seconds: float) -> None:
        """See `Operation.wait`. What this rank has not got rid of goes first: it may not wait here again for long."""
        end = time.monotonic() + seconds
        while late := {*operation.left, *self._unsent()}:
            with self._lock:
                if operation.left or self._unsent():
                    self._progress(_POLL_SECONDS)
                lost = sorted(rank for rank in set(operation.left) if self._peers[rank].gone)
            if lost:
                raise RuntimeError(f"connection closed by rank {', '.join(map(str, lost))} of this machine")
            if time.monotonic() > end and (late := {*operation.left, *self._unsent()}):
                names = ", ".join(map(str, sorted(late)))
                raise RuntimeError(f"timed out: {seconds:g} s waiting for messages of rank {names} of this machine")

    def _unsent(self) -> list[int]:
        """Ranks whose sockets were full."""
        return [rank for rank, peer in self._peers.items() if peer.backlog]

    def _progress(self, seconds: float) -> None:
        """Wait for a word of any rank, and act on all that have come."""
        for file, event in self._poll.poll(seconds * 1000):
            peer = self._by_file[file]
            if event & select.POLLOUT:
                self._flush(peer)
            if event & ~select.POLLOUT:
                self._listen(peer)

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.backlog:
                self._unless_gone(peer, lambda: peer.connection.send(peer.backlog[0]))
                if not peer.gone:
                    peer.backlog.popleft()
            if not peer.gone:
                self._poll.modify(peer.connection, select.POLLIN)

    def _listen(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while not peer.gone:
                words = self._unless_gone(peer, lambda: peer.connection.recv(_LARGEST))
                if not isinstance(words, bytes) or not words:
                    self._lose(peer)
                    return
                kind, channel, address, size = _HEADER.unpack_from(words)
                lane = peer.lanes[channel]
                if kind == _READ:
                    lane.sending.popleft().operation.left.remove(peer.rank)
                else:
                    lane.told.append((address, size, words[_HEADER.size :]))
                    self._match(peer, channel)

    def _match(self, peer: _Peer, channel: int) -> None:
        """Bring what was told to the tensors that wait for it."""
        lane = peer.lanes[channel]
        while lane.told and lane.receiving:
            address, size, content = lane.told.popleft()
            wanted = lane.receiving.popleft()
            if size != wanted.size:
                raise RuntimeError(f"rank {peer.rank} sends {size} bytes where {wanted.size} are expected")
            if content:
                ctypes.memmove(wanted.address, content, size)
            else:
                try:
                    _copy_from(peer.process, address, wanted.address, size)
                except OSError as error:
                    raise RuntimeError(f"memory of rank {peer.rank} cannot be read: {error.strerror}") from error
                self._send(peer, _HEADER.pack(_READ, channel, 0, 0))
            wanted.operation.left.remove(peer.rank)


@dataclass(frozen=True)
class NearChannel:
    """Messages of one axis. Between two ranks they meet in the order in which each side starts them."""

    neighbours: Neighbours
    number: int
    seconds: float

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Operation:
        """Send and receive together. Nothing sent may change before the operation has ended; empty tensors are left
        out on both sides.
        """
        return self.neighbours.start(self, sends, receives)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _machine() -> str:
    """What processes that can read and reach each other have in common; empty where the system does not say."""
    if _read_memory is None:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "user"))])
    except OSError:
        return ""


def connect(rank: int, gather: Callable[[object], list]) -> Neighbours | None:
    """The other ranks of this machine, or None where there are none, or one cannot read another.

    All ranks of the world call it; `gather` brings a small object of every rank, in rank order.
    """
    machine, secret = _machine(), secrets.token_bytes(16)
    probe = ctypes.create_string_buffer(secret, len(secret))
    with contextlib.ExitStack() as stack:
        name, door = "", _door() if machine else None
        if door is not None:
            stack.enter_context(door)
            if (prctl := getattr(_libc, "prctl", None)) is not None:
                prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)  # the launcher and its children; no such option: no need
            name = door.getsockname().decode("ascii")
        machine = machine if door is not None else ""
        places = gather(Whereabouts(machine, os.getpid(), name, ctypes.addressof(probe), secret))
        here = [i for i, place in enumerate(places) if machine and place.machine == machine]
        readable = gather(all(_is_read(places[i]) for i in here if i != rank))
        if door is None or len(here) < 2 or not all(readable[i] for i in here):
            return None
        found = Neighbours(rank)
        for other in here[: here.index(rank)]:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(places[other].socket)
            found.add(other, places[other].process, connection)
        door.settimeout(_CONNECT_SECONDS)
        missing = {places[other].process: other for other in here[here.index(rank) + 1 :]}
        while missing:
            connection, _address = door.accept()
            process = _process_of(connection)
            if process in missing:
                found.add(missing.pop(process), process, connection)
            else:
                connection.close()  # a stranger: names of sockets are no secret
        return found


def _door() -> socket.socket | None:
    """Where other ranks of this machine may knock; None where the system allows no such socket."""
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(f"\0megacp {secrets.token_hex(16)}")  # in Linux's own name space, which needs no file
        door.listen(1024)
    except OSError:
        return None
    return door


def _process_of(connection: socket.socket) -> int:
    """The number of the process at the other end, by the kernel's word (`struct ucred`)."""
    process, _user, _group = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process


def _is_read(place: Whereabouts) -> bool:
    """Whether this process can read that one's memory."""
    target = ctypes.create_string_buffer(len(place.secret))
    try:
        _copy_from(place.process, place.probe, ctypes.addressof(target), len(place.secret))
    except OSError:
        return False
    return target.raw == place.secret
