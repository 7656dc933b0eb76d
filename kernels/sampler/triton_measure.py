"""The first half of sampling on the GPU: pivots from a sample of each row, then counts and masses above them.

Every filter keeps a prefix of a row's ranking, so that what is kept has a boundary. A small sample says about
where it lies; one pass over the logits then measures, exactly, how many tokens and how much mass lie above
each pivot, and for a row without filters which token scores best. Knows nothing of how the boundary is found
from that. "Mass" is the sum of exp((logit - peak) / temperature).
"""

import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_math import (
    HIGHEST,
    best_drawn,
    best_of,
    bounded,
    inverse_temperature,
    load_columns,
    noise_key,
    weight_of,
)

# those around the boundary, and one that guards the top of the ranking
PIVOTS = 8
PIVOTS_PADDED = 8
# columns of a chunk's floats, before the masses above the pivots
PEAK, BROKEN, MASS, FIRST_MASS = (tl.constexpr(i) for i in range(4))
FLOATS = 3 + PIVOTS
GUARD = tl.constexpr(7)
# sampled tokens above the guard at the least: enough that its place is known, few enough to be ranked
_GUARDED = tl.constexpr(8.0)


@triton.jit
def is_counted(top_k, vocab):
    """Whether top_k drops anything, so that tokens must be counted."""
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def is_filtered(top_k, top_p, min_p, vocab):
    return is_counted(top_k, vocab) | (top_p < 1) | (min_p > 0)


@triton.jit
def is_short(top_k, CANDIDATES: tl.constexpr):
    """Whether what top_k keeps may be gathered whole: then the guard is the only pivot needed."""
    return (top_k > 0) & (top_k <= CANDIDATES // 2)


@triton.jit
def _bracket(pivots, share, room, index, cumulative, mass, square, count, cum_count, top, width):
    """Store the pivots around the point with `share` of the sampled mass above it, GUARD of them.

    The share above a fixed point has the variance of a ratio of sums: (1 - share)^2 times the squared weights
    above plus share^2 times those below, over the squared total. One heavy token in the sample makes that
    estimate poor, hence ten deviations at either end; no more than `room` sampled tokens are to lie between
    two pivots, so that they can be gathered.
    """
    total = tl.sum(mass)
    over = tl.sum(tl.where(cumulative - mass < share * total, square, 0.0))
    variance = (1 - share) * (1 - share) * over + share * share * tl.maximum(tl.sum(square) - over, 0.0)
    deviation = tl.sqrt(variance) / total
    middle = tl.sum((cumulative < share * total).to(tl.float32))
    tl.store(pivots + 3, top - middle * width)
    lower, upper = middle, middle
    for i in tl.static_range(3):
        z = i + 1.0 if i < 2 else 10.0
        seen = tl.sum(tl.where(index < lower, count, 0.0))
        edge = tl.sum((cumulative < (share + z * deviation) * total).to(tl.float32))
        lower = tl.maximum(tl.minimum(edge, tl.sum((cum_count < seen + room).to(tl.float32))), lower)
        tl.store(pivots + 4 + i, top - (lower + 1) * width)
        seen = tl.sum(tl.where(index < upper, count, 0.0))
        edge = tl.sum((cumulative < (share - z * deviation) * total).to(tl.float32))
        upper = tl.minimum(tl.maximum(edge, tl.sum((cum_count < seen - room).to(tl.float32))), upper)
        tl.store(pivots + 2 - i, top - upper * width)


@triton.jit
def choose_pivots(
    logits,
    row_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    pivots,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One program a row that is filtered: pivots fp32 [B, PADDED] from a histogram of SAMPLE of its logits.

    A poor sample costs time, never correctness.
    """
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float32)
    k = tl.load(top_k + row).to(tl.float32)
    p = tl.load(top_p + row).to(tl.float32)
    least = tl.load(min_p + row).to(tl.float32)
    if (heat > 0) & is_filtered(k, p, least, vocab):
        at = tl.arange(0, SAMPLE)
        # 128-byte segments, evenly spread; a short row is taken whole
        spread = at // 32 * vocab // (SAMPLE // 32) + at % 32
        cols = tl.where(vocab > SAMPLE, spread, at)
        x = bounded(load_columns(logits + row * row_stride, cols, vocab))
        taken = cols < vocab
        top = tl.max(x)
        bottom = tl.min(tl.where(taken, x, HIGHEST))
        # far below the top nothing weighs, and an outlier there must not widen the bins
        width = tl.maximum(tl.minimum(top - bottom, tl.maximum(30 * heat, 64.0)) / BINS, 1e-30)
        place = tl.minimum((top - x) / width, BINS - 1).to(tl.int32)
        count = tl.histogram(place, BINS, mask=taken).to(tl.float32)
        index = tl.arange(0, BINS)
        high, low = inverse_temperature(heat)
        weight = tl.exp2(-(index + 0.5) * width * high)
        mass = count * weight
        square = mass * weight
        cum_count = tl.cumsum(count, 0)
        cum_mass = tl.cumsum(mass, 0)
        total = tl.sum(mass)

        # where each filter would end, as a share of the mass
        sampled = tl.minimum(vocab, SAMPLE).to(tl.float32)
        counted = k * sampled / vocab
        by_count = is_counted(k, vocab)
        count_share = tl.sum(tl.where(cum_count <= counted, mass, 0.0)) / total
        share = tl.minimum(p, tl.where(by_count, count_share, 1.0))
        share = tl.minimum(share, tl.sum(tl.where(weight >= least, mass, 0.0)) / total)
        # a small top_k lies above the guard; a large one is a quantile of the count, not of the mass
        short = by_count & is_short(k, CANDIDATES)
        counts = by_count & (short == 0) & (count_share <= share)
        out = pivots + row * PADDED
        _bracket(
            out,
            tl.where(counts, counted / sampled, share),
            CANDIDATES * 0.75 * sampled / vocab,
            index,
            tl.where(counts, cum_count, cum_mass),
            tl.where(counts, count, mass),
            tl.where(counts, count, square),
            count,
            cum_count,
            top,
            width,
        )
        above = tl.where(short, counted, 0.0)
        guarded = tl.maximum(above + 4 * tl.sqrt(above) + 4, _GUARDED)
        tl.store(out + GUARD, top - (tl.sum((cum_count < guarded).to(tl.float32)) + 1) * width)


@triton.jit
def measure_chunks(
    logits,
    row_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    positions,
    pivots,
    floats,
    counts,
    best,
    HASHED: tl.constexpr,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIVOTS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a chunk of a row, whose own peak is what its masses and scores refer to.

    floats: fp32 [B, 3 + PIVOTS, chunks]: peak; 1 where a NaN or infinity is; mass; mass above each pivot.
    counts: int32 [B, PIVOTS, chunks], tokens above each pivot. best: int64 [B, chunks], of the score
    (logit - peak) / temperature + noise, without noise in a greedy row. What a row does not need is not
    written: best of filtered rows, counts without a top_k, masses without a top_p.
    """
    num_chunks = tl.cdiv(vocab, CHUNK)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    # before the logits, so that no wait follows another
    heat = tl.load(temperature + row).to(tl.float32)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    filtered = (heat > 0) & is_filtered(k, p, tl.load(min_p + row), vocab)
    start = chunk * CHUNK
    cols = start + tl.arange(0, CHUNK)
    this_row = logits + row * row_stride
    raw = load_columns(this_row, cols, vocab)
    # 0 * NaN and 0 * inf are NaN
    nothing = tl.sum(raw * 0.0)
    x = bounded(raw)
    peak = tl.max(x)
    out = floats + row * (FIRST_MASS + PIVOTS) * num_chunks + chunk
    tl.store(out + PEAK * num_chunks, peak)
    tl.store(out + BROKEN * num_chunks, tl.where(nothing == 0.0, 0.0, 1.0))
    if filtered:
        pivots += row * PADDED
        first = tl.where(is_counted(k, vocab) & is_short(k, CANDIDATES), GUARD, 0)
        if p < 1:
            high, low = inverse_temperature(heat)
            weight = weight_of(x, peak, high, low)
            tl.store(out + MASS * num_chunks, tl.sum(weight))
            masses = out + FIRST_MASS * num_chunks
            if first == 0:
                for i in tl.static_range(GUARD):
                    higher = (x > tl.load(pivots + i)).to(tl.float32)
                    tl.store(masses + i * num_chunks, tl.sum(higher * weight))
            higher = (x > tl.load(pivots + GUARD)).to(tl.float32)
            tl.store(masses + GUARD * num_chunks, tl.sum(higher * weight))
        if is_counted(k, vocab):
            counted = counts + row * PIVOTS * num_chunks + chunk
            for i in range(first, PIVOTS):
                higher = x > tl.load(pivots + i)
                tl.store(counted + i * num_chunks, tl.sum(higher.to(tl.int32)))
    elif heat > 0:
        key = noise_key(keys, positions, row, HASHED)
        none = -float("inf")
        found = best_drawn(this_row, start, vocab, x, cols, none, peak, peak, heat, key, CHUNK, TILE)
        tl.store(best + row * num_chunks + chunk, found)
    else:
        tl.store(best + row * num_chunks + chunk, best_of(x - peak, cols, cols < vocab))
