"""Linear attention on the CPU: the gates, the recurrent form for decode, and the entry to the chunkwise form.

Owns reading and writing the states in place. Knows nothing of requests, layers or projections.
"""

import torch
import torch.nn.functional as F

from hybridserve.kernels.linear_attention.chunkwise import ChunkLayout, chunkwise_scan

L2_EPS = 1e-6
# decays below this are zero in every dtype; the bound keeps differences of sums finite
MIN_LOG_DECAY = -1000.0


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464).

    a, b: [T, Hv], any dtype. A_log, dt_bias: [Hv].
    Returns g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b), both fp32 [T, Hv].
    """
    g = F.softplus(a.float() + dt_bias.float()).mul_(A_log.float().exp().neg_())
    return g, torch.sigmoid(b.float())


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

    q, k: [T, Hk, K]; v: [T, Hv, V]; value head h reads key head h // (Hv // Hk).
    g: fp32 log decay <= 0, [T, Hv] per head, [T, Hv, K] per key channel, or None for no decay.
    beta: fp32 [T, Hv], or None for no delta rule.
    state: fp32 [N, Hv, V, K], rows `state_indices` (int64 [S], distinct) are updated in place, no other row is
        touched; rows may overlap in memory as long as the named ones do not.
    has_initial_state: bool [S]; where False the sequence starts from zero and the old bytes are not used.
    query_lens: tokens of each sequence, sum T. A sequence without tokens leaves its state as it is.
    scale: factor on q, K ** -0.5 by default. qk_l2norm: normalise q and k over K, eps 1e-6 inside the root.
    chunk_size: a power of two.
    Returns [T, Hv, V] in the dtype of v; all arithmetic is fp32.
    """
    num_tokens, num_v_heads, v_dim = v.shape
    assert sum(query_lens) == num_tokens and len(query_lens) == state_indices.shape[0]
    assert chunk_size & (chunk_size - 1) == 0
    if num_tokens == 0:
        return torch.empty_like(v)
    layout = ChunkLayout.build(query_lens, chunk_size, v.device)
    q, k = _prepare_qk(q, k, scale, qk_l2norm)
    rows = state_indices[layout.order]
    initial = torch.where(
        has_initial_state[layout.order][:, None, None, None], state.index_select(0, rows), 0.0
    )
    if g is not None:
        g = g.float().clamp(min=MIN_LOG_DECAY)
    out, final = chunkwise_scan(layout, q, k, v, g, beta, initial)
    state.index_copy_(0, rows, final)
    return out.to(v.dtype)


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

    The output is exp(g) (S_old q) + (k . q) u, so that the old state is read once for both S k and S q.
    """
    num_rows = v.shape[0]
    q, k = _prepare_qk(q, k, scale, qk_l2norm)
    decay = None if g is None else g.float().exp()
    if num_rows == 1:
        # a view: the state is updated where it lies
        row = state.select(0, int(state_indices)).unsqueeze(0)
        return _step(q, k, v.float(), decay, beta, row).to(v.dtype)
    rows = state.index_select(0, state_indices)
    out = _step(q, k, v.float(), decay, beta, rows)
    state.index_copy_(0, state_indices, rows)
    return out.to(v.dtype)


def _prepare_qk(
    q: torch.Tensor, k: torch.Tensor, scale: float | None, qk_l2norm: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 q (normalised and scaled) and k (normalised)."""
    key_dim = q.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    q, k = q.float(), k.float()
    if not qk_l2norm:
        return q * scale, k
    # x rsqrt(sum x^2 + eps) is the rms norm with eps / K, times K ** -0.5
    q = F.rms_norm(q, (key_dim,), eps=L2_EPS / key_dim).mul_(scale * key_dim**-0.5)
    k = F.rms_norm(k, (key_dim,), eps=L2_EPS / key_dim).mul_(key_dim**-0.5)
    return q, k


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token for each row of `state` [B, Hv, V, K], updated in place; returns fp32 [B, Hv, V]."""
    batch, num_v_heads, v_dim, key_dim = state.shape
    num_k_heads = k.shape[1]
    per_channel = decay is not None and decay.ndim == 3
    if per_channel and num_k_heads != num_v_heads:
        group = num_v_heads // num_k_heads
        q, k, num_k_heads = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1), num_v_heads
    # value heads of one key head are stacked, so that q and k are never repeated for them
    stacked = state.view(batch * num_k_heads, -1, key_dim)
    kq = torch.stack((k, q), -1)
    read = torch.bmm(stacked, (kq * decay.unsqueeze(-1) if per_channel else kq).view(-1, key_dim, 2))
    read = read.view(batch, num_v_heads, v_dim, 2)
    if decay is not None and not per_channel:
        read = read * decay[:, :, None, None]
    u = v if beta is None else (v - read[..., 0]) * beta.unsqueeze(-1)
    if decay is not None:
        state.mul_(decay.unsqueeze(2) if per_channel else decay[:, :, None, None])
    k_rows = k.reshape(-1, 1, key_dim)
    u_rows = u.reshape(batch * num_k_heads, -1, 1)
    stacked.addcmul_(u_rows, k_rows)
    own = (k * q).sum(-1).view(-1, 1, 1)
    return torch.addcmul(read[..., 1], u, (own.expand_as(u_rows)).reshape(u.shape))
