"""Linear attention's recurrent form on a GPU, for the whole family: one launch, one read of each state.

Knows nothing of convolutions or gates; Gated DeltaNet's fused form is `triton_gdn_decode`.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_decode_parts import (
    L2_EPS,
    dot_keys,
    key_tile,
    load_masked,
    read_state,
    state_tile,
    store_masked,
)

# elements of a state that one program holds in registers, and its warps
TILE = 8192
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["state_indices"])
def _decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    state_indices,
    out,
    scale,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    state_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """One program: BLOCK_V rows of one value head's state of one row. DECAY: numbers a head, 0, 1 or K."""
    MASKED: tl.constexpr = BLOCK_K != K or V % BLOCK_V != 0
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    row = (program // (V_BLOCKS * HV)).to(tl.int64)
    head = program // V_BLOCKS % HV
    key_head = head // (HV // HK)
    values = program % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < V
    out_pointers = out + row * HV * V + head * V + values
    index = tl.load(state_indices + row)
    if index < 0:
        store_masked(out_pointers, tl.zeros([BLOCK_V], tl.float32), is_value, MASKED)
        return

    # all loads before the first use: a warp stalls where a value is needed, and issues nothing behind it
    keys, is_key = key_tile(K, BLOCK_K)
    offsets, in_state = state_tile(keys, values, K, V)
    pointers = state + index * state_stride + head * V * K + offsets
    tile = load_masked(pointers, in_state, MASKED)
    q_vector = load_masked(q + row * q_stride + key_head * K + keys, is_key, MASKED)
    k_vector = load_masked(k + row * k_stride + key_head * K + keys, is_key, MASKED)
    u = load_masked(v + row * v_stride + head * V + values, is_value, MASKED)
    if DECAY == 1:
        tile *= tl.exp(tl.load(g + row * g_stride + head).to(tl.float32))
    elif DECAY == K:
        tile *= tl.exp(load_masked(g + row * g_stride + head * K + keys, is_key, MASKED))[None, :, :]
    if L2NORM:
        q_vector *= tl.rsqrt(dot_keys(q_vector, q_vector) + L2_EPS)
        k_vector *= tl.rsqrt(dot_keys(k_vector, k_vector) + L2_EPS)
    q_vector *= scale
    if DELTA:
        u = (u - read_state(tile, k_vector)) * tl.load(beta + row * beta_stride + head).to(tl.float32)
    result = read_state(tile, q_vector) + dot_keys(k_vector, q_vector) * u
    tile += u[:, None, None] * k_vector[None, :, :]
    store_masked(out_pointers, result, is_value, MASKED)
    store_masked(pointers, tile, in_state, MASKED)


def linear_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
) -> torch.Tensor:
    """One token of each of B sequences (the recurrence of `linear_attention_reference`), states in place.

    q, k: [B, Hk, K]; v: [B, Hv, V]; views are taken as long as a row's heads lie end to end. K, V <= 256.
    g: fp32 log decay <= 0, [B, Hv] per head, [B, Hv, K] per key channel, or None. beta: [B, Hv] or None.
    state: [N, Hv, V, K], fp32 or bf16, arithmetic in fp32; rows `state_indices` (int64 [B], distinct) change.
        A row whose index is negative touches no state, and its output is zero.
    Returns [B, Hv, V] in the dtype of v. Can be captured in a CUDA graph.
    """
    batch, num_v_heads, v_dim = v.shape
    num_k_heads, k_dim = k.shape[1:]
    assert max(k_dim, v_dim) <= 256 and num_v_heads % num_k_heads == 0
    assert state.shape[1:] == (num_v_heads, v_dim, k_dim) and state[0].is_contiguous()
    assert all(x is None or x[:1].is_contiguous() for x in (q, k, v, g, beta))
    out = torch.empty(batch, num_v_heads, v_dim, dtype=v.dtype, device=v.device)
    if batch == 0:
        return out
    block_k = max(32, triton.next_power_of_2(k_dim))
    block_v = min(triton.next_power_of_2(v_dim), TILE // block_k)
    decay = 0 if g is None else 1 if g.ndim == 2 else k_dim
    _decode_kernel[(batch * num_v_heads * triton.cdiv(v_dim, block_v),)](
        q,
        k,
        v,
        q if g is None else g,
        q if beta is None else beta,
        state,
        state_indices,
        out,
        k_dim**-0.5 if scale is None else scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        0 if g is None else g.stride(0),
        0 if beta is None else beta.stride(0),
        state.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        K=k_dim,
        V=v_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        DECAY=decay,
        DELTA=beta is not None,
        L2NORM=qk_l2norm,
        num_warps=NUM_WARPS,
    )
    return out
