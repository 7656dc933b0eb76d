"""What the sampler's Triton kernels share: uniform numbers, weights, and floats ordered as integers.

Device functions only; knows nothing of filters or launches.
"""

import triton
import triton.language as tl

# powers of two, so that they are exact in bf16 too
LOWEST = tl.constexpr(-(2.0**126))
HIGHEST = tl.constexpr(2.0**126)
_LOG2E = tl.constexpr(1.4426950408889634)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * tl.full([], _FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _SECOND, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def uniform_of(uniform, seeds, positions, row, HASHED: tl.constexpr):
    """fp64 in [0, 1): `uniform[row]`, or with HASHED what `uniform_from_seed` gives, bit for bit."""
    if HASHED:
        golden = tl.full([], _GOLDEN, tl.uint64)
        stream = _mix(tl.load(seeds + row).to(tl.uint64) + golden)
        steps = (tl.load(positions + row) + 1).to(tl.uint64)
        drawn = _mix(stream + steps * golden) >> 11
        u = drawn.to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)
    else:
        u = tl.load(uniform + row).to(tl.float64)
    return u


@triton.jit
def load_columns(row, cols, vocab):
    """fp32 of the columns `cols` of a row of logits, LOWEST past its end."""
    if row.dtype.element_ty == tl.float16:
        x = tl.load(row + cols, mask=cols < vocab, other=0.0).to(tl.float32)
        x = tl.where(cols < vocab, x, LOWEST)
    else:
        x = tl.load(row + cols, mask=cols < vocab, other=LOWEST).to(tl.float32)
    return x


@triton.jit
def bounded(x):
    """fp32 within [LOWEST, HIGHEST], so that differences are finite; NaN becomes the lowest."""
    return tl.minimum(tl.maximum(x, LOWEST), HIGHEST)


@triton.jit
def inverse_temperature(temperature):
    """log2(e) / temperature as a sum of two fp32: one alone would bias every weight the same way."""
    exact = tl.minimum(_LOG2E / temperature.to(tl.float64), 1e30)
    high = exact.to(tl.float32)
    low = (exact - high.to(tl.float64)).to(tl.float32)
    # so cold, the correction matters to nobody and could overflow
    return high, tl.where(high > 1e6, 0.0, low)


@triton.jit
def weight_of(x, peak, high, low):
    """exp((x - peak) / temperature), fp32, of bounded x and of what `inverse_temperature` returns."""
    distance = x - peak
    return tl.exp2(distance * high + distance * low)


@triton.jit
def below(total):
    """The largest fp64 under a positive total; 0 for 0."""
    return tl.where(total > 0, (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True), 0.0)


@triton.jit
def above(value):
    """The smallest fp64 over a value >= 0."""
    return (value.to(tl.int64, bitcast=True) + 1).to(tl.float64, bitcast=True)


@triton.jit
def key_of(x):
    """int64 that orders as the fp32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def value_of(key):
    """The fp32 whose `key_of` is this."""
    bits = key.to(tl.int32)
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
