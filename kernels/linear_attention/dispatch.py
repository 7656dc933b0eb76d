"""Linear attention where its input lies: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.linear_attention import cpu, cpu_gdn
from hybridserve.kernels.linear_attention.replay import ReplayRing


def gdn_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log decay and write strength of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464).

    a, b: [T, Hv], any float dtype, the last axis dense. A_log, dt_bias: [Hv].
    Returns g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b) as one fp32 [2, T, Hv], in `out`
    where it is given (dense).
    """
    if a.is_cuda:
        from hybridserve.kernels.linear_attention import triton_gdn_gates

        return triton_gdn_gates.gdn_gates(a, b, A_log, dt_bias, out)
    return cpu.gdn_gates(a, b, A_log, dt_bias, out)


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

    q, k: [T, Hk, K]; v: [T, Hv, V]; value head h reads key head h // (Hv // Hk). Views are taken as long as a
        token's heads lie end to end. On a GPU K and V are 16 to 256.
    g: fp32 log decay <= 0, [T, Hv] per head, [T, Hv, K] per key channel, or None for no decay.
    beta: fp32 [T, Hv], or None for no delta rule. Both contiguous on a GPU.
    state: fp32 or bf16 [N, Hv, V, K], rows `state_indices` (int64 [S], distinct) are updated in
        place, no other row is touched; rows may overlap in memory as long as the named ones do not.
    has_initial_state: bool [S]; where False the sequence starts from zero and the old bytes are not used.
    query_lens: tokens of each sequence, sum T. A sequence without tokens leaves its state as it is. Numbers
        of the host: a GPU gets them in one transfer that nothing waits for, once for all layers of a step.
    scale: factor on q, K ** -0.5 by default. qk_l2norm: normalise q and k over K, eps 1e-6 inside the root.
    chunk_size: a power of two, the most tokens a chunk may have; on a GPU from 16 on.
    any_initial_state: False promises that `has_initial_state` is False throughout, which spares a launch.
    out: dense [T, Hv, V] in the dtype of v, for the result.
    Returns [T, Hv, V] in the dtype of v. Sums are fp32; on a GPU products' operands are in the dtype of v.
    """
    args = q, k, v, g, beta, state, state_indices, has_initial_state, query_lens
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "chunk_size": chunk_size}
    if v.is_cuda:
        from hybridserve.kernels.linear_attention import triton_prefill

        return triton_prefill.linear_attention_prefill(
            *args, **options, any_initial_state=any_initial_state, out=out
        )
    made = cpu.linear_attention_prefill(*args, **options)
    return made if out is None else out.copy_(made)


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
    """One token of each of B sequences; arguments as in `linear_attention_prefill` with T = B.

    On a GPU a row whose index is negative touches no state, and its output is zero.
    """
    args = q, k, v, g, beta, state, state_indices
    if v.is_cuda:
        from hybridserve.kernels.linear_attention import triton_decode

        return triton_decode.linear_attention_decode(*args, scale=scale, qk_l2norm=qk_l2norm)
    return cpu.linear_attention_decode(*args, scale=scale, qk_l2norm=qk_l2norm)


def gdn_decode_fused(
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each of B sequences, from the projections to what the output projection takes.

    With C = 2 Hk K + Hv V channels:
    qkv: [B, C], q|k|v as projected. z: [B, Hv V]. a, b: [B, Hv]. All may be views of one projection's output.
    conv_weight: [C, kernel], its last column meets the current token; fast only as the transposed view of one
        that lies as [kernel, C]. conv_bias: [C] or None.
    A_log, dt_bias: [Hv]. norm_weight: [V], plain; None leaves norm and gate to the caller: o itself comes
        back, and z is not read. eps: of the norm; q and k are normalised with 1e-6.
    conv_state: [N, kernel, C], dtype of qkv, input of position p in column p % kernel; takes this token's.
    state: [N, Hv, V, K], fp32 or bf16, arithmetic in fp32. state_indices: int64 [B], distinct
        rows of both, changed in place.
    positions: int64 [B], position of each token in its sequence.
    A row whose index or position is negative touches nothing, and its output is zero.
    Returns norm(o) * silu(z), [B, Hv V] in the dtype of qkv, in `out` where it is given (dense), as
        q, k, v = silu(conv(qkv)), rounded to the dtype of qkv;  q, k normalised over K;  q scaled by K^-0.5
        g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b);  o as in `linear_attention_reference`
    (Yang et al. 2024, arXiv 2412.06464.) On a GPU one launch, which a CUDA graph can hold.

    Raises:
        ValueError: on a GPU, where a head's state is more than one program can hold.
    """
    args = (
        qkv, z, a, b, conv_weight, conv_bias, A_log, dt_bias, norm_weight, eps, conv_state, state,
        state_indices, positions,
    )  # fmt: skip
    sizes = _sizes(num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    if qkv.is_cuda:
        from hybridserve.kernels.linear_attention import triton_gdn_decode

        return triton_gdn_decode.gdn_decode_fused(*args, **sizes, out=out)
    made = cpu_gdn.gdn_decode_fused(*args, **sizes)
    return made if out is None else out.copy_(made)


def gdn_decode_replay(
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    ring: ReplayRing,
    state_indices: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    flushes: torch.Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gdn_decode_fused` from S + ring; arguments as there, but that a negative index alone tells padding,
    and

    ring: its k in the dtype of qkv; its rows are `state_indices`, too. Entries from `counts` on are not read.
    counts: int64 [B], valid entries before this step, < window. flushes: bool [B] (`replay_entries`): where
        true, S takes the ring and this token and no entry is written; else S is only read and entry `counts`
        is written. The caller's next count is 0 or counts + 1.
    """
    args = (
        qkv, z, a, b, conv_weight, conv_bias, A_log, dt_bias, norm_weight, eps, conv_state, state, ring,
        state_indices, positions, counts, flushes,
    )  # fmt: skip
    sizes = _sizes(num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    if qkv.is_cuda:
        from hybridserve.kernels.linear_attention import triton_gdn_decode_replay

        return triton_gdn_decode_replay.gdn_decode_replay(*args, **sizes, out=out)
    made = cpu_gdn.gdn_decode_replay(*args, **sizes)
    return made if out is None else out.copy_(made)


def flush_replay(
    state: torch.Tensor, ring: ReplayRing, state_indices: torch.Tensor, counts: torch.Tensor
) -> None:
    """Fold the rings of R rows into their states, for whoever needs S itself (prefill, a snapshot kept bare).

    state: [N, Hv, V, K]. state_indices: int64 [R], distinct; negative ones are left out. counts: int64 [R],
    valid entries; where 0 nothing is read or written. The caller's counts are 0 afterwards.
    """
    if state.is_cuda:
        from hybridserve.kernels.linear_attention import triton_gdn_decode_replay

        return triton_gdn_decode_replay.flush_replay(state, ring, state_indices, counts)
    return cpu_gdn.flush_replay(state, ring, state_indices, counts)


def _sizes(num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> dict[str, int]:
    return {
        "num_k_heads": num_k_heads,
        "num_v_heads": num_v_heads,
        "head_k_dim": head_k_dim,
        "head_v_dim": head_v_dim,
    }
