"""Between the passes of sampling on the GPU: which pivots hold the thresholds, and gathering what is between.

`locate` adds up what `measure_chunks` wrote, settles greedy and unfiltered rows, and for a filtered row finds
two intervals of logits: one that holds the boundary of the kept tokens, one that holds the token drawn.
`gather_between` copies their tokens out. Knows nothing of how a threshold is found inside.
"""

import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_greedy import first_at
from hybridserve.kernels.sampler.triton_math import (
    LOWEST,
    below,
    bounded,
    inverse_temperature,
    load_columns,
    uniform_of,
    weight_of,
)
from hybridserve.kernels.sampler.triton_measure import (
    BROKEN,
    FIRST_MASS,
    GUARD,
    MASS,
    PEAK,
    is_counted,
    is_filtered,
    is_short,
)

# columns of a row's plan, fp64
KIND, TOP, TOTAL, WHOLE, SAME, BOUNDARY, DRAW = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 8, 12))
PLAN = 16
# and of an interval in it: LOW < logit <= HIGH; tokens and mass above HIGH
LOW, HIGH, COUNT_ABOVE, MASS_ABOVE = (tl.constexpr(i) for i in range(4))
# kinds of rows: settled by `locate`, or left to `resolve`
SETTLED, FILTERED = (tl.constexpr(float(i)) for i in range(2))


@triton.jit
def _store_interval(plan, inside, outside, pivot, count, mass, top):
    """Store the interval between the lowest pivot known to be inside and the highest known to be outside.

    Returns its high and its low end, and the mass above each.
    """
    infinity = float("inf")
    index = tl.arange(0, pivot.shape[0])
    high = tl.min(tl.where(inside, pivot, infinity))
    low = tl.max(tl.where(outside, pivot, -infinity))
    high_pivot = tl.min(tl.where(inside & (pivot == high), index, pivot.shape[0]))
    mass_above = tl.sum(tl.where(index == high_pivot, mass, 0.0))
    mass_below = tl.min(tl.where(outside & (pivot == low), mass, infinity))
    high = tl.minimum(high, top)
    tl.store(plan + LOW, low.to(tl.float64))
    tl.store(plan + HIGH, high.to(tl.float64))
    tl.store(plan + COUNT_ABOVE, tl.sum(tl.where(index == high_pivot, count, 0)).to(tl.float64))
    tl.store(plan + MASS_ABOVE, mass_above)
    return high, low, mass_above, mass_below


@triton.jit
def _draw_by_id(row, vocab, chunk_mass, chunk_peak, top, u, high, low, CHUNK: tl.constexpr):
    """The token at the share `u` of a row's mass, by rising id: first a chunk, then a token in it."""
    chunks = tl.arange(0, chunk_mass.shape[0])
    cumulative = tl.cumsum(chunk_mass, 0)
    target = tl.minimum(u * tl.max(cumulative), below(tl.max(cumulative)))
    # a chunk or token without mass is never drawn, however sums are rounded
    drawable = chunk_mass > 0
    past = tl.min(tl.where(drawable & (cumulative > target), chunks, chunk_mass.shape[0]))
    chunk = tl.minimum(past, tl.max(tl.where(drawable, chunks, 0)))
    here = chunks == chunk
    before = tl.sum(tl.where(here, cumulative - chunk_mass, 0.0))
    peak = tl.max(tl.where(here, chunk_peak, LOWEST))
    scale = tl.exp(
        (peak - top).to(tl.float64) * (high.to(tl.float64) + low.to(tl.float64)) * 0.6931471805599453
    )
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = weight_of(bounded(load_columns(row, cols, vocab)), peak, high, low)
    weight = tl.where(cols < vocab, weight, 0.0).to(tl.float64)
    inside = tl.cumsum(weight, 0)
    rest = tl.minimum((target - before) / scale, below(tl.max(inside)))
    token = tl.min(tl.where((weight > 0) & (inside > rest), cols, vocab))
    return tl.minimum(token, tl.max(tl.where(weight > 0, cols, 0)))


@triton.jit
def _locate_filtered(plan, top, total, heat, k, p, least, u, pivot, count, mass, used, vocab):
    """Store the two intervals of a filtered row; the truth about a pivot may not be known yet."""
    by_count = is_counted(k, vocab)
    limit = tl.where(by_count, k, vocab)
    # the total that top_p refers to is what top_k keeps: bounded by the pivots around the k-th token
    kept_least = tl.where(by_count, tl.max(tl.where(used & (count < limit), mass, 0.0)), total)
    kept_most = tl.where(by_count, tl.min(tl.where(used & (count >= limit), mass, total)), total)
    weight = tl.exp((pivot - top).to(tl.float64) / heat.to(tl.float64))
    first = pivot >= top
    infinity = float("inf")
    inside = (count < limit) & (mass < tl.where(p < 1, p * kept_least, infinity)) & (weight >= least)
    # with top_k and top_p, the k-th token must be found first, from the same tokens
    both = by_count & (p < 1)
    kept_mass = tl.where((p < 1) & (both == 0), p * kept_most, infinity)
    outside = (count >= limit) | (mass >= kept_mass) | (weight < tl.where(both, 0.0, least))
    whole = (p >= 1) & (least <= 0) & (by_count == 0)
    high, low, above_high, above_low = _store_interval(
        plan + BOUNDARY, used & (inside | first), used & outside & (pivot < top), pivot, count, mass, top
    )

    # the mass of what is kept, and so the point drawn, is known within these
    least_mass = tl.where(
        (p < 1) & (least <= 0) & (by_count == 0), tl.maximum(above_high, p * total), above_high
    )
    last = tl.exp((high - top).to(tl.float64) / heat.to(tl.float64))
    most_mass = tl.minimum(above_low, tl.where(p < 1, p * kept_most + last, total))
    least_mass = tl.where(whole, total, least_mass)
    most_mass = tl.where(whole, total, tl.minimum(most_mass, total))
    drawn_inside = mass <= u * least_mass * (1 - 1e-6)
    drawn_outside = (mass > u * most_mass * (1 + 1e-6)) | (pivot <= tl.where(whole, -infinity, low))
    drawn_high, drawn_low, _, _ = _store_interval(
        plan + DRAW,
        used & (drawn_inside | first),
        used & drawn_outside & (pivot < top),
        pivot,
        count,
        mass,
        top,
    )
    same = (whole == 0) & (drawn_low == low) & (drawn_high == high)
    tl.store(plan + KIND, FILTERED)
    tl.store(plan + TOP, top.to(tl.float64))
    tl.store(plan + TOTAL, total)
    tl.store(plan + WHOLE, whole.to(tl.float64))
    tl.store(plan + SAME, same.to(tl.float64))


@triton.jit
def locate(
    logits,
    row_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    seeds,
    positions,
    pivots,
    floats,
    counts,
    plans,
    gathered,
    tokens,
    finite,
    HASHED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIVOTS: tl.constexpr,
    PADDED: tl.constexpr,
    PLAN: tl.constexpr,
):
    """One program a row: `finite`, the token of rows that need no more, and the plan fp64 [PLAN] of others.

    gathered: int32 [B, 2], tokens in the two intervals, is set to zero for `gather_between`.
    A filtered row's token is its likeliest one until `resolve` overwrites it.
    """
    row = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(vocab, CHUNK)
    chunks = tl.arange(0, CHUNKS_PADDED)
    real = chunks < num_chunks
    here = floats + row * (FIRST_MASS + PIVOTS) * num_chunks + chunks
    chunk_peak = tl.load(here + PEAK * num_chunks, mask=real, other=LOWEST)
    broken = tl.load(here + BROKEN * num_chunks, mask=real, other=0.0)
    tl.store(finite + row, tl.sum(broken) == 0.0)
    top = tl.max(chunk_peak)
    first = tl.min(tl.where(real & (chunk_peak == top), chunks, num_chunks - 1))
    this_row = logits + row * row_stride
    token = first_at(this_row, vocab, first * CHUNK, top, CHUNK)
    plan = plans + row * PLAN
    tl.store(plan + KIND, SETTLED)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat > 0:
        high, low = inverse_temperature(heat)
        natural = (high.to(tl.float64) + low.to(tl.float64)) * 0.6931471805599453
        scale = tl.exp((chunk_peak - top).to(tl.float64) * natural)
        chunk_mass = tl.load(here + MASS * num_chunks, mask=real, other=0.0).to(tl.float64) * scale
        u = uniform_of(uniform, seeds, positions, row, HASHED)
        k = tl.load(top_k + row).to(tl.int64)
        p = tl.load(top_p + row).to(tl.float64)
        least = tl.load(min_p + row).to(tl.float64)
        if is_filtered(k, p, least):
            index = tl.arange(0, PADDED)
            by_count = is_counted(k, vocab)
            used = (index >= tl.where(by_count & is_short(k, CANDIDATES), GUARD, 0)) & (index < PIVOTS)
            pivot = tl.load(pivots + row * PADDED + index, mask=used, other=0.0)
            grid = index[:, None] * num_chunks + chunks[None, :]
            both = used[:, None] & real[None, :]
            above = floats + (row * (FIRST_MASS + PIVOTS) + FIRST_MASS) * num_chunks
            mass = tl.sum(tl.load(above + grid, mask=both, other=0.0).to(tl.float64) * scale[None, :], axis=1)
            count = tl.zeros([PADDED], tl.int32)
            if by_count:
                counted = counts + row * PIVOTS * num_chunks
                count = tl.sum(tl.load(counted + grid, mask=both, other=0), axis=1)
            total = tl.sum(chunk_mass)
            _locate_filtered(plan, top, total, heat, k, p, least, u, pivot, count, mass, used, vocab)
            tl.store(gathered + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
        else:
            token = _draw_by_id(this_row, vocab, chunk_mass, chunk_peak, top, u, high, low, CHUNK)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def gather_between(
    logits,
    row_stride,
    vocab,
    plans,
    gathered,
    lists,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PLAN: tl.constexpr,
):
    """One program a chunk of a row: lists int64 [B, 2, CANDIDATES], the tokens of boundary and draw.

    An entry is the bits of a logit above its id. Chunks take places as they come, so that a reader must not
    depend on a list's order; tokens that do not fit are only counted.
    """
    num_chunks = tl.cdiv(vocab, CHUNK)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    plan = plans + row * PLAN
    if tl.load(plan + KIND) == FILTERED:
        infinity = float("inf")
        low = tl.where(tl.load(plan + WHOLE) == 0, tl.load(plan + BOUNDARY + LOW).to(tl.float32), infinity)
        high = tl.load(plan + BOUNDARY + HIGH).to(tl.float32)
        drawn_low = tl.where(tl.load(plan + SAME) == 0, tl.load(plan + DRAW + LOW).to(tl.float32), infinity)
        drawn_high = tl.load(plan + DRAW + HIGH).to(tl.float32)
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        x = bounded(load_columns(logits + row * row_stride, cols, vocab))
        x = tl.where(cols < vocab, x, -infinity)
        # two numbers in one: whether it is of the one list, and of the other
        flags = ((x > low) & (x <= high)).to(tl.int32)
        flags += tl.where((x > drawn_low) & (x <= drawn_high), 65536, 0)
        found = tl.sum(flags)
        if found > 0:
            place = tl.cumsum(flags, 0) - flags
            entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | cols
            start = tl.atomic_add(gathered + row * 2, found & 65535, sem="relaxed")
            drawn_start = tl.atomic_add(gathered + row * 2 + 1, found >> 16, sem="relaxed")
            here = start + (place & 65535)
            fits = ((flags & 1) == 1) & (here < CANDIDATES)
            tl.store(lists + row * 2 * CANDIDATES + here, entry, mask=fits)
            here = drawn_start + (place >> 16)
            fits = (flags > 1) & (here < CANDIDATES)
            tl.store(lists + (row * 2 + 1) * CANDIDATES + here, entry, mask=fits)
