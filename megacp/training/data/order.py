"""The order of samples: a function of the seed and the number of earlier samples, endless over
epochs.

Any position of any epoch costs O(1) time and memory, so a resumed run jumps to its position. A
Feistel network permutes the numbers 0 .. 4^h - 1 for any round function. A result outside the
dataset is permuted again until it is inside ("cycle walking"). Numpy's permutation would cost 8
bytes per pack in every process, and its stream may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of uint64.

    Each input bit affects every output bit.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def permuted(positions: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples at `positions` (int64, 0..length-1) of one epoch's permutation, int64."""
    # half the bits of the permuted numbers, rounded up: 4^half >= length
    half = np.uint64(max(1, -(-(length - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    # the keys differ for each seed, epoch and length
    digest = hashlib.blake2b(f"{seed} {epoch} {length}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    result = np.asarray(positions).astype(np.uint64)
    outside = np.arange(len(result))  # positions whose result is not a sample yet
    while len(outside):
        values = result[outside]
        left = values >> half
        right = values & mask
        for key in keys:  # the two halves change places after each round
            left, right = right, left ^ (_mix(right + key) & mask)
        values = left << half | right
        result[outside] = values
        outside = outside[values >= np.uint64(length)]
    return result.astype(np.int64)


def samples(start: int, count: int, length: int, seed: int) -> np.ndarray:
    """Return samples number `start` .. `start + count - 1` of the endless order, int64 [count].

    Epoch e has the positions e*length .. (e+1)*length - 1 and contains each sample once.
    """
    epochs, positions = np.divmod(np.arange(start, start + count, dtype=np.int64), length)
    result = np.empty(count, np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        result[here] = permuted(positions[here], length, seed, epoch)
    return result
