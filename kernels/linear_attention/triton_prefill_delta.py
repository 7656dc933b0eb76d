"""The serial pass for the common case in Triton: delta rule, decay per head or none, tiles moved by the TMA.

Reads what `head_tiles_kernel` made of each chunk; reads and writes states in place. A sequence too alone to
fill the GPU is worked on by several programs a head.
"""

import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_prefill_tiles import TABLES


@triton.jit(do_not_specialize_on_alignment=TABLES)
def copy_states_kernel(
    state, copies, state_indices, has_initial_state, state_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK numbers of one sequence's initial state, if it has one, into copies [S, SIZE]."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    seq = tl.program_id(0) // BLOCKS
    place = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(state_indices + seq).to(tl.int64)
    if (index >= 0) & (tl.load(has_initial_state + seq).to(tl.int32) != 0):
        x = tl.load(state + index * state_stride + place, mask=place < SIZE)
        tl.store(copies + seq.to(tl.int64) * SIZE + place, x, mask=place < SIZE)


@triton.jit
def _part_start(part, count, PARTS: tl.constexpr):
    """First chunk of a part. A chunk without outputs takes about half as long as one with: all parts end
    together when each has half as many chunks of its own as the one before it."""
    return count * ((1 << PARTS) - (1 << (PARTS - part))) // ((1 << PARTS) - 1)


@triton.jit
def _factors(factor_tiles, row, C: tl.constexpr, STAGES: tl.constexpr):
    """What to multiply by: what q reads of the state, what k reads of it, and k on its way into it.

    One load, taken apart in registers; but with two stages its fourth row would cost a processor its second
    program, by 52 bytes of shared memory.
    """
    if STAGES == 2:
        q_in = tl.reshape(factor_tiles.load([row, 0]), [C])
        k_in = tl.reshape(factor_tiles.load([row + 1, 0]), [C])
        k_out = tl.reshape(factor_tiles.load([row + 2, 0]), [C])
    else:
        even, odd = tl.split(tl.reshape(tl.trans(factor_tiles.load([row, 0])), [C, 2, 2]))
        q_in, k_out = tl.split(even)
        k_in, _ = tl.split(odd)
    return q_in, k_in, k_out


@triton.jit
def _update(s_dot, k_tile, inverse, v_tile, k_in, k_out, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The chunk's updates u, turned, [BV, C]; and with the decays to its end, as they enter the state."""
    read = tl.dot(s_dot, tl.trans(k_tile), input_precision=PRECISION) * k_in[None, :]
    rest = tl.trans(v_tile).to(tl.float32) - read
    u = tl.dot(rest.to(DOT), tl.trans(inverse), input_precision=PRECISION)
    return u, (u * k_out[None, :]).to(DOT)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def delta_scan_kernel(
    q,
    k,
    v,
    out,
    inverses,
    scores,
    factors,
    initial,
    state,
    state_indices,
    has_initial_state,
    cu_seqlens,
    q_stride,
    k_stride,
    v_stride,
    initial_stride,
    state_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One sequence, one value head, BV rows of its state, and one of PARTS parts of its outputs.

    As `scan_kernel`, with everything turned. A part begins with the chunks of the parts before it, for the
    state alone. `initial` holds the states from before this launch at rows of `initial_stride`: `state`
    itself, by index, where there is one part; else copies, by sequence, as the last part may end before
    another begins.
    """
    SPLITS: tl.constexpr = V // BV
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(0) // SPLITS % HV
    part = tl.program_id(0) // (SPLITS * HV) % PARTS
    seq = tl.program_id(0) // (SPLITS * HV * PARTS)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    index = tl.load(state_indices + seq).to(tl.int64)
    if (end <= start) | (index < 0):
        return
    count = (end - start + C - 1) // C
    first = _part_start(part, count, PARTS)
    last = _part_start(part + 1, count, PARTS)
    tile_head = (start // C + seq) * HV + head
    last_tile = (start // C + seq + count) * HV
    key_column = head // (HV // HK) * K
    value_column = head * V + split * BV
    # a descriptor that ends with the sequence reads zeros behind it and writes nothing there
    q_tiles = tl.make_tensor_descriptor(q, [end, HK * K], [q_stride, 1], [C, K])
    k_tiles = tl.make_tensor_descriptor(k, [end, HK * K], [k_stride, 1], [C, K])
    v_tiles = tl.make_tensor_descriptor(v, [end, HV * V], [v_stride, 1], [C, BV])
    out_tiles = tl.make_tensor_descriptor(out, [end, HV * V], [HV * V, 1], [C, BV])
    inverse_tiles = tl.make_tensor_descriptor(inverses, [last_tile * C, C], [C, 1], [C, C])
    score_tiles = tl.make_tensor_descriptor(scores, [last_tile * C, C], [C, 1], [C, C])
    factor_tiles = tl.make_tensor_descriptor(
        factors, [last_tile * 4, C], [C, 1], [1 if STAGES == 2 else 4, C]
    )
    value = split * BV + tl.arange(0, BV)
    in_state = (head * V + value[:, None]) * K + tl.arange(0, K)[None, :]
    known = value < tl.load(has_initial_state + seq).to(tl.int32) * V
    row = index if PARTS == 1 else seq.to(tl.int64)
    s = tl.load(initial + row * initial_stride + in_state, mask=known[:, None], other=0.0).to(tl.float32)
    if PARTS > 1:
        for number in tl.range(0, first, num_stages=STAGES):
            token = start + number * C
            tile = tile_head + number * HV
            k_tile = k_tiles.load([token, key_column])
            inverse = inverse_tiles.load([tile * C, 0])
            v_tile = v_tiles.load([token, value_column])
            _, k_in, k_out = _factors(factor_tiles, tile * 4, C, STAGES)
            decay = tl.load(factors + (tile * 4 + 3).to(tl.int64) * C)
            _, written = _update(s.to(DOT), k_tile, inverse, v_tile, k_in, k_out, DOT, PRECISION)
            s = tl.dot(written, k_tile, s * decay, input_precision=PRECISION)
    for number in tl.range(first, last, num_stages=STAGES):
        token = start + number * C
        tile = tile_head + number * HV
        # loads that stand together share one barrier
        k_tile = k_tiles.load([token, key_column])
        inverse = inverse_tiles.load([tile * C, 0])
        q_tile = q_tiles.load([token, key_column])
        score = score_tiles.load([tile * C, 0])
        v_tile = v_tiles.load([token, value_column])
        q_in, k_in, k_out = _factors(factor_tiles, tile * 4, C, STAGES)
        decay = tl.load(factors + (tile * 4 + 3).to(tl.int64) * C)
        s_dot = s.to(DOT)
        u, written = _update(s_dot, k_tile, inverse, v_tile, k_in, k_out, DOT, PRECISION)
        o = tl.dot(s_dot, tl.trans(q_tile), input_precision=PRECISION) * q_in[None, :]
        o = tl.dot(u.to(DOT), tl.trans(score), o, input_precision=PRECISION)
        s = tl.dot(written, k_tile, s * decay, input_precision=PRECISION)
        out_tiles.store([token, value_column], tl.trans(o).to(out.dtype.element_ty))
    if last == count:
        tl.store(state + index * state_stride + in_state, s.to(state.dtype.element_ty))
