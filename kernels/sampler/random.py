"""Random numbers of a request: a pure function of its seed and the position of the token drawn.

So a request draws the same numbers whatever else runs, and after a preemption too. Knows nothing of tensors.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform_from_seed(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2 ** -53, the same on every machine and in every release.

    With mix the finaliser of SplitMix64 (Steele, Lea and Flood 2014) and all sums modulo 2 ** 64: the top 53
    bits of mix(mix(seed + golden) + (position + 1) * golden). The seed counts modulo 2 ** 64.
    """
    stream = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((stream + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
