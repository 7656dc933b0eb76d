"""Between the passes of sampling on the GPU: which pivots hold the thresholds, and gathering what is between.

`locate` adds up what `measure_chunks` wrote, settles greedy and unfiltered rows, and for a filtered row finds
two intervals of logits: one that holds the boundary of the kept tokens, one that holds the token drawn.
`gather_between` copies their tokens out, by rising id. Knows nothing of how a threshold is found inside.
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
from hybridserve.kernels.sampler.triton_measure import BROKEN, FIRST_MASS, MASS, PEAK, is_filtered

# columns of a row's plan, fp64
KIND, TOP, TOTAL, WHOLE, BOUNDARY, DRAW = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 12))
PLAN = 20
# and of an interval in it: LOW < logit <= HIGH; tokens and mass above HIGH; tokens within; pivots of its ends
LOW, HIGH, COUNT_ABOVE, MASS_ABOVE, WITHIN, LOW_PIVOT, HIGH_PIVOT = (tl.constexpr(i) for i in range(7))
# kinds of rows: settled by `locate`; to be resolved from gathered tokens; from the whole row
SETTLED, GATHERED, SCANNED = (tl.constexpr(float(i)) for i in range(3))


@triton.jit
def _store_interval(plan, inside, outside, pivot, count, mass, top, vocab):
    """Store the interval between the lowest pivot known to be inside and the highest known to be outside.

    Returns tokens within, its high and its low end, and the mass above its high and above its low end.
    """
    infinity = float("inf")
    index = tl.arange(0, pivot.shape[0])
    high = tl.min(tl.where(inside, pivot, infinity))
    low = tl.max(tl.where(outside, pivot, -infinity))
    high_pivot = tl.min(tl.where(inside & (pivot == high), index, pivot.shape[0]))
    low_pivot = tl.min(tl.where(outside & (pivot == low), index, pivot.shape[0]))
    count_above = tl.sum(tl.where(index == high_pivot, count, 0))
    mass_above = tl.sum(tl.where(index == high_pivot, mass, 0.0))
    bounded_below = low > -infinity
    count_below = tl.where(bounded_below, tl.sum(tl.where(index == low_pivot, count, 0)), vocab)
    within = count_below - count_above
    high = tl.minimum(high, top)
    tl.store(plan + LOW, low.to(tl.float64))
    tl.store(plan + HIGH, high.to(tl.float64))
    tl.store(plan + COUNT_ABOVE, count_above.to(tl.float64))
    tl.store(plan + MASS_ABOVE, mass_above)
    tl.store(plan + WITHIN, within.to(tl.float64))
    tl.store(plan + LOW_PIVOT, tl.where(bounded_below, low_pivot, -1).to(tl.float64))
    tl.store(plan + HIGH_PIVOT, tl.where(high_pivot < pivot.shape[0], high_pivot, -1).to(tl.float64))
    mass_below = tl.where(bounded_below, tl.sum(tl.where(index == low_pivot, mass, 0.0)), infinity)
    return within, high, low, mass_above, mass_below


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
def _locate_filtered(
    plan, top, total, heat, k, p, least, u, pivot, count, mass, used, vocab, CANDIDATES: tl.constexpr
):
    """Store the two intervals of a filtered row; the truth about a pivot may not be known yet."""
    limit = tl.where((k > 0) & (k < vocab), k, vocab)
    by_count = limit < vocab
    # the total that top_p refers to is what top_k keeps: bounded by the pivots around the k-th token
    kept_least = tl.where(by_count, tl.max(tl.where(used & (count < limit), mass, 0.0)), total)
    kept_most = tl.where(by_count, tl.min(tl.where(used & (count >= limit), mass, total)), total)
    weight = tl.exp((pivot - top).to(tl.float64) / heat.to(tl.float64))
    first = count == 0
    infinity = float("inf")
    inside = (count < limit) & (mass < tl.where(p < 1, p * kept_least, infinity)) & (weight >= least)
    # with top_k and top_p, the k-th token must be found first, from the same tokens
    both = by_count & (p < 1)
    kept_mass = tl.where((p < 1) & (both == 0), p * kept_most, infinity)
    outside = (count >= limit) | (mass >= kept_mass) | (weight < tl.where(both, 0.0, least))
    whole = (p >= 1) & (least <= 0) & (by_count == 0)
    within, high, low, above_high, above_low = _store_interval(
        plan + BOUNDARY, used & (inside | first), used & outside & ~first, pivot, count, mass, top, vocab
    )
    within = tl.where(whole, 0, within)

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
    drawn_within, _, _, _, _ = _store_interval(
        plan + DRAW,
        used & (drawn_inside | first),
        used & drawn_outside & ~first,
        pivot,
        count,
        mass,
        top,
        vocab,
    )
    fits = (within <= CANDIDATES) & (drawn_within <= CANDIDATES)
    tl.store(plan + KIND, tl.where(fits, GATHERED, SCANNED).to(tl.float64))
    tl.store(plan + TOP, top.to(tl.float64))
    tl.store(plan + TOTAL, total)
    tl.store(plan + WHOLE, whole.to(tl.float64))


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
            used = index < PIVOTS
            pivot = tl.load(pivots + row * PADDED + index, mask=used, other=0.0)
            grid = index[:, None] * num_chunks + chunks[None, :]
            both = used[:, None] & real[None, :]
            above = floats + (row * (FIRST_MASS + PIVOTS) + FIRST_MASS) * num_chunks
            mass = tl.sum(tl.load(above + grid, mask=both, other=0.0).to(tl.float64) * scale[None, :], axis=1)
            count = tl.sum(tl.load(counts + row * PIVOTS * num_chunks + grid, mask=both, other=0), axis=1)
            total = tl.sum(chunk_mass)
            _locate_filtered(
                plan, top, total, heat, k, p, least, u, pivot, count, mass, used, vocab, CANDIDATES
            )
        else:
            token = _draw_by_id(this_row, vocab, chunk_mass, chunk_peak, top, u, high, low, CHUNK)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _gather_interval(
    interval,
    values,
    ids,
    x,
    cols,
    chunk,
    counts,
    num_chunks,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """Copy one chunk's part of an interval to its place; places follow from the counts of earlier chunks."""
    low = tl.load(interval + LOW).to(tl.float32)
    high = tl.load(interval + HIGH).to(tl.float32)
    low_pivot = tl.load(interval + LOW_PIVOT).to(tl.int32)
    high_pivot = tl.load(interval + HIGH_PIVOT).to(tl.int32)
    chunks = tl.arange(0, CHUNKS_PADDED)
    above_low = tl.load(
        counts + low_pivot * num_chunks + chunks, mask=chunks < tl.where(low_pivot >= 0, chunk, 0), other=0
    )
    above_low = tl.where(low_pivot >= 0, tl.sum(above_low), chunk * CHUNK)
    above_high = tl.load(
        counts + high_pivot * num_chunks + chunks, mask=chunks < tl.where(high_pivot >= 0, chunk, 0), other=0
    )
    chosen = (x > low) & (x <= high) & (cols < vocab)
    place = above_low - tl.sum(above_high) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(values + place, x, mask=chosen)
    tl.store(ids + place, cols, mask=chosen)


@triton.jit
def gather_between(
    logits,
    row_stride,
    vocab,
    counts,
    plans,
    values,
    ids,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIVOTS: tl.constexpr,
    PLAN: tl.constexpr,
):
    """One program a chunk of a row: values fp32 and ids int32 [B, 2, CANDIDATES], boundary and draw."""
    num_chunks = tl.cdiv(vocab, CHUNK)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    plan = plans + row * PLAN
    if tl.load(plan + KIND) == GATHERED:
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        x = bounded(load_columns(logits + row * row_stride, cols, vocab))
        row_counts = counts + row * PIVOTS * num_chunks
        for i in tl.static_range(2):
            interval = plan + (DRAW if i else BOUNDARY)
            place = (row * 2 + i) * CANDIDATES
            if (tl.load(interval + WITHIN) > 0) & ((i == 1) | (tl.load(plan + WHOLE) == 0)):
                _gather_interval(
                    interval,
                    values + place,
                    ids + place,
                    x,
                    cols,
                    chunk,
                    row_counts,
                    num_chunks,
                    vocab,
                    CHUNK,
                    CHUNKS_PADDED,
                )
