"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Owns the mapping from (seed, choice, output index) to a number. There is no state: a request draws the same
numbers whatever runs beside it, however often it is preempted and replayed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Ten rounds over counter [..., 4] with key [..., 2]; returns [..., 4] random words."""
    words = _rounds([counter[..., lane].astype(np.uint64) for lane in range(4)],
                    [key[..., lane].astype(np.uint64) for lane in range(2)])
    return np.stack(words, axis=-1).astype(np.uint32)


def _rounds(words: list[UInt64Array], keys: list[UInt64Array]) -> list[UInt64Array]:
    """Ten rounds over four lanes of 32-bit numbers with two lanes of keys."""
    steps = np.arange(_ROUNDS, dtype=np.uint64).reshape(_ROUNDS, *(1,) * keys[0].ndim)
    round_keys = [(lane + steps * weyl) & _LOW for lane, weyl in zip(keys, _WEYL, strict=True)]
    for first_key, second_key in zip(*round_keys, strict=True):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [(second >> _SHIFT) ^ words[1] ^ first_key, second & _LOW,
                 (first >> _SHIFT) ^ words[3] ^ second_key, first & _LOW]
    return words


def uniforms(seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.integer],
             output_indices: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each (seed, choice, output index), all [S]; multiples of 2**-24, so exact in float32."""
    seeds = np.asarray(seeds, dtype=np.uint64)
    nothing = np.zeros_like(seeds)
    counter = [output_indices.astype(np.uint64), choices.astype(np.uint64), nothing, nothing]
    word = _rounds(counter, [seeds & _LOW, seeds >> _SHIFT])[0]
    return (word >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
