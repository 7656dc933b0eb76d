"""What a chunk of linear attention needs whatever its state is, for all chunks at once, in Triton.

For every chunk and value head: the inverse T of the delta rule's triangle, the scores P of q against k with
the decay between them, and the factors of its rows. Knows nothing of states: the serial passes read this.
"""

import triton
import triton.language as tl

# a decay of e^-100 is zero in every dtype of ours; the bound keeps sums of log decays small, and so exact
MIN_LOG_DECAY = tl.constexpr(-100.0)
LOG2_E = tl.constexpr(1.4426950408889634)
# tables lie wherever the lengths of a step put them: no variant for every alignment
TABLES = ("cu_seqlens", "chunk_seqs", "chunk_ids", "state_indices", "has_initial_state")
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for fp32 a [C, C], of which the strictly lower triangle is read; C 16, 32 or 64.

    The 8 x 8 blocks on the diagonal by substitution, all at once; then pairs of blocks merge, as
    [[X, 0], [-Y a X, Y]] inverts [[X^-1, 0], [a, Y^-1]], until one is left. Powers of a would cancel badly
    where keys are alike. DOT: dtype of the operands of merges.
    """
    N: tl.constexpr = C // 8
    block = tl.arange(0, N)
    i = tl.arange(0, 8)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(a, [N, 8, N, 8]), 0.0), 2)
    diagonal = tl.where((i[:, None] > i[None, :])[None, :, :], diagonal, 0.0)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    x = tl.broadcast_to(eye[None, :, :], [N, 8, 8])
    for j in tl.static_range(7):
        column = tl.sum(tl.where(i[None, None, :] == j, diagonal, 0.0), 2)
        row = tl.sum(tl.where(i[None, :, None] == j, x, 0.0), 1)
        x -= column[:, :, None] * row[:, None, :]
    inverse = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), [C, C])
    inverse = _merge(inverse, a, C, 8, DOT, PRECISION)
    if C > 16:
        inverse = _merge(inverse, a, C, 16, DOT, PRECISION)
    if C > 32:
        inverse = _merge(inverse, a, C, 32, DOT, PRECISION)
    return inverse


@triton.jit
def _merge(inverse, a, C: tl.constexpr, SIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of the diagonal blocks of 2 SIZE from `inverse`, that of the diagonal blocks of SIZE."""
    i = tl.arange(0, C)
    row, column = i[:, None] // SIZE, i[None, :] // SIZE
    between = tl.where((row % 2 == 1) & (column == row - 1), a, 0.0).to(DOT)
    operand = inverse.to(DOT)
    right = tl.dot(between, operand, input_precision=PRECISION).to(DOT)
    return inverse - tl.dot(operand, right, input_precision=PRECISION)


@triton.jit
def _place(chunk, cu_seqlens, chunk_seqs, chunk_ids, C: tl.constexpr):
    """First token of a chunk, how many it has, and the number of its tile.

    Sequence s starts at tile cu_seqlens[s] // C + s, which leaves room for the chunks of all before it.
    """
    seq = tl.load(chunk_seqs + chunk)
    number = tl.load(chunk_ids + chunk)
    first = tl.load(cu_seqlens + seq)
    start = first + number * C
    length = tl.minimum(tl.load(cu_seqlens + seq + 1) - start, C)
    return start.to(tl.int64), length, (first // C + seq + number).to(tl.int64)


# gates of some tokens of a step may begin anywhere
@triton.jit(do_not_specialize_on_alignment=(*TABLES, "g", "beta"))
def head_tiles_kernel(
    q,
    k,
    g,
    beta,
    inverses,
    scores,
    factors,
    cu_seqlens,
    chunk_seqs,
    chunk_ids,
    scale,
    q_stride,
    k_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    HAS_G: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_DOT: tl.constexpr,
    WIDE_SUMS: tl.constexpr,
):
    """One chunk, one value head; decay per head or none.

    inverses, scores: [tiles, HV, C, C], T diag(beta) and P. factors: fp32 [tiles, HV, 4, C], by which rows
    of q S, of k S and of k on its way into S are multiplied; and in [3, 0] the decay of the whole chunk.
    """
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    start, length, tile = _place(chunk, cu_seqlens, chunk_seqs, chunk_ids, C)
    i = tl.arange(0, C)
    channel = tl.arange(0, BK)
    present = i < length
    mask = present[:, None] & (channel[None, :] < K)
    place = head // (HV // HK) * K + channel[None, :]
    k_tile = tl.load(k + (start + i)[:, None] * k_stride + place, mask=mask, other=0.0)
    q_tile = tl.load(q + (start + i)[:, None] * q_stride + place, mask=mask, other=0.0)
    k_factor = tl.full([C], 1.0, tl.float32)
    q_factor = tl.full([C], 1.0, tl.float32) * scale
    if L2NORM:
        k_wide, q_wide = k_tile.to(tl.float32), q_tile.to(tl.float32)
        k_factor = tl.rsqrt(tl.sum(k_wide * k_wide, 1) + L2_EPS)
        q_factor = tl.rsqrt(tl.sum(q_wide * q_wide, 1) + L2_EPS) * scale
    k_tile, q_tile = k_tile.to(DOT), q_tile.to(DOT)
    k_turned = tl.trans(k_tile)
    lower = i[:, None] >= i[None, :]
    at_token = (start + i) * HV + head
    tile_head = tile * HV + head
    row = factors + tile_head * 4 * C + i
    if HAS_G:
        log_decay = tl.load(g + at_token, mask=present, other=0.0).to(tl.float32)
        log_decay = tl.maximum(log_decay, MIN_LOG_DECAY)
        if WIDE_SUMS:
            log_decay = log_decay.to(tl.float64)
        log_decay *= LOG2_E
        total = tl.cumsum(log_decay, 0)
        whole = tl.sum(log_decay, 0)
        away = (total[:, None] - total[None, :]).to(tl.float32)
        between = tl.exp2(tl.where(lower, away, float("-inf")))
        into = tl.exp2(total.to(tl.float32))
        out_of = tl.exp2((whole - total).to(tl.float32))
        tl.store(factors + tile_head * 4 * C + 3 * C, tl.exp2(whole.to(tl.float32)))
    else:
        between = tl.where(lower, 1.0, 0.0)
        into = tl.full([C], 1.0, tl.float32)
        out_of = into
        tl.store(factors + tile_head * 4 * C + 3 * C, 1.0)
    tl.store(row, q_factor * into)
    tl.store(row + C, k_factor * into)
    tl.store(row + 2 * C, k_factor * out_of)
    square = tile_head * C * C + i[:, None] * C + i[None, :]
    qk = tl.dot(q_tile, k_turned, input_precision=PRECISION)
    tl.store(scores + square, (qk * between * q_factor[:, None] * k_factor[None, :]).to(DOT))
    if DELTA:
        b = tl.load(beta + at_token, mask=present, other=0.0).to(tl.float32)
        kk = tl.dot(k_tile, k_turned, input_precision=PRECISION)
        # (I + diag(b) A)^-1 diag(b) = diag(b) (I + A diag(b))^-1
        a = kk * between * k_factor[:, None] * (k_factor * b)[None, :]
        inverse = unit_lower_inverse(a, C, INVERSE_DOT, PRECISION)
        tl.store(inverses + square, (inverse * b[:, None]).to(DOT))


@triton.jit
def _add_products(
    qk, kk, q, k, total, C: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, DOT, PRECISION: tl.constexpr
):
    """Add the products of tokens in second halves of blocks of 2 HALF with those in the first halves.

    Both are measured from the last token of the first half, so that every exponent is <= 0.
    """
    BLOCKS: tl.constexpr = C // (2 * HALF)
    place = tl.arange(0, 2 * HALF)
    blocks = tl.reshape(total, [BLOCKS, 2 * HALF, BK])
    middle = tl.sum(tl.where((place == HALF - 1)[None, :, None], blocks, 0.0), 1)
    middle = tl.reshape(tl.broadcast_to(middle[:, None, :], [BLOCKS, 2 * HALF, BK]), [C, BK])
    i = tl.arange(0, C)
    late = (i % (2 * HALF) >= HALF)[:, None]
    away = (total - middle).to(tl.float32)
    decay = tl.exp(tl.minimum(tl.where(late, away, -away), 0.0))
    k_decayed = k * decay
    early = tl.trans(tl.where(late, 0.0, k_decayed).to(DOT))
    same = i[:, None] // (2 * HALF) == i[None, :] // (2 * HALF)
    q_late = tl.where(late, q * decay, 0.0).to(DOT)
    k_late = tl.where(late, k_decayed, 0.0).to(DOT)
    qk += tl.where(same, tl.dot(q_late, early, input_precision=PRECISION), 0.0)
    kk += tl.where(same, tl.dot(k_late, early, input_precision=PRECISION), 0.0)
    return qk, kk


@triton.jit(do_not_specialize_on_alignment=(*TABLES, "beta"))
def channel_tiles_kernel(
    q,
    k,
    g,
    beta,
    inverses,
    scores,
    q_in,
    k_in,
    k_out,
    decays,
    cu_seqlens,
    chunk_seqs,
    chunk_ids,
    scale,
    q_stride,
    k_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_DOT: tl.constexpr,
    WIDE_SUMS: tl.constexpr,
):
    """One chunk, one value head, decay per key channel; C = 2 ** LEVELS.

    inverses, scores as in `head_tiles_kernel`. q_in, k_in, k_out: [T, HV, K], normalised, with the decay
    since the chunk's start (q, k) and to its end (k) folded in. decays: fp32 [tiles, HV, K], of all of it.
    """
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    key_head = head // (HV // HK)
    start, length, tile = _place(chunk, cu_seqlens, chunk_seqs, chunk_ids, C)
    i = tl.arange(0, C)
    channel = tl.arange(0, BK)
    present = i < length
    mask = present[:, None] & (channel[None, :] < K)
    place = key_head * K + channel[None, :]
    k_tile = tl.load(k + (start + i)[:, None] * k_stride + place, mask=mask, other=0.0).to(tl.float32)
    q_tile = tl.load(q + (start + i)[:, None] * q_stride + place, mask=mask, other=0.0).to(tl.float32)
    if L2NORM:
        k_tile *= tl.rsqrt(tl.sum(k_tile * k_tile, 1) + L2_EPS)[:, None]
        q_tile *= tl.rsqrt(tl.sum(q_tile * q_tile, 1) + L2_EPS)[:, None]
    q_tile *= scale
    own = ((start + i)[:, None] * HV + head) * K + channel[None, :]
    log_decay = tl.maximum(tl.load(g + own, mask=mask, other=0.0).to(tl.float32), MIN_LOG_DECAY)
    if WIDE_SUMS:
        log_decay = log_decay.to(tl.float64)
    total = tl.cumsum(log_decay, 0)
    whole = tl.sum(log_decay, 0)
    into = tl.exp(total.to(tl.float32))
    tl.store(q_in + own, (q_tile * into).to(DOT), mask=mask)
    if DELTA:
        tl.store(k_in + own, (k_tile * into).to(DOT), mask=mask)
    tl.store(k_out + own, (k_tile * tl.exp((whole[None, :] - total).to(tl.float32))).to(DOT), mask=mask)
    tile_head = tile * HV + head
    tl.store(decays + tile_head * K + channel, tl.exp(whole.to(tl.float32)), mask=channel < K)
    diagonal = i[:, None] == i[None, :]
    qk = tl.where(diagonal, tl.sum(q_tile * k_tile, 1)[:, None], 0.0)
    kk = tl.zeros([C, C], tl.float32)
    for level in tl.static_range(LEVELS):
        qk, kk = _add_products(qk, kk, q_tile, k_tile, total, C, BK, C >> (level + 1), DOT, PRECISION)
    square = tile_head * C * C + i[:, None] * C + i[None, :]
    tl.store(scores + square, qk.to(DOT))
    if DELTA:
        b = tl.load(beta + (start + i) * HV + head, mask=present, other=0.0).to(tl.float32)
        inverse = unit_lower_inverse(kk * b[:, None], C, INVERSE_DOT, PRECISION)
        tl.store(inverses + square, (inverse * b[None, :]).to(DOT))
