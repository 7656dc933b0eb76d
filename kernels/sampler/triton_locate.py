"""Between the passes of sampling on the GPU: which pivots hold the boundary, and gathering what is between.

`locate` adds up what `measure_chunks` wrote, settles greedy and unfiltered rows, and for a filtered row finds
an interval of logits that holds the boundary of the kept tokens. `gather_between` copies its tokens out, and
scores those above it, which are all kept. Knows nothing of how the boundary is found inside.
"""

import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_math import (
    LOWEST,
    NONE,
    best_drawn,
    best_of,
    bounded,
    id_in,
    inverse_temperature,
    load_columns,
    noise_key,
    score_in,
    sharpness,
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

# columns of a row's plan, fp64: its kind, largest logit and mass, and the interval LOW < logit <= HIGH with
# the tokens and mass above HIGH
KIND, TOP, TOTAL, LOW, HIGH, COUNT_ABOVE, MASS_ABOVE = (tl.constexpr(i) for i in range(7))
PLAN = 8
# kinds of rows: settled by `locate`, or left to `resolve`
SETTLED, FILTERED = (tl.constexpr(float(i)) for i in range(2))


@triton.jit
def _locate_filtered(plan, top, total, heat, k, p, least, pivot, count, mass, used, vocab):
    """Store the plan of a filtered row, whose interval lies between the lowest pivot known to be kept and the
    highest known not to be; the truth about a pivot may not be known yet."""
    by_count = is_counted(k, vocab)
    limit = tl.where(by_count, k, vocab)
    # the total that top_p refers to is what top_k keeps: bounded by the pivots around the k-th token
    kept_least = tl.where(by_count, tl.max(tl.where(used & (count < limit), mass, 0.0)), total)
    kept_most = tl.where(by_count, tl.min(tl.where(used & (count >= limit), mass, total)), total)
    weight = tl.exp((pivot - top).to(tl.float64) / heat.to(tl.float64))
    infinity = float("inf")
    inside = (count < limit) & (mass < tl.where(p < 1, p * kept_least, infinity)) & (weight >= least)
    inside = used & (inside | (pivot >= top))
    # with top_k and top_p, the k-th token must be found first, from the same tokens
    both = by_count & (p < 1)
    kept_mass = tl.where((p < 1) & (both == 0), p * kept_most, infinity)
    outside = (count >= limit) | (mass >= kept_mass) | (weight < tl.where(both, 0.0, least))
    outside = used & outside & (pivot < top)

    index = tl.arange(0, pivot.shape[0])
    high = tl.min(tl.where(inside, pivot, infinity))
    low = tl.max(tl.where(outside, pivot, -infinity))
    here = index == tl.min(tl.where(inside & (pivot == high), index, pivot.shape[0]))
    tl.store(plan + KIND, FILTERED)
    tl.store(plan + TOP, top.to(tl.float64))
    tl.store(plan + TOTAL, total)
    tl.store(plan + LOW, low.to(tl.float64))
    tl.store(plan + HIGH, tl.minimum(high, top).to(tl.float64))
    tl.store(plan + COUNT_ABOVE, tl.sum(tl.where(here, count, 0)).to(tl.float64))
    tl.store(plan + MASS_ABOVE, tl.sum(tl.where(here, mass, 0.0)))


@triton.jit
def locate(
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    pivots,
    floats,
    counts,
    best,
    plans,
    gathered,
    tokens,
    finite,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIVOTS: tl.constexpr,
    PADDED: tl.constexpr,
    PLAN: tl.constexpr,
):
    """One program a row: `finite`, the token of a row without filters, and the plan fp64 [PLAN] of another.

    gathered: int32 [B], tokens in the interval, is set to zero for `gather_between`.
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
    plan = plans + row * PLAN
    heat = tl.load(temperature + row).to(tl.float32)
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    least = tl.load(min_p + row).to(tl.float64)
    if (heat > 0) & is_filtered(k, p, least, vocab):
        high, low = inverse_temperature(heat)
        natural = (high.to(tl.float64) + low.to(tl.float64)) * 0.6931471805599453
        scale = tl.exp((chunk_peak - top).to(tl.float64) * natural)
        # masses are known where a top_p needs them
        weighed = chunks < tl.where(p < 1, num_chunks, 0)
        chunk_mass = tl.load(here + MASS * num_chunks, mask=weighed, other=0.0).to(tl.float64) * scale
        index = tl.arange(0, PADDED)
        by_count = is_counted(k, vocab)
        used = (index >= tl.where(by_count & is_short(k, CANDIDATES), GUARD, 0)) & (index < PIVOTS)
        pivot = tl.load(pivots + row * PADDED + index, mask=used, other=0.0)
        grid = index[:, None] * num_chunks + chunks[None, :]
        above = floats + (row * (FIRST_MASS + PIVOTS) + FIRST_MASS) * num_chunks
        mass = tl.sum(
            tl.load(above + grid, mask=used[:, None] & weighed[None, :], other=0.0).to(tl.float64)
            * scale[None, :],
            axis=1,
        )
        count = tl.zeros([PADDED], tl.int32)
        if by_count:
            counted = counts + row * PIVOTS * num_chunks
            count = tl.sum(tl.load(counted + grid, mask=used[:, None] & real[None, :], other=0), axis=1)
        _locate_filtered(plan, top, tl.sum(chunk_mass), heat, k, p, least, pivot, count, mass, used, vocab)
        tl.store(gathered + row, 0)
    else:
        tl.store(plan + KIND, SETTLED)
        chunk_best = tl.load(best + row * num_chunks + chunks, mask=real, other=0)
        # a chunk's scores refer to its own peak
        moved = (chunk_peak - top) * sharpness(heat)
        token = id_in(best_of(score_in(chunk_best) + moved, id_in(chunk_best), real))
        # of a row of NaN a padding column may come out best
        tl.store(tokens + row, tl.minimum(token.to(tl.int64), vocab - 1))


@triton.jit
def _append(
    listed,
    place,
    row,
    start,
    vocab,
    low,
    high,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the tokens of (low, high] of a chunk in a list, from `place` on.

    The chunk is read again, from the L1, in tiles: scattered all at once it would take too many registers.
    """
    for at in range(0, CHUNK, TILE):
        cols = start + at + tl.arange(0, TILE)
        x = bounded(load_columns(row, cols, vocab))
        between = ((cols < vocab) & (x > low) & (x <= high)).to(tl.int32)
        found = tl.sum(between)
        if found > 0:
            slot = place + tl.cumsum(between, 0) - 1
            entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | cols
            tl.store(listed + slot, entry, mask=(between > 0) & (slot < CANDIDATES))
            place += found


@triton.jit(do_not_specialize=["share"])
def gather_between(
    logits,
    row_stride,
    vocab,
    share,
    temperature,
    keys,
    positions,
    plans,
    gathered,
    lists,
    above,
    HASHED: tl.constexpr,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PLAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for `share` chunks of a filtered row: its interval's tokens in lists int64 [B, CANDIDATES].

    An entry is the bits of a logit above its id. Chunks take places as they come, so that a reader must not
    depend on a list's order; tokens that do not fit are only counted. above: int64 [B, chunks], `best_of` the
    score (logit - top) / temperature + noise of the tokens above the interval.
    """
    num_chunks = tl.cdiv(vocab, CHUNK)
    num_shares = tl.cdiv(num_chunks, share)
    row = (tl.program_id(0) // num_shares).to(tl.int64)
    first_chunk = tl.program_id(0) % num_shares * share
    plan = plans + row * PLAN
    # all at once, so that no wait follows another; of a settled row nothing but its kind is known
    kind = tl.load(plan + KIND)
    low = tl.load(plan + LOW).to(tl.float32)
    high = tl.load(plan + HIGH).to(tl.float32)
    top = tl.load(plan + TOP).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)
    key = noise_key(keys, positions, row, HASHED)
    if kind == FILTERED:
        this_row = logits + row * row_stride
        for chunk in range(first_chunk, tl.minimum(first_chunk + share, num_chunks)):
            start = chunk * CHUNK
            cols = start + tl.arange(0, CHUNK)
            x = bounded(load_columns(this_row, cols, vocab))
            x = tl.where(cols < vocab, x, -float("inf"))
            found = tl.sum(((x > low) & (x <= high)).to(tl.int32))
            if found > 0:
                place = tl.atomic_add(gathered + row, found, sem="relaxed")
                listed = lists + row * CANDIDATES
                _append(listed, place, this_row, start, vocab, low, high, CHUNK, CANDIDATES, TILE)
            best = tl.full([], NONE, tl.int64)
            peak = tl.max(x)
            if peak > high:
                best = best_drawn(this_row, start, vocab, x, cols, high, peak, top, heat, key, CHUNK, TILE)
            tl.store(above + row * num_chunks + chunk, best)
