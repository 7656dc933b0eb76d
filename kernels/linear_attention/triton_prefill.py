"""Prefill of linear attention on the GPU: a parallel pass over chunks, then a serial one over each sequence.

Owns which kernels, tile sizes and precisions are used. Same arguments and results as the plain PyTorch form.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_prefill_delta import copy_states_kernel, delta_scan_kernel
from hybridserve.kernels.linear_attention.triton_prefill_scan import scan_kernel
from hybridserve.kernels.linear_attention.triton_prefill_tiles import channel_tiles_kernel, head_tiles_kernel
from hybridserve.kernels.varlen import VarlenTables, varlen_tables


@dataclass(frozen=True)
class Tiling:
    """chunk: tokens of a chunk. value_block: rows of the state one program holds. dot, precision: dtype of
    the operands of products and how they are multiplied. tma: whether `delta_scan_kernel` is used."""

    chunk: int
    value_block: int
    dot: tl.dtype
    precision: str
    tma: bool

    @classmethod
    def choose(cls, dtype: torch.dtype, key_dim: int, v_dim: int, per_channel: bool, delta: bool) -> "Tiling":
        """fp16 has too small a range for states: its tiles are multiplied as fp32, in three tf32 products."""
        if dtype == torch.bfloat16:
            tma = delta and not per_channel and key_dim in (64, 128) and v_dim % 64 == 0
            chunk = 64 >> (per_channel + (key_dim > 128))
            value_block = 32 if key_dim > 128 or v_dim <= 32 else 64
            return cls(chunk, value_block, tl.bfloat16, "tf32", tma)
        precision = "ieee" if dtype == torch.float32 else "tf32x3"
        # larger chunks compile for a minute and spill
        return cls(16, 32, tl.float32, precision, False)


@dataclass(frozen=True)
class _Call:
    """What the two passes share."""

    tables: VarlenTables
    tiling: Tiling
    chunk: int
    num_v_heads: int
    scale: float
    qk_l2norm: bool
    any_initial_state: bool


@dataclass(frozen=True)
class _Tiles:
    """What the serial pass reads, as `scan_kernel` has it."""

    q: torch.Tensor
    k: torch.Tensor
    k_out: torch.Tensor
    inverses: torch.Tensor
    scores: torch.Tensor
    factors: torch.Tensor


def linear_attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_lens: tuple[int, ...],
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    chunk_size: int = 64,
    any_initial_state: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The recurrence of `linear_attention_reference` over S sequences laid end to end, chunk by chunk.

    q, k: [T, Hk, K]; v: [T, Hv, V], of one dtype (bf16, fp16, fp32), K and V of 16 to 256; views whose tokens
        lie further apart, such as slices of one projection, are taken as they are (fastest where 16 bytes
        divide their first address and step). Value head h reads key head h // (Hv // Hk).
    g: log decay <= 0, [T, Hv] per head, [T, Hv, K] per key channel, or None for no decay.
    beta: [T, Hv], or None for no delta rule. Both fp32, contiguous.
    state: fp32 or bf16 [N, Hv, V, K], rows `state_indices` (int64 [S], distinct) are updated in place; rows
        may overlap in memory as long as the named ones do not. Of a sequence whose index is negative nothing
        is written, neither state nor output.
    has_initial_state: bool [S]; where False the sequence starts from zero and the old bytes are not read.
    query_lens: tokens of each sequence, sum T. A sequence without tokens leaves its state as it is.
    scale: factor on q, K ** -0.5 by default. qk_l2norm: normalise q and k over K, eps 1e-6 inside the root.
    chunk_size: a power of two from 16 on; the most tokens a chunk may have.
    any_initial_state: False promises that `has_initial_state` is False throughout, which spares a launch.
    out: dense [T, Hv, V] in the dtype of v, for the result.
    Returns [T, Hv, V] in the dtype of v. Sums are fp32, operands of products are in the dtype of v.
    """
    num_tokens, num_v_heads, v_dim = v.shape
    key_dim = k.shape[-1]
    assert sum(query_lens) == num_tokens and len(query_lens) == state_indices.shape[0]
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (v_dim, 1)
    assert state.shape[1:] == (num_v_heads, v_dim, key_dim) and num_v_heads % k.shape[1] == 0
    assert state.stride()[1:] == (v_dim * key_dim, key_dim, 1)
    assert has_initial_state.shape == state_indices.shape
    heads = (num_tokens, num_v_heads)
    assert beta is None or (beta.shape == heads and beta.is_contiguous())
    assert g is None or (g.shape in (heads, (*heads, key_dim)) and g.is_contiguous())
    assert chunk_size >= 16 and chunk_size & (chunk_size - 1) == 0
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    assert out.shape == v.shape and out.dtype == v.dtype and out.is_contiguous()
    if num_tokens == 0:
        return out
    per_channel = g is not None and g.ndim == 3
    tiling = Tiling.choose(v.dtype, key_dim, v_dim, per_channel, beta is not None)
    chunk = min(tiling.chunk, chunk_size)
    tables = varlen_tables(query_lens, chunk, v.device)
    scale = key_dim**-0.5 if scale is None else scale
    call = _Call(tables, tiling, chunk, num_v_heads, scale, qk_l2norm, any_initial_state)
    tiles = (_channel_tiles if per_channel else _head_tiles)(q, k, g, beta, call)
    serial = _delta_scan if tiling.tma and _whole_lines(q, k, v) else _scan
    serial(tiles, v, out, state, state_indices, has_initial_state, call, beta is not None)
    return out


def _head_tiles(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None, call: _Call
) -> _Tiles:
    """Tiles of all chunks where decay is per head or none."""
    scores, inverses = _squares(q, call, beta is not None)
    factors = torch.empty(*scores.shape[:2], 4, call.chunk, dtype=torch.float32, device=q.device)
    head_tiles_kernel[(call.tables.chunk_ids.shape[0] * call.num_v_heads,)](
        q,
        k,
        g,
        beta,
        inverses,
        scores,
        factors,
        call.tables.cu_seqlens,
        call.tables.chunk_seqs,
        call.tables.chunk_ids,
        call.scale,
        q.stride(0),
        k.stride(0),
        HK=k.shape[1],
        HV=call.num_v_heads,
        K=k.shape[2],
        BK=triton.next_power_of_2(k.shape[2]),
        C=call.chunk,
        HAS_G=g is not None,
        DELTA=beta is not None,
        # four programs a processor instead of three
        maxnreg=128 if call.tiling.tma else None,
        **_arithmetic(call),
    )
    return _Tiles(q, k, k, inverses, scores, factors)


def _channel_tiles(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None, call: _Call
) -> _Tiles:
    """Tiles of all chunks where decay is per key channel."""
    num_tokens, num_k_heads, key_dim = k.shape
    scores, inverses = _squares(q, call, beta is not None)
    decays = torch.empty(*scores.shape[:2], key_dim, dtype=torch.float32, device=q.device)
    shape = (3, num_tokens, call.num_v_heads, key_dim)
    q_in, k_in, k_out = torch.empty(shape, dtype=scores.dtype, device=q.device).unbind(0)
    channel_tiles_kernel[(call.tables.chunk_ids.shape[0] * call.num_v_heads,)](
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
        call.tables.cu_seqlens,
        call.tables.chunk_seqs,
        call.tables.chunk_ids,
        call.scale,
        q.stride(0),
        k.stride(0),
        HK=num_k_heads,
        HV=call.num_v_heads,
        K=key_dim,
        BK=triton.next_power_of_2(key_dim),
        C=call.chunk,
        LEVELS=call.chunk.bit_length() - 1,
        DELTA=beta is not None,
        **_arithmetic(call),
    )
    return _Tiles(q_in, k_in, k_out, inverses, scores, decays)


def _squares(q: torch.Tensor, call: _Call, delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the scores and the inverses of every tile; without delta rule one stands in for both."""
    num_seqs = call.tables.cu_seqlens.shape[0] - 1
    shape = (q.shape[0] // call.chunk + num_seqs, call.num_v_heads, call.chunk, call.chunk)
    dtype = torch.bfloat16 if call.tiling.dot == tl.bfloat16 else torch.float32
    scores = torch.empty(shape, dtype=dtype, device=q.device)
    return scores, torch.empty_like(scores) if delta else scores


def _arithmetic(call: _Call) -> dict[str, object]:
    """The arguments about precision that both tile kernels have."""
    narrow = call.tiling.dot == tl.bfloat16
    return {
        "L2NORM": call.qk_l2norm,
        "DOT": call.tiling.dot,
        "PRECISION": call.tiling.precision,
        # fp16 is as precise as tf32 and half the size; normalised keys keep the inverse in its range
        "INVERSE_DOT": tl.float16 if narrow and call.qk_l2norm else tl.float32,
        "WIDE_SUMS": call.tiling.precision == "ieee",
        "num_warps": 4,
    }


def _scan(
    tiles: _Tiles,
    v: torch.Tensor,
    out: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    call: _Call,
    delta: bool,
) -> None:
    """The serial pass, whatever the family."""
    num_v_heads, v_dim = v.shape[1:]
    key_dim = tiles.k.shape[2]
    splits = triton.cdiv(v_dim, call.tiling.value_block)
    scan_kernel[(state_indices.shape[0] * num_v_heads * splits,)](
        tiles.q,
        tiles.k,
        tiles.k_out,
        v,
        out,
        tiles.inverses,
        tiles.scores,
        tiles.factors,
        state,
        state_indices,
        has_initial_state,
        call.tables.cu_seqlens,
        tiles.q.stride(0),
        tiles.k.stride(0),
        v.stride(0),
        state.stride(0),
        HK=tiles.k.shape[1],
        HV=num_v_heads,
        K=key_dim,
        V=v_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=call.tiling.value_block,
        C=call.chunk,
        CHANNEL=tiles.factors.ndim == 3,
        DELTA=delta,
        DOT=call.tiling.dot,
        PRECISION=call.tiling.precision,
        STAGES=2 if call.tiling.dot == tl.bfloat16 else 1,
        num_warps=4,
    )


def _delta_scan(
    tiles: _Tiles,
    v: torch.Tensor,
    out: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    call: _Call,
    delta: bool,
) -> None:
    """The serial pass by `delta_scan_kernel`, in parts where one program a head would leave the GPU idle."""
    assert delta
    num_v_heads, v_dim = v.shape[1:]
    num_k_heads, key_dim = tiles.k.shape[1:]
    programs = state_indices.shape[0] * num_v_heads * (v_dim // call.tiling.value_block)
    processors = _processors(v.device)
    parts = max(parts for parts in (1, 2, 4) if parts == 1 or programs * parts <= processors)
    initial, initial_stride = state, state.stride(0)
    if parts > 1:
        initial_stride = num_v_heads * v_dim * key_dim
    if parts > 1 and call.any_initial_state:
        initial = torch.empty(state_indices.shape[0], initial_stride, dtype=state.dtype, device=v.device)
        copy_states_kernel[(state_indices.shape[0] * triton.cdiv(initial_stride, 4096),)](
            state,
            initial,
            state_indices,
            has_initial_state,
            state.stride(0),
            SIZE=initial_stride,
            BLOCK=4096,
            num_warps=4,
        )
    triton.set_allocator(_workspace)
    delta_scan_kernel[(programs * parts,)](
        tiles.q,
        tiles.k,
        v,
        out,
        tiles.inverses,
        tiles.scores,
        tiles.factors,
        initial,
        state,
        state_indices,
        has_initial_state,
        call.tables.cu_seqlens,
        tiles.q.stride(0),
        tiles.k.stride(0),
        v.stride(0),
        initial_stride,
        state.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        K=key_dim,
        V=v_dim,
        BV=call.tiling.value_block,
        C=call.chunk,
        PARTS=parts,
        DOT=call.tiling.dot,
        PRECISION=call.tiling.precision,
        # three stages leave room for one program a processor, two for two of them
        STAGES=3 if programs * parts <= processors else 2,
        num_warps=4,
    )


def _whole_lines(*tensors: torch.Tensor) -> bool:
    """Whether the TMA unit can read these: first addresses and steps are multiples of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors)


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere, where kernels are interpreted, enough for two parts."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def _workspace(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where Triton keeps the descriptors that a kernel makes; torch aligns to at least 256 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
