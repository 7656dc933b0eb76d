"""Prefill of linear attention on the GPU: a parallel pass over chunks, then a serial one over each sequence.

Owns which tile sizes and precisions are used. Same arguments and results as the plain PyTorch form.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_prefill_scan import scan_kernel
from hybridserve.kernels.linear_attention.triton_prefill_tiles import channel_tiles_kernel, head_tiles_kernel
from hybridserve.kernels.varlen import VarlenTables, varlen_tables


@dataclass(frozen=True)
class _Tiling:
    """chunk: tokens of a chunk. value_block: rows of the state one program holds. dot: dtype of operands."""

    chunk: int
    value_block: int
    dot: tl.dtype
    precision: str
    inverse_precision: str
    stages: int

    @classmethod
    def choose(cls, dtype: torch.dtype, key_dim: int, v_dim: int, per_channel: bool) -> "_Tiling":
        """fp16's exponents are too few for states, so fp16 tiles are multiplied as fp32 of fp16's precision."""
        if dtype == torch.bfloat16:
            small = key_dim > 128 or v_dim <= 32
            chunk = 32 if per_channel or key_dim > 128 else 64
            return cls(chunk, 32 if small else 64, tl.bfloat16, "tf32", "tf32", 2)
        precision = "ieee" if dtype == torch.float32 else "tf32x3"
        return cls(16 if key_dim > 128 else 32, 32, tl.float32, precision, precision, 1)


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
) -> torch.Tensor:
    """The recurrence of `linear_attention_reference` over S sequences laid end to end, chunk by chunk.

    q, k: [T, Hk, K]; v: [T, Hv, V], of one dtype (bf16, fp16, fp32), K and V of 16 to 256; views whose tokens
        lie further apart are taken as they are. Value head h reads key head h // (Hv // Hk).
    g: log decay <= 0, [T, Hv] per head, [T, Hv, K] per key channel, or None for no decay.
    beta: [T, Hv], or None for no delta rule. Both fp32, contiguous.
    state: fp32 or bf16 [N, Hv, V, K], rows `state_indices` (int64 [S], distinct) are updated in place; rows
        may overlap in memory as long as the named ones do not. Of a sequence whose index is negative nothing
        is written, neither state nor output.
    has_initial_state: bool [S]; where False the sequence starts from zero and the old bytes are not read.
    query_lens: tokens of each sequence, sum T. A sequence without tokens leaves its state as it is.
    scale: factor on q, K ** -0.5 by default. qk_l2norm: normalise q and k over K, eps 1e-6 inside the root.
    chunk_size: a power of two from 16 on; the most tokens a chunk may have.
    Returns [T, Hv, V] in the dtype of v. Sums are fp32, operands of products are in the dtype of v.
    """
    num_tokens, num_v_heads, v_dim = v.shape
    num_k_heads, key_dim = k.shape[1:]
    assert sum(query_lens) == num_tokens and len(query_lens) == state_indices.shape[0]
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1) and v.stride()[1:] == (v_dim, 1)
    assert state.stride()[1:] == (v_dim * key_dim, key_dim, 1)
    assert chunk_size >= 16 and chunk_size & (chunk_size - 1) == 0
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_tokens == 0:
        return out
    per_channel = g is not None and g.ndim == 3
    tiling = _Tiling.choose(v.dtype, key_dim, v_dim, per_channel)
    chunk = min(tiling.chunk, chunk_size)
    tables = varlen_tables(query_lens, chunk, v.device)
    scale = key_dim**-0.5 if scale is None else scale
    make_tiles = _channel_tiles if per_channel else _head_tiles
    tiles = make_tiles(q, k, num_v_heads, g, beta, tables, chunk, tiling, scale, qk_l2norm)
    splits = triton.cdiv(v_dim, tiling.value_block)
    scan_kernel[(len(query_lens) * num_v_heads * splits,)](
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
        tables.cu_seqlens,
        tiles.q.stride(0),
        tiles.k.stride(0),
        v.stride(0),
        state.stride(0),
        HK=num_v_heads if per_channel else num_k_heads,
        HV=num_v_heads,
        K=key_dim,
        V=v_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=tiling.value_block,
        C=chunk,
        CHANNEL=per_channel,
        DELTA=beta is not None,
        DOT=tiling.dot,
        PRECISION=tiling.precision,
        STAGES=tiling.stages,
        num_warps=4,
    )
    return out


@dataclass(frozen=True)
class _Tiles:
    """What the serial pass reads, as `scan_kernel` has it."""

    q: torch.Tensor
    k: torch.Tensor
    k_out: torch.Tensor
    inverses: torch.Tensor
    scores: torch.Tensor
    factors: torch.Tensor


def _head_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    num_v_heads: int,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    tables: VarlenTables,
    chunk: int,
    tiling: _Tiling,
    scale: float,
    qk_l2norm: bool,
) -> _Tiles:
    """Tiles of all chunks where decay is per head or none."""
    num_k_heads, key_dim = k.shape[1:]
    scores, inverses = _squares(q, num_v_heads, tables, chunk, tiling, beta is not None)
    factors = torch.empty(*scores.shape[:2], 4, chunk, dtype=torch.float32, device=q.device)
    group = num_v_heads // num_k_heads
    # value heads of one key head share its products; beyond four they would leave too few programs
    heads = max(n for n in range(1, 5) if group % n == 0)
    head_tiles_kernel[(tables.chunk_ids.shape[0] * (num_v_heads // heads),)](
        q,
        k,
        g,
        beta,
        inverses,
        scores,
        factors,
        tables.cu_seqlens,
        tables.chunk_seqs,
        tables.chunk_ids,
        scale,
        q.stride(0),
        k.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        HEADS=heads,
        K=key_dim,
        BK=triton.next_power_of_2(key_dim),
        C=chunk,
        HAS_G=g is not None,
        DELTA=beta is not None,
        L2NORM=qk_l2norm,
        DOT=tiling.dot,
        PRECISION=tiling.precision,
        INVERSE_PRECISION=tiling.inverse_precision,
        WIDE_SUMS=tiling.precision == "ieee",
        num_warps=4,
    )
    return _Tiles(q, k, k, inverses, scores, factors)


def _channel_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    num_v_heads: int,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    tables: VarlenTables,
    chunk: int,
    tiling: _Tiling,
    scale: float,
    qk_l2norm: bool,
) -> _Tiles:
    """Tiles of all chunks where decay is per key channel."""
    num_tokens, num_k_heads, key_dim = k.shape
    scores, inverses = _squares(q, num_v_heads, tables, chunk, tiling, beta is not None)
    decays = torch.empty(*scores.shape[:2], key_dim, dtype=torch.float32, device=q.device)
    q_in, k_in, k_out = torch.empty(
        3, num_tokens, num_v_heads, key_dim, dtype=scores.dtype, device=q.device
    ).unbind(0)
    channel_tiles_kernel[(tables.chunk_ids.shape[0] * num_v_heads,)](
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
        tables.cu_seqlens,
        tables.chunk_seqs,
        tables.chunk_ids,
        scale,
        q.stride(0),
        k.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        K=key_dim,
        BK=triton.next_power_of_2(key_dim),
        C=chunk,
        LEVELS=chunk.bit_length() - 1,
        DELTA=beta is not None,
        L2NORM=qk_l2norm,
        DOT=tiling.dot,
        PRECISION=tiling.precision,
        INVERSE_PRECISION=tiling.inverse_precision,
        WIDE_SUMS=tiling.precision == "ieee",
        num_warps=4,
    )
    return _Tiles(q_in, k_in, k_out, inverses, scores, decays)


def _squares(
    q: torch.Tensor, num_v_heads: int, tables: VarlenTables, chunk: int, tiling: _Tiling, delta: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the scores and the inverses of every tile; without delta rule one stands in for both."""
    num_seqs = tables.cu_seqlens.shape[0] - 1
    shape = (q.shape[0] // chunk + num_seqs, num_v_heads, chunk, chunk)
    dtype = torch.bfloat16 if tiling.dot == tl.bfloat16 else torch.float32
    scores = torch.empty(shape, dtype=dtype, device=q.device)
    return scores, torch.empty_like(scores) if delta else scores
