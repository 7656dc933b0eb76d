"""The serial pass of linear attention over a sequence's chunks, in Triton: the state never leaves the chip.

Reads what `triton_prefill_tiles` made of each chunk; reads and writes states in place.
"""

import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_prefill_tiles import TABLES


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """total + a b. In full fp32 the product is summed first: added one by one, each term would be rounded
    to the size of `total`. (As a difference, since Triton folds a sum into the product's accumulator.)"""
    if PRECISION == "ieee":
        return total - tl.dot(-a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def scan_kernel(
    q,
    k,
    k_out,
    v,
    out,
    inverses,
    scores,
    factors,
    state,
    state_indices,
    has_initial_state,
    cu_seqlens,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One sequence, one value head, BV rows of its state S [V, K].

    Everything is held turned, [BV, C] for [C, V]: so each left operand of a product is what the last one
    left in registers, and only tiles that were loaded pass through shared memory. For each chunk
        u = (v - k S) T diag(beta);  out = q S + u P;  S = decay S + u k
    with the factors of rows between. CHANNEL: q, k and k_out [T, HV, K] carry the decays themselves, and
    factors is fp32 [tiles, HV, K], the decay of a chunk.
    """
    SPLITS: tl.constexpr = (V + BV - 1) // BV
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(0) // SPLITS % HV
    seq = tl.program_id(0) // (SPLITS * HV)
    start = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - start
    index = tl.load(state_indices + seq).to(tl.int64)
    if (length <= 0) | (index < 0):
        return
    key_head = head // (HV // HK)
    i = tl.arange(0, C)
    channel = tl.arange(0, BK)
    value = split * BV + tl.arange(0, BV)
    in_state = index * state_stride + (head * V + value[:, None]) * K + channel[None, :]
    in_dims = (value < V)[:, None] & (channel < K)[None, :]
    # of a sequence that starts from zero no row is read
    known = (value < tl.load(has_initial_state + seq).to(tl.int32) * V)[:, None] & (channel < K)[None, :]
    s = tl.load(state + in_state, mask=known, other=0.0).to(tl.float32)
    tile_head = ((start // C + seq) * HV + head).to(tl.int64)
    token = start.to(tl.int64) + i
    for number in tl.range(0, (length + C - 1) // C, num_stages=STAGES):
        present = i < length - number * C
        in_keys = present[:, None] & (channel < K)[None, :]
        in_values = (value < V)[:, None] & present[None, :]
        place = key_head * K + channel[None, :]
        square = tile_head * C * C + i[:, None] * C + i[None, :]
        q_tile = tl.load(q + token[:, None] * q_stride + place, mask=in_keys, other=0.0).to(DOT)
        s_dot = s.to(DOT)
        u = tl.load(v + token[None, :] * v_stride + head * V + value[:, None], mask=in_values, other=0.0)
        if CHANNEL:
            k_tile = tl.load(k_out + token[:, None] * k_stride + place, mask=in_keys, other=0.0).to(DOT)
        else:
            k_tile = tl.load(k + token[:, None] * k_stride + place, mask=in_keys, other=0.0).to(DOT)
        if DELTA:
            if CHANNEL:
                k_read = tl.load(k + token[:, None] * k_stride + place, mask=in_keys, other=0.0).to(DOT)
                read = tl.dot(s_dot, tl.trans(k_read), input_precision=PRECISION)
            else:
                read = tl.dot(s_dot, tl.trans(k_tile), input_precision=PRECISION)
                read *= tl.load(factors + tile_head * 4 * C + C + i)[None, :]
            inverse = tl.load(inverses + square)
            rest = (u.to(tl.float32) - read).to(DOT)
            u = tl.dot(rest, tl.trans(inverse), input_precision=PRECISION)
        o = tl.dot(s_dot, tl.trans(q_tile), input_precision=PRECISION)
        if not CHANNEL:
            o *= tl.load(factors + tile_head * 4 * C + i)[None, :]
        score = tl.load(scores + square)
        o = add_product(o, u.to(DOT), tl.trans(score), PRECISION)
        in_out = (token[None, :] * HV + head) * V + value[:, None]
        tl.store(out + in_out, o.to(out.dtype.element_ty), mask=in_values)
        if CHANNEL:
            decay = tl.load(factors + tile_head * K + channel, mask=channel < K, other=0.0)
            s *= decay[None, :]
            written = u.to(DOT)
        else:
            s *= tl.load(factors + tile_head * 4 * C + 3 * C)
            written = (u.to(tl.float32) * tl.load(factors + tile_head * 4 * C + 2 * C + i)[None, :]).to(DOT)
        s = add_product(s, written, k_tile, PRECISION)
        token += C
        tile_head += HV
    tl.store(state + in_state, s.to(state.dtype.element_ty), mask=in_dims)
