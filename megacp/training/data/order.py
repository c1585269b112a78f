"""The order of samples: a function of the seed and the number of samples before, endless over
epochs.

Any position of any epoch costs O(1) time and memory, so a resumed run jumps to its own. A Feistel
network permutes the numbers 0 .. 4^h - 1 whatever its round function; results outside the dataset
are sent through again ("cycle walking"). Numpy's permutation costs 8 bytes a pack in every process,
and its stream may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of uint64 that
    avalanches.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def permuted(positions: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """The sample at each of `positions` (int64, 0..length-1) of one epoch's permutation of
    0..length-1, int64.
    """
    half = np.uint64(
        max(1, -(-(length - 1).bit_length() // 2))
    )  # bits of each half; 4^half >= length
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(f"{seed} {epoch} {length}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    result = np.asarray(positions).astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        values = result[outside]
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values = left << half | right
        result[outside] = values
        outside = outside[values >= np.uint64(length)]
    return result.astype(np.int64)


def samples(start: int, count: int, length: int, seed: int) -> np.ndarray:
    """Samples number `start` .. `start + count - 1` of the endless order over `length` samples,
    int64 [count].

    Epoch e is the positions e*length .. (e+1)*length - 1 and holds each sample once.
    """
    epochs, positions = np.divmod(np.arange(start, start + count, dtype=np.int64), length)
    result = np.empty(count, np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        result[here] = permuted(positions[here], length, seed, epoch)
    return result
