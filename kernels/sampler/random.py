"""Random numbers of a request: a pure function of its seed, the position drawn at, and a token's id.

So a request draws the same numbers whatever else runs, and after a preemption too. Knows nothing of tensors.
"""

import math

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
LARGEST = 1 - 2.0**-24
"""The largest number that is drawn: the one below 1 in fp32."""


def draw_key(seed: int, position: int) -> int:
    """What the noise of all tokens at one position follows from, as a signed 64-bit integer.

    With mix the finaliser of SplitMix64 (Steele, Lea and Flood 2014) and all sums modulo 2 ** 64:
    mix(mix(seed + golden) + (position + 1) * golden). The seed counts modulo 2 ** 64.
    """
    stream = _mix((seed + GOLDEN) & MASK)
    key = _mix((stream + (position + 1) * GOLDEN) & MASK)
    return key - (1 << 64) if key >> 63 else key


def gumbel_noise(key: int, token_id: int) -> float:
    """A Gumbel variate, the same on every machine and in every release up to rounding.

    -log(-log1p(-v)), where v is the top 53 bits of mix(key + (token_id + 1) * golden), plus a half, times
    2 ** -53, and at most LARGEST.
    """
    bits = _mix((key + (token_id + 1) * GOLDEN) & MASK) >> 11
    return -math.log(-math.log1p(-min((bits + 0.5) * 2.0**-53, LARGEST)))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * FIRST) & MASK
    z = ((z ^ (z >> 27)) * SECOND) & MASK
    return z ^ (z >> 31)
