"""Order of samples, which depends only on the seed and the sample number and never ends.

Finding a sample at any position of any epoch takes O(1) time and memory, so a resumed run can start
immediately. A Feistel network permutes the numbers 0 .. 4^h - 1, for any round function. A result
outside the dataset is permuted again until it is inside ("cycle walking"). Numpy's permutation
would need 8 bytes per pack in every process, and its results may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the splitmix64 finalizer (Steele, Lea, Flood 2014) of the values, a uint64 bijection.

    Each input bit affects every output bit.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def permuted(positions: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples (int64) at `positions` (int64, 0..length-1) in one epoch's permutation."""
    # half the number of bits in the permuted numbers, rounded up: 4^half >= length
    half = np.uint64(max(1, -(-(length - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    # keys depend on seed, epoch and length
    digest = hashlib.blake2b(f"{seed} {epoch} {length}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    result = np.asarray(positions).astype(np.uint64)
    outside = np.arange(len(result))  # positions whose result is not yet a sample
    while len(outside):
        values = result[outside]
        left = values >> half
        right = values & mask
        for key in keys:  # the two halves are swapped after each round
            left, right = right, left ^ (_mix(right + key) & mask)
        values = left << half | right
        result[outside] = values
        outside = outside[values >= np.uint64(length)]
    return result.astype(np.int64)


def samples(start: int, count: int, length: int, seed: int) -> np.ndarray:
    """Return the samples at `start` .. `start + count - 1` in the endless order, int64 [count].

    Epoch e consists of positions e*length .. (e+1)*length - 1 and contains each sample once.
    """
    epochs, positions = np.divmod(np.arange(start, start + count, dtype=np.int64), length)
    result = np.empty(count, np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        result[here] = permuted(positions[here], length, seed, epoch)
    return result
