"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Owns the mapping from (seed, choice, output index) to a number. There is no state: a request draws the same
numbers whatever runs beside it, however often it is preempted and replayed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

UInt32Array = npt.NDArray[np.uint32]


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Ten rounds over counter [..., 4] with key [..., 2]; returns [..., 4] random words."""
    words = [counter[..., lane].astype(np.uint64) for lane in range(4)]
    keys = [key[..., lane].astype(np.uint64) for lane in range(2)]
    for round_index in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        round_keys = [(keys[lane] + np.uint64(round_index * _WEYL[lane])) & _LOW for lane in range(2)]
        words = [(second >> _SHIFT) ^ words[1] ^ round_keys[0], second & _LOW,
                 (first >> _SHIFT) ^ words[3] ^ round_keys[1], first & _LOW]
    return np.stack(words, axis=-1).astype(np.uint32)


def uniforms(seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.integer],
             output_indices: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each (seed, choice, output index), all [S]; multiples of 2**-24, so exact in float32."""
    seeds = np.asarray(seeds, dtype=np.uint64)
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=-1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0] = output_indices
    counter[:, 1] = choices
    words = philox4x32(counter, key)[:, 0]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
