"""What the sampler's Triton kernels share: noise, weights, and floats ordered as integers.

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
# the largest number below 1
_LARGEST = tl.constexpr(1.0 - 2.0**-24)
IDS = tl.constexpr(0x7FFFFFFF)
# below everything that `best_of` makes
NONE = tl.constexpr(-(2**63))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * tl.full([], _FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _SECOND, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def noise_key(keys, positions, row, HASHED: tl.constexpr):
    """uint64, what a row's noise follows from: `keys[row]`, or with HASHED `draw_key` of that as the seed."""
    key = tl.load(keys + row).to(tl.uint64)
    if HASHED:
        golden = tl.full([], _GOLDEN, tl.uint64)
        steps = (tl.load(positions + row) + 1).to(tl.uint64)
        key = _mix(_mix(key + golden) + steps * golden)
    return key


@triton.jit
def noise_of(key, ids):
    """Gumbel noise of the tokens `ids`, fp32: what `gumbel_noise` gives, up to rounding."""
    drawn = _mix(key + (ids + 1).to(tl.uint64) * tl.full([], _GOLDEN, tl.uint64))
    # the top 53 bits and a half, as twice that number: one conversion rounds it
    v = ((drawn >> 10) | 1).to(tl.int64).to(tl.float32) * (1.0 / 18014398509481984.0)
    v = tl.minimum(v, _LARGEST)
    # -log1p(-v), of the rounded 1 - v and of what the rounding took
    rest = 1.0 - v
    exponential = v - (1.0 - rest) - tl.log(rest)
    return -tl.log(exponential)


@triton.jit
def least_exponential(key, ids):
    """fp32, at most exp(-noise) of the tokens `ids` but for rounding, and above half of it in half of them.

    exp(-noise) is -log1p(-v); this is the head of its series at v's top 32 bits, for a third of the work.
    """
    drawn = _mix(key + (ids + 1).to(tl.uint64) * tl.full([], _GOLDEN, tl.uint64))
    # never zero, so that a product with infinity is no NaN
    v = (drawn >> 32).to(tl.uint32).to(tl.float32) * (1.0 / 4294967296.0) + (1.0 / 18014398509481984.0)
    return v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4))))


@triton.jit
def sharpness(temperature):
    """1 / temperature, fp32, finite; 1 for 0, where scores are differences of logits."""
    return tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0), 1e30)


@triton.jit
def best_of(score, ids, kept):
    """int64 that orders as the best of the kept scores, then as its falling id; below all others if none is.

    `score_in` and `id_in` take it apart.
    """
    score = tl.where(kept, tl.maximum(score, LOWEST), -float("inf"))
    best = tl.max(score)
    first = tl.min(tl.where(score == best, ids, IDS))
    return (key_of(best) << 32) | (first ^ IDS).to(tl.int64)


@triton.jit
def best_drawn(
    row, start, vocab, x, cols, above, peak, top, heat, key, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """`best_of` the scores (x - top) / temperature + noise of those of x that are greater than `above`.

    x: bounded logits of the columns cols, all of [start, start + CHUNK) of a row; peak: the largest of them,
    greater than `above`.
    The best score has the least exp(-noise) / weight. A bound of that is cheap; where it leaves one token, as
    nearly always, noise is computed for that one, and for all of them otherwise.
    """
    rate = sharpness(heat)
    bound = least_exponential(key, cols) * tl.exp2((peak - x) * (rate * _LOG2E))
    bound = tl.where((cols < vocab) & (x > above), bound, float("inf"))
    token = tl.min(tl.where(bound == tl.min(bound), cols, IDS))
    own = bounded(tl.load(row + token, mask=token < vocab, other=0.0).to(tl.float32))
    noise = noise_of(key, token)
    best = (key_of(tl.maximum((own - top) * rate + noise, LOWEST)) << 32) | (token ^ IDS).to(tl.int64)
    # room for the rounding of both
    reach = tl.exp2(((own - peak) * rate + noise) * -_LOG2E) * 1.0001
    if tl.sum((bound <= reach).to(tl.int32)) > 1:
        best = tl.full([], NONE, tl.int64)
        for at in range(0, CHUNK, TILE):
            ids = start + at + tl.arange(0, TILE)
            logit = bounded(load_columns(row, ids, vocab))
            score = (logit - top) * rate + noise_of(key, ids)
            best = tl.maximum(best, best_of(score, ids, (ids < vocab) & (logit > above)))
    return best


@triton.jit
def score_in(best):
    return value_of(best >> 32)


@triton.jit
def id_in(best):
    return (best & IDS).to(tl.int32) ^ IDS


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
    """fp32 within [LOWEST, HIGHEST], so that differences are finite; NaN becomes the lowest, and -0 is 0."""
    return tl.minimum(tl.maximum(x, LOWEST), HIGHEST) + 0.0


@triton.jit
def inverse_temperature(temperature):
    """log2(e) / temperature as a sum of two fp32: one alone would bias every weight the same way."""
    exact = tl.minimum(tl.full([], _LOG2E, tl.float64) / temperature.to(tl.float64), 1e30)
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
