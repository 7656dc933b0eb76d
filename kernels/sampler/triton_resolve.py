"""The end of sampling on the GPU: thresholds found exactly among the gathered tokens, then the token drawn.

One program a row. An interval of logits is narrowed until few tokens are left in it; those are ranked by a
sort. Sums that decide are of integers or of ranked tokens, so that the order of what was gathered is nothing.
"""

import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_locate import (
    BOUNDARY,
    COUNT_ABOVE,
    DRAW,
    FILTERED,
    HIGH,
    KIND,
    LOW,
    MASS_ABOVE,
    SAME,
    TOP,
    TOTAL,
    WHOLE,
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
from hybridserve.kernels.sampler.triton_measure import is_counted

# 2 ** 40: weights as integers, whose sums do not depend on their order
_ONE = tl.constexpr(1099511627776.0)
_IDS = tl.constexpr(0x7FFFFFFF)
_EMPTY = tl.constexpr(-(2**63))


@triton.jit
def _read(source, start, size, low, high, TILE: tl.constexpr, FROM_ROW: tl.constexpr):
    """Logits and ids of a tile of a list or a row, and which of them lie in (low, high]."""
    at = start + tl.arange(0, TILE)
    if FROM_ROW:
        x = bounded(load_columns(source, at, size))
        ids = at
    else:
        entry = tl.load(source + at, mask=at < size, other=0)
        x = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        ids = (entry & _IDS).to(tl.int32)
    return x, ids, (at < size) & (x > low) & (x <= high)


@triton.jit
def _narrow(
    source,
    size,
    low,
    high,
    within,
    count,
    mass,
    count_limit,
    mass_limit,
    least,
    heat,
    top,
    RANKED: tl.constexpr,
    TILE: tl.constexpr,
    FROM_ROW: tl.constexpr,
):
    """Narrow (low, high], around the lowest logit that would be kept, to at most RANKED tokens or one logit.

    A logit t would be kept if fewer than count_limit tokens and less than mass_limit lie above it and it
    weighs `least` or more; `high` is known to be. within: tokens in the interval; count, mass: of what lies
    above it. Returns the same five of the narrowed interval.
    """
    inverse, correction = inverse_temperature(heat)
    step = tl.arange(0, 16) + 1
    lowest, highest = key_of(low), key_of(high)
    while (within > RANKED) & (highest - lowest > 1):
        span = highest - lowest
        t = value_of(lowest + (span * step + 15) // 16)
        counts = tl.zeros([TILE, 16], tl.int32)
        masses = tl.zeros([TILE, 16], tl.int64)
        for start in range(0, size, TILE):
            x, _, inside = _read(source, start, size, value_of(lowest), value_of(highest), TILE, FROM_ROW)
            weight = (weight_of(x, top, inverse, correction) * _ONE).to(tl.int64)
            higher = (x[:, None] > t[None, :]) & inside[:, None]
            counts += higher.to(tl.int32)
            masses += tl.where(higher, weight[:, None], 0)
        above_count = count + tl.sum(counts, axis=0)
        above_mass = mass + tl.sum(masses, axis=0).to(tl.float64) * (1.0 / _ONE)
        keep = (above_count < count_limit) & (above_mass < mass_limit)
        if least > 0:
            keep = keep & (tl.exp((t - top).to(tl.float64) / heat.to(tl.float64)) >= least)
        chosen = tl.min(tl.where(keep, step, 16))
        count_low = tl.where(chosen > 1, tl.sum(tl.where(step == chosen - 1, above_count, 0)), count + within)
        count = tl.sum(tl.where(step == chosen, above_count, 0))
        mass = tl.sum(tl.where(step == chosen, above_mass, 0.0))
        within = count_low - count
        highest = lowest + (span * chosen + 15) // 16
        lowest = tl.where(chosen > 1, lowest + (span * (chosen - 1) + 15) // 16, lowest)
    return value_of(lowest), value_of(highest), within, count, mass


@triton.jit
def _rank(source, size, low, high, scratch, RANKED: tl.constexpr, TILE: tl.constexpr, FROM_ROW: tl.constexpr):
    """The at most RANKED tokens of (low, high], likeliest first, equal ones by rising id: logits and ids."""
    place = 0
    # an earlier ranking may still be read from the scratch
    tl.debug_barrier()
    for start in range(0, size, TILE):
        x, ids, inside = _read(source, start, size, low, high, TILE, FROM_ROW)
        flags = inside.to(tl.int32)
        found = tl.sum(flags)
        if found > 0:
            at = place + tl.cumsum(flags, 0) - 1
            entry = (key_of(x) << 32) | (ids ^ _IDS).to(tl.int64)
            tl.store(scratch + at, entry, mask=inside & (at < RANKED))
        place += found
    tl.debug_barrier()
    index = tl.arange(0, RANKED)
    entry = tl.load(scratch + index, mask=index < place, other=_EMPTY)
    entry = tl.sort(entry, descending=True)
    return value_of(entry >> 32), (entry & _IDS).to(tl.int32) ^ _IDS


@triton.jit
def _id_of_equal(source, size, t, ordinal, vocab, TILE: tl.constexpr, FROM_ROW: tl.constexpr):
    """The `ordinal`-th lowest id (from 0) of the tokens whose logit is t, by bisection of the ids."""
    low, high = -1, vocab - 1
    while high - low > 1:
        middle = (low + high) // 2
        found = 0
        for start in range(0, size, TILE):
            x, ids, real = _read(source, start, size, -float("inf"), float("inf"), TILE, FROM_ROW)
            found += tl.sum((real & (x == t) & (ids <= middle)).to(tl.int32))
        enough = found > ordinal
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


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
    gathered,
    lists,
    scratch,
    tokens,
    FROM_ROW: tl.constexpr,
    HASHED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANKED: tl.constexpr,
    PLAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row: overwrite the token of a filtered row.

    FROM_ROW: only rows with more tokens in an interval than were gathered, from the whole row; else only the
    others. Up to three thresholds in turn, as stages: 0, the k-th token, for the total that top_p refers to;
    1, the boundary; 2, the draw.
    """
    row = tl.program_id(0).to(tl.int64)
    plan = plans + row * PLAN
    filtered = tl.load(plan + KIND) == FILTERED
    if filtered:
        most = tl.maximum(tl.load(gathered + row * 2), tl.load(gathered + row * 2 + 1))
        filtered = (most > CANDIDATES) == FROM_ROW
    if filtered:
        heat = tl.load(temperature + row).to(tl.float32)
        top = tl.load(plan + TOP).to(tl.float32)
        k = tl.load(top_k + row).to(tl.int64)
        p = tl.load(top_p + row).to(tl.float64)
        least = tl.load(min_p + row).to(tl.float64)
        u = uniform_of(uniform, seeds, positions, row, HASHED)
        inverse, correction = inverse_temperature(heat)
        limit = tl.where(is_counted(k, vocab), k, vocab)
        total = tl.load(plan + TOTAL)
        both = is_counted(k, vocab) & (p < 1)
        same = tl.load(plan + SAME) != 0
        # what the boundary stage finds, and what holds without one
        kept_mass = total
        boundary = LOWEST * 2.0
        kept_equal = vocab.to(tl.int64)
        token = tl.load(tokens + row).to(tl.int32)
        infinity = tl.full([], float("inf"), tl.float64)
        first = tl.where(both & (tl.load(gathered + row * 2) > RANKED), 0, 1)
        stage = tl.where(tl.load(plan + WHOLE) != 0, 2, first)
        while stage < 3:
            drawing = stage == 2
            interval = plan + tl.where(drawing & (same == 0), DRAW, BOUNDARY)
            which = tl.where(drawing & (same == 0), 1, 0)
            within = tl.load(gathered + row * 2 + which)
            # one ranking then serves boundary and draw
            at_once = same & (within <= RANKED)
            if FROM_ROW:
                source = logits + row * row_stride
                size = vocab
            else:
                source = lists + (row * 2 + which) * CANDIDATES
                size = within
            target = tl.minimum(u * kept_mass, below(kept_mass))
            # the likeliest token is kept however small top_p is
            mass_limit = tl.where((p < 1) & (stage > 0), tl.maximum(p * total, 1e-300), infinity)
            low, high, within, count, mass = _narrow(
                source,
                size,
                tl.load(interval + LOW).to(tl.float32),
                tl.load(interval + HIGH).to(tl.float32),
                within,
                tl.load(interval + COUNT_ABOVE).to(tl.int32),
                tl.load(interval + MASS_ABOVE),
                tl.where(drawing, vocab + 1, limit),
                tl.where(drawing, above(target), mass_limit),
                tl.where(stage == 1, least, 0.0),
                heat,
                top,
                RANKED,
                TILE,
                FROM_ROW,
            )
            if within <= RANKED:
                x, ids = _rank(source, size, low, high, scratch + row * RANKED, RANKED, TILE * 4, FROM_ROW)
                index = tl.arange(0, RANKED)
                real = index < within
                weight = tl.exp((x - top).to(tl.float64) / heat.to(tl.float64))
                weight = tl.where(real, weight, 0.0)
                cumulative = mass + tl.cumsum(weight, 0)
                if drawing == 0:
                    ranked = real & (count + index < limit)
                    if both & ((stage == 0) | (first == 1)):
                        total = mass + tl.sum(tl.where(ranked, weight, 0.0))
                        mass_limit = tl.maximum(p * total, 1e-300)
                    if stage == 1:
                        keep = ranked & (cumulative - weight < mass_limit) & (weight >= least)
                        kept_mass = mass + tl.sum(tl.where(keep, weight, 0.0))
                        boundary = tl.min(tl.where(keep, x, high))
                        kept_equal = tl.sum((keep & (x == boundary)).to(tl.int64))
                        target = tl.minimum(u * kept_mass, below(kept_mass))
                        drawing = at_once
                        stage = tl.where(at_once, 2, stage)
                if drawing:
                    # sums rounded differently may point past the boundary
                    earlier = tl.sum((real & (x > boundary)).to(tl.int32))
                    allowed = real & (x >= boundary) & (index - earlier < kept_equal) & (weight > 0)
                    place = tl.min(tl.where(allowed & (cumulative > target), index, RANKED))
                    place = tl.minimum(place, tl.max(tl.where(allowed, index, -1)))
                    token = tl.where(place >= 0, tl.sum(tl.where(index == place, ids, 0)), token)
            else:
                # more equal logits than can be ranked
                weight_here = tl.exp((high - top).to(tl.float64) / heat.to(tl.float64))
                fitting = tl.minimum(within, limit - count)
                if drawing:
                    ordinal = tl.maximum((target - mass) / tl.maximum(weight_here, 1e-300), 0.0)
                    last = tl.where(high == boundary, tl.minimum(kept_equal, within), within) - 1
                    ordinal = tl.minimum(tl.minimum(ordinal, 1e9).to(tl.int64), last)
                    token = _id_of_equal(source, size, high, ordinal, vocab, TILE, FROM_ROW)
                else:
                    if stage == 0:
                        total = mass + fitting * weight_here
                    else:
                        by_mass = (mass_limit - mass) / tl.maximum(weight_here, 1e-300)
                        kept_equal = tl.minimum(fitting, tl.ceil(tl.minimum(by_mass, 1e9)).to(tl.int64))
                        kept_mass = mass + kept_equal * weight_here
                        boundary = high
            stage += 1
        tl.store(tokens + row, token.to(tl.int64))
