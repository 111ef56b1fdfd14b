"""The random numbers of requests: a stream for each seed, with random access to its positions.

The generator is Philox 4x64 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), whose
key is the seed and whose counter is the position: the first number of ``numpy.random.Philox(key, counter)``, for many
seeds and positions together.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """For each seed, below 2**64, the number in [0, 1) at its position of the seed's stream: float64 ``[n]``."""
    zeros = np.zeros(len(seeds), dtype=np.uint64)
    keys = [np.array(seeds, dtype=np.uint64), zeros]
    words = [np.array(positions, dtype=np.uint64) + np.uint64(1), zeros, zeros, zeros]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _multiply(word, np.uint64(factor)) for word, factor in zip((words[0], words[2]), _MULTIPLIERS, strict=True)
        )
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [key + np.uint64(step) for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return (words[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(words: Words, factor: np.uint64) -> tuple[Words, Words]:
    """High and low 64 bits of 64-bit by 64-bit products."""
    word_high, word_low = words >> _HALF, words & _LOW
    factor_high, factor_low = factor >> _HALF, factor & _LOW
    middle = word_high * factor_low + (word_low * factor_low >> _HALF)
    carried = word_low * factor_high + (middle & _LOW)
    return word_high * factor_high + (middle >> _HALF) + (carried >> _HALF), words * factor
