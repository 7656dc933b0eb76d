"""The end of sampling on the GPU: thresholds found exactly among the gathered tokens, then the token drawn.

One program a row. A threshold is a logit, found by bisecting the fp32 numbers themselves: how many tokens and
how much mass lie above a number is a sum over tokens, whatever their order, so nothing is sorted.
"""

import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_locate import (
    BOUNDARY,
    COUNT_ABOVE,
    DRAW,
    HIGH,
    KIND,
    LOW,
    MASS_ABOVE,
    TOP,
    TOTAL,
    WHOLE,
    WITHIN,
)
from hybridserve.kernels.sampler.triton_math import (
    LOWEST,
    above,
    below,
    bounded,
    inverse_temperature,
    key_of,
    load_columns,
    uniform_of,
    value_of,
    weight_of,
)


@triton.jit
def _load(source, start, size, TILE: tl.constexpr):
    at = start + tl.arange(0, TILE)
    return bounded(load_columns(source, at, size)), at < size


@triton.jit
def _find_threshold(
    source,
    size,
    low,
    high,
    count_above,
    mass_above,
    count_limit,
    mass_limit,
    least,
    heat,
    top,
    TILE: tl.constexpr,
):
    """The smallest fp32 t in (low, high] such that a token with logit t would be kept: fewer than count_limit
    tokens and less than mass_limit lie above it, and it weighs `least` or more. `high` is known to be kept.

    source [size]: all logits of (low, high], or of the row; count_above, mass_above: of what is not in it.
    """
    inverse, correction = inverse_temperature(heat)
    lowest, highest = key_of(low), key_of(high)
    while highest - lowest > 1:
        span = highest - lowest
        key1 = lowest + (span + 3) // 4
        key2 = lowest + (span + 1) // 2
        key3 = lowest + (3 * span + 3) // 4
        t1, t2, t3 = value_of(key1), value_of(key2), value_of(key3)
        count1 = tl.zeros([TILE], tl.int32)
        count2 = tl.zeros([TILE], tl.int32)
        count3 = tl.zeros([TILE], tl.int32)
        mass1 = tl.zeros([TILE], tl.float32)
        mass2 = tl.zeros([TILE], tl.float32)
        mass3 = tl.zeros([TILE], tl.float32)
        for start in range(0, size, TILE):
            x, real = _load(source, start, size, TILE)
            weight = weight_of(x, top, inverse, correction)
            count1 += (real & (x > t1)).to(tl.int32)
            count2 += (real & (x > t2)).to(tl.int32)
            count3 += (real & (x > t3)).to(tl.int32)
            mass1 += tl.where(real & (x > t1), weight, 0.0)
            mass2 += tl.where(real & (x > t2), weight, 0.0)
            mass3 += tl.where(real & (x > t3), weight, 0.0)
        keep1 = (count_above + tl.sum(count1) < count_limit) & (mass_above + tl.sum(mass1) < mass_limit)
        keep2 = (count_above + tl.sum(count2) < count_limit) & (mass_above + tl.sum(mass2) < mass_limit)
        keep3 = (count_above + tl.sum(count3) < count_limit) & (mass_above + tl.sum(mass3) < mass_limit)
        if least > 0:
            keep1 = keep1 & (tl.exp((t1 - top).to(tl.float64) / heat.to(tl.float64)) >= least)
            keep2 = keep2 & (tl.exp((t2 - top).to(tl.float64) / heat.to(tl.float64)) >= least)
            keep3 = keep3 & (tl.exp((t3 - top).to(tl.float64) / heat.to(tl.float64)) >= least)
        highest = tl.where(keep1, key1, tl.where(keep2, key2, tl.where(keep3, key3, highest)))
        lowest = tl.where(keep1, lowest, tl.where(keep2, key1, tl.where(keep3, key2, key3)))
    return value_of(highest)


@triton.jit
def _measure(source, size, t, heat, top, TILE: tl.constexpr):
    """Tokens above t, their mass, tokens equal to t, and the smallest logit >= t that weighs anything."""
    inverse, correction = inverse_temperature(heat)
    count = tl.zeros([TILE], tl.int32)
    equal = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    next_up = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, size, TILE):
        x, real = _load(source, start, size, TILE)
        weight = weight_of(x, top, inverse, correction)
        count += (real & (x > t)).to(tl.int32)
        equal += (real & (x == t)).to(tl.int32)
        mass += tl.where(real & (x > t), weight, 0.0)
        next_up = tl.minimum(next_up, tl.where(real & (x >= t) & (weight > 0), x, float("inf")))
    return tl.sum(count), tl.sum(mass).to(tl.float64), tl.sum(equal), tl.min(next_up)


@triton.jit
def _place_of(source, size, t, ordinal, TILE: tl.constexpr):
    """Place in source of the `ordinal`-th (from 0) token equal to t; -1 if there are not so many."""
    place = -1
    seen = 0
    for start in range(0, size, TILE):
        x, real = _load(source, start, size, TILE)
        equal = (real & (x == t)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0) - 1
        at = start + tl.arange(0, TILE)
        place = tl.maximum(place, tl.max(tl.where((equal == 1) & (rank == ordinal), at, -1)))
        seen += tl.sum(equal)
    return place


@triton.jit
def _find_boundary(
    source, size, low, high, count_above, mass_above, k, p, least, total, heat, top, vocab, TILE: tl.constexpr
):
    """The lowest logit kept, how many of its tokens are kept (by rising id), and the mass of all that is kept."""
    inverse, correction = inverse_temperature(heat)
    limit = tl.where((k > 0) & (k < vocab), k, vocab).to(tl.int64)
    infinity = tl.full([], float("inf"), tl.float64)
    nothing = tl.full([], 0.0, tl.float64)
    if (limit < vocab) & (p < 1):
        # top_p refers to the mass that top_k keeps
        t = _find_threshold(
            source, size, low, high, count_above, mass_above, limit, infinity, nothing, heat, top, TILE
        )
        count, mass, equal, _ = _measure(source, size, t, heat, top, TILE)
        kept = tl.minimum(equal, limit - count_above - count)
        total = mass_above + mass + kept * weight_of(t, top, inverse, correction).to(tl.float64)
    # the likeliest token is kept however small top_p is
    mass_limit = tl.where(p < 1, tl.maximum(p * total, 1e-300), infinity)
    t = _find_threshold(
        source, size, low, high, count_above, mass_above, limit, mass_limit, least, heat, top, TILE
    )
    count, mass, equal, _ = _measure(source, size, t, heat, top, TILE)
    weight = weight_of(t, top, inverse, correction).to(tl.float64)
    kept = tl.minimum(equal, limit - count_above - count)
    before = mass_above + mass
    by_mass = tl.where(weight > 0, (mass_limit - before) / weight, infinity)
    kept = tl.minimum(kept, tl.ceil(tl.minimum(by_mass, 1e9)).to(tl.int64))
    return t, kept, before + kept * weight


@triton.jit
def resolve(
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
    plans,
    values,
    ids,
    tokens,
    KINDS: tl.constexpr,
    FROM_ROW: tl.constexpr,
    HASHED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PLAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row: overwrite the token of rows of kind KINDS, from gathered tokens or whole rows."""
    row = tl.program_id(0).to(tl.int64)
    plan = plans + row * PLAN
    if tl.load(plan + KIND) == KINDS:
        heat = tl.load(temperature + row).to(tl.float32)
        top = tl.load(plan + TOP).to(tl.float32)
        u = uniform_of(uniform, seeds, positions, row, HASHED)
        drawn = plan + DRAW
        kept_mass = tl.load(plan + TOTAL)
        boundary = LOWEST * 2.0
        kept = vocab.to(tl.int64)
        if FROM_ROW:
            source = logits + row * row_stride
            size = vocab
            drawn_source = source
            drawn_size = vocab
            count_above = 0
            mass_above = tl.full([], 0.0, tl.float64)
            drawn_above = tl.full([], 0.0, tl.float64)
        else:
            source = values + row * 2 * CANDIDATES
            size = tl.load(plan + BOUNDARY + WITHIN).to(tl.int32)
            drawn_source = source + CANDIDATES
            drawn_size = tl.load(drawn + WITHIN).to(tl.int32)
            count_above = tl.load(plan + BOUNDARY + COUNT_ABOVE).to(tl.int32)
            mass_above = tl.load(plan + BOUNDARY + MASS_ABOVE)
            drawn_above = tl.load(drawn + MASS_ABOVE)
        if tl.load(plan + WHOLE) == 0:
            boundary, kept, kept_mass = _find_boundary(
                source,
                size,
                tl.load(plan + BOUNDARY + LOW).to(tl.float32),
                tl.load(plan + BOUNDARY + HIGH).to(tl.float32),
                count_above,
                mass_above,
                tl.load(top_k + row),
                tl.load(top_p + row).to(tl.float64),
                tl.load(min_p + row).to(tl.float64),
                kept_mass,
                heat,
                top,
                vocab,
                TILE,
            )
        target = tl.minimum(u * kept_mass, below(kept_mass))
        t = _find_threshold(
            drawn_source,
            drawn_size,
            tl.load(drawn + LOW).to(tl.float32),
            tl.load(drawn + HIGH).to(tl.float32),
            0,
            drawn_above,
            vocab + 1,
            above(target),
            tl.full([], 0.0, tl.float64),
            heat,
            top,
            TILE,
        )
        # sums rounded differently may point past the boundary, or between tokens
        _, _, _, t = _measure(drawn_source, drawn_size, tl.maximum(t, boundary), heat, top, TILE)
        _, mass, equal, _ = _measure(drawn_source, drawn_size, t, heat, top, TILE)
        inverse, correction = inverse_temperature(heat)
        weight = tl.maximum(weight_of(t, top, inverse, correction), 1e-45).to(tl.float64)
        ordinal = tl.minimum(tl.maximum((target - drawn_above - mass) / weight, 0.0), 1e9).to(tl.int32)
        last = tl.where(t == boundary, tl.minimum(kept, equal), equal) - 1
        place = _place_of(drawn_source, drawn_size, t, tl.minimum(ordinal, last), TILE)
        if place >= 0:
            if FROM_ROW:
                token = place
            else:
                token = tl.load(ids + (row * 2 + 1) * CANDIDATES + place)
            tl.store(tokens + row, token.to(tl.int64))
