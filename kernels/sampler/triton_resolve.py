"""The end of sampling on the GPU: the boundary found exactly among the gathered tokens, and the best score.

One program a row. An interval of logits is narrowed until few tokens are left in it; those are ranked by a
sort. Sums that decide are of integers or of ranked tokens, so that the order of what was gathered is nothing.
"""

import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_locate import (
    COUNT_ABOVE,
    FILTERED,
    HIGH,
    KIND,
    LOW,
    MASS_ABOVE,
    TOP,
    TOTAL,
)
from hybridserve.kernels.sampler.triton_math import (
    IDS,
    NONE,
    best_of,
    bounded,
    id_in,
    inverse_temperature,
    key_of,
    load_columns,
    noise_key,
    noise_of,
    sharpness,
    value_of,
    weight_of,
)
from hybridserve.kernels.sampler.triton_measure import is_counted

# 2 ** 40: weights as integers, whose sums do not depend on their order
_ONE = tl.constexpr(1099511627776.0)


@triton.jit
def _read(row, listed, in_row, start, size, low, high, TILE: tl.constexpr):
    """Logits and ids of a tile of a row, or if in_row is 0 of a list, and which of them lie in (low, high].

    One path for both keeps the kernel half as long: a program runs through it once, so that fetching its
    instructions takes as long as they do.
    """
    at = start + tl.arange(0, TILE)
    entry = tl.load(listed + at, mask=at < tl.where(in_row > 0, 0, size), other=0)
    x = bounded(load_columns(row, at, tl.where(in_row > 0, size, 0)))
    x = tl.where(in_row > 0, x, (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    ids = tl.where(in_row > 0, at, (entry & IDS).to(tl.int32))
    return x, ids, (at < size) & (x > low) & (x <= high)


@triton.jit
def _narrow(
    row,
    listed,
    in_row,
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
            x, _, inside = _read(row, listed, in_row, start, size, value_of(lowest), value_of(highest), TILE)
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
def _rank(row, listed, in_row, size, low, high, scratch, RANKED: tl.constexpr, TILE: tl.constexpr):
    """The at most RANKED tokens of (low, high], likeliest first, equal ones by rising id: logits and ids."""
    place = 0
    # an earlier ranking may still be read from the scratch
    tl.debug_barrier()
    for start in range(0, size, TILE):
        x, ids, inside = _read(row, listed, in_row, start, size, low, high, TILE)
        flags = inside.to(tl.int32)
        found = tl.sum(flags)
        if found > 0:
            at = place + tl.cumsum(flags, 0) - 1
            entry = (key_of(x) << 32) | (ids ^ IDS).to(tl.int64)
            tl.store(scratch + at, entry, mask=inside & (at < RANKED))
        place += found
    tl.debug_barrier()
    index = tl.arange(0, RANKED)
    entry = tl.load(scratch + index, mask=index < place, other=NONE)
    entry = tl.sort(entry, descending=True)
    return value_of(entry >> 32), (entry & IDS).to(tl.int32) ^ IDS


@triton.jit
def _id_of_equal(row, listed, in_row, size, t, ordinal, vocab, TILE: tl.constexpr):
    """The `ordinal`-th lowest id (from 0) of the tokens whose logit is t, by bisection of the ids."""
    low, high = -1, vocab - 1
    while high - low > 1:
        middle = (low + high) // 2
        found = 0
        for start in range(0, size, TILE):
            x, ids, real = _read(row, listed, in_row, start, size, -float("inf"), float("inf"), TILE)
            found += tl.sum((real & (x == t) & (ids <= middle)).to(tl.int32))
        enough = found > ordinal
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def _boundary(
    row,
    listed,
    in_row,
    size,
    vocab,
    plan,
    within,
    k,
    p,
    least,
    heat,
    top,
    scratch,
    RANKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The lowest logit that is kept, and the highest id kept of the tokens that have it.

    Up to two thresholds in turn, as stages: 0, the k-th token, for the total that top_p refers to; 1, the
    boundary. A ranking of the whole interval serves both.
    """
    counted = is_counted(k, vocab)
    limit = tl.where(counted, k, vocab)
    total = tl.load(plan + TOTAL)
    infinity = tl.full([], float("inf"), tl.float64)
    boundary = top
    last_id = tl.full([], 0, tl.int32) + vocab - 1
    first = tl.where(counted & (p < 1) & (within > RANKED), 0, 1)
    stage = first
    while stage < 2:
        # the likeliest token is kept however small top_p is
        mass_limit = tl.where((p < 1) & (stage == 1), tl.maximum(p * total, 1e-300), infinity)
        low, high, left, count, mass = _narrow(
            row,
            listed,
            in_row,
            size,
            tl.load(plan + LOW).to(tl.float32),
            tl.load(plan + HIGH).to(tl.float32),
            within,
            tl.load(plan + COUNT_ABOVE).to(tl.int32),
            tl.load(plan + MASS_ABOVE),
            limit,
            mass_limit,
            tl.where(stage == 1, least, 0.0),
            heat,
            top,
            RANKED,
            TILE,
        )
        if left <= RANKED:
            x, ids = _rank(row, listed, in_row, size, low, high, scratch, RANKED, TILE * 4)
            index = tl.arange(0, RANKED)
            ranked = (index < left) & (count + index < limit)
            weight = tl.exp((x - top).to(tl.float64) / heat.to(tl.float64))
            weight = tl.where(index < left, weight, 0.0)
            if counted & (p < 1) & (stage == first):
                total = mass + tl.sum(tl.where(ranked, weight, 0.0))
                mass_limit = tl.maximum(p * total, 1e-300)
            if stage == 1:
                before = mass + tl.cumsum(weight, 0) - weight
                keep = ranked & (before < mass_limit) & (weight >= least)
                boundary = tl.min(tl.where(keep, x, high))
                last_id = tl.max(tl.where(keep & (x == boundary), ids, -1))
        else:
            # more equal logits than can be ranked
            weight_here = tl.exp((high - top).to(tl.float64) / heat.to(tl.float64))
            fitting = tl.minimum(left, limit - count)
            if stage == 0:
                total = mass + fitting * weight_here
            else:
                by_mass = tl.ceil((mass_limit - mass) / tl.maximum(weight_here, 1e-300))
                kept_equal = tl.minimum(fitting, tl.minimum(by_mass, 1e9).to(tl.int64))
                boundary = high
                if kept_equal < left:
                    last_id = _id_of_equal(row, listed, in_row, size, high, kept_equal - 1, vocab, TILE)
        stage += 1
    return boundary, last_id


@triton.jit
def _best_kept(row, listed, in_row, size, boundary, last_id, high, heat, top, key, TILE: tl.constexpr):
    """`best_of` the kept tokens up to `high`; those above it are `gather_between`'s."""
    best = tl.full([], NONE, tl.int64)
    for start in range(0, size, TILE):
        x, ids, kept = _read(row, listed, in_row, start, size, -float("inf"), high, TILE)
        kept = kept & ((x > boundary) | ((x == boundary) & (ids <= last_id)))
        if tl.max(kept.to(tl.int32)) > 0:
            score = (x - top) * sharpness(heat) + noise_of(key, ids)
            best = tl.maximum(best, best_of(score, ids, kept))
    return best


@triton.jit
def _settle(
    row,
    listed,
    in_row,
    size,
    vocab,
    plan,
    within,
    k,
    p,
    least,
    heat,
    key,
    scratch,
    RANKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """`best_of` the kept tokens of the interval."""
    top = tl.load(plan + TOP).to(tl.float32)
    high = tl.load(plan + HIGH).to(tl.float32)
    boundary, last_id = _boundary(
        row, listed, in_row, size, vocab, plan, within, k, p, least, heat, top, scratch, RANKED, TILE
    )
    return _best_kept(row, listed, in_row, size, boundary, last_id, high, heat, top, key, TILE * 4)


# a vocabulary of one token must not become a constant, which Triton 3.6 fails to compile here
@triton.jit(do_not_specialize=["vocab"])
def resolve(
    logits,
    row_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    positions,
    plans,
    gathered,
    lists,
    scratch,
    above,
    tokens,
    HASHED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANKED: tl.constexpr,
    PLAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row: the token of a filtered row, from its list, or from the row where that is cut."""
    row = tl.program_id(0).to(tl.int64)
    plan = plans + row * PLAN
    if tl.load(plan + KIND) == FILTERED:
        within = tl.load(gathered + row)
        heat = tl.load(temperature + row).to(tl.float32)
        k = tl.load(top_k + row).to(tl.int64)
        p = tl.load(top_p + row).to(tl.float64)
        least = tl.load(min_p + row).to(tl.float64)
        key = noise_key(keys, positions, row, HASHED)
        scratch += row * RANKED
        in_row = (within > CANDIDATES).to(tl.int32)
        size = tl.where(in_row > 0, vocab, within)
        this_row = logits + row * row_stride
        listed = lists + row * CANDIDATES
        found = _settle(
            this_row, listed, in_row, size, vocab, plan, within, k, p, least, heat, key, scratch, RANKED, TILE
        )
        num_chunks = tl.cdiv(vocab, CHUNK)
        chunks = tl.arange(0, CHUNKS_PADDED)
        best = tl.load(above + row * num_chunks + chunks, mask=chunks < num_chunks, other=NONE)
        token = id_in(tl.maximum(found, tl.max(best)))
        # nothing may be kept of a row that is not finite
        tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
