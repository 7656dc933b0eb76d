"""What the decode kernels share: the tile a state is read in, loads, norms and gates.

A state [V, K] is read as a tile [V, K / 32, 32]: Triton then lays eight lanes along 32 neighbouring keys (one
128-byte line) and four along V, and keeps the K / 32 pieces in a thread's registers, so that S k and S q are
sums inside a thread and three shuffles. As a plain [V, K] tile, 32 lanes lie along K; each row costs five.
"""

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def load_masked(pointers, mask, MASKED: tl.constexpr):
    """fp32 values, 0 where masked; without MASKED the mask is not looked at."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def store_masked(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty))


@triton.jit
def key_tile(K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Offsets of one head's keys as [BLOCK_K / 32, 32], and which of them exist."""
    keys = tl.arange(0, BLOCK_K // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return keys, keys < K


@triton.jit
def state_tile(keys, values, K: tl.constexpr, V: tl.constexpr):
    """Offsets of a state [V, K] as [BLOCK_V, BLOCK_K / 32, 32], and which of them exist."""
    offsets = keys[None, :, :] + values[:, None, None] * K
    return offsets, (keys < K)[None, :, :] & (values < V)[:, None, None]


@triton.jit
def read_state(tile, vector):
    """sum over k of S[v, k] x[k]: tile [BLOCK_V, BLOCK_K / 32, 32], vector [BLOCK_K / 32, 32]."""
    return tl.sum(tl.sum(tile * vector[None, :, :], 1), 1)


@triton.jit
def dot_keys(x, y):
    """Scalar product of two [BLOCK_K / 32, 32]."""
    return tl.sum(tl.sum(x * y, 0), 0)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def exp_exact(x):
    """exp(x) to about one rounding, for x < 88; below -87 as at -87.

    Triton's exp rounds x / ln 2 before the hardware's exp2, which errs by |x| roundings: too much for a decay
    that multiplies a whole state. Here the whole part of x / ln 2 is split off first (ln 2 in two parts, so that
    the rest is exact), and of the rest's product at most half a rounding remains.
    """
    x = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    r = x - n * 0.693359375 + n * 2.12194440e-4
    return tl.exp2(r * 1.44269504088896341) * tl.exp2(n)


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)), with a log1p that keeps small arguments."""
    t = tl.exp(-tl.abs(x))
    w = 1.0 + t
    log1p = tl.where(w == 1.0, t, tl.log(w) * (t / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + log1p
