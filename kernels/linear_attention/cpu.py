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
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log decay and write strength of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464).

    a, b: [T, Hv], any dtype. A_log, dt_bias: [Hv].
    Returns g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b), fp32 [2, T, Hv], in `out` if given.
    """
    if out is None:
        out = torch.empty(2, *a.shape, dtype=torch.float32, device=a.device)
    torch.mul(F.softplus(a.float() + dt_bias.float()), A_log.float().exp().neg_(), out=out[0])
    torch.sigmoid(b.float(), out=out[1])
    return out


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
    state: fp32 or bf16 [N, Hv, V, K], rows `state_indices` (int64 [S], distinct) are updated in place, no
        other row is touched; rows may overlap in memory as long as the named ones do not.
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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    layout = ChunkLayout.build(query_lens, chunk_size, v.device)
    rows, known = state_indices[layout.order], has_initial_state[layout.order]
    carried = torch.where(known[:, None, None, None], state.index_select(0, rows).float(), 0.0)
    out = torch.empty_like(v)
    for group in layout.groups():
        part_q, part_k = group.take(q).float(), group.take(k).float()
        if qk_l2norm:
            part_q, part_k = _l2norm(part_q), _l2norm(part_k)
        part_q = part_q * scale
        part_g = None if g is None else group.take(g).float().clamp(min=MIN_LOG_DECAY)
        part_beta = None if beta is None else group.take(beta).float()
        part_v = group.take(v).float()
        group.put(out, chunkwise_scan(group, part_q, part_k, part_v, part_g, part_beta, carried))
    state.index_copy_(0, rows, carried.to(state.dtype))
    return out


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
    batch, num_v_heads, v_dim = v.shape
    if state.dtype != torch.float32:
        rows = state.index_select(0, state_indices).float()
        out = linear_attention_decode(
            q, k, v, g, beta, rows, torch.arange(batch), scale=scale, qk_l2norm=qk_l2norm
        )
        state.index_copy_(0, state_indices, rows.to(state.dtype))
        return out
    num_k_heads, key_dim = k.shape[1:]
    decay = None if g is None else g.float().exp()
    per_channel = decay is not None and decay.ndim == 3
    if per_channel and num_k_heads != num_v_heads:
        repeats = num_v_heads // num_k_heads
        q, k, num_k_heads = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1), num_v_heads
    kq = torch.stack((k, q), 2).float()
    if qk_l2norm:
        kq = _l2norm(kq)
    # from here on key heads come first, then rows, so that what the products give is contiguous
    kq = kq.transpose(0, 1)
    k, q = kq.unbind(2)
    # value heads of one key head are side by side, so that q and k are never repeated for them
    group = num_v_heads // num_k_heads
    readers, factor = kq, None
    if per_channel:
        factor = decay.transpose(0, 1).view(num_k_heads, batch, 1, 1, key_dim)
        readers = kq * factor.squeeze(3)
    elif decay is not None:
        factor = decay.view(batch, num_k_heads, group, 1, 1).transpose(0, 1)

    runs = [
        (rows, states.view(-1, num_k_heads, group, v_dim, key_dim).transpose(0, 1))
        for rows, states in _runs(state, state_indices)
    ]
    read = torch.empty(num_k_heads, batch, 2, group * v_dim, device=v.device)
    for rows, states in runs:
        _read_states(readers[:, rows], states.flatten(2, 3), read[:, rows])
    read = read.view(num_k_heads, batch, 2, group, v_dim)
    if factor is not None and not per_channel:
        read.mul_(factor.transpose(2, 3))
    read_k, read_q = read.unbind(2)
    u = v.float().view(batch, num_k_heads, group, v_dim).transpose(0, 1)
    if beta is not None:
        u = (u - read_k) * beta.view(batch, num_k_heads, group, 1).transpose(0, 1)
    for rows, states in runs:
        if factor is not None:
            states.mul_(factor[:, rows])
        states.addcmul_(u[:, rows].unsqueeze(4), k[:, rows, None, None])
    own = torch.linalg.vecdot(k, q).view(num_k_heads, batch, 1, 1)
    out = torch.addcmul(read_q, u, own).mul_(key_dim**-0.5 if scale is None else scale)
    return out.transpose(0, 1).reshape(v.shape).to(v.dtype)


def _runs(state: torch.Tensor, state_indices: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Neighbouring rows of the batch whose states lie at equal distances, each with one view of its states.

    Requests' states mostly do, and then one operation works on all of them where they lie. Gathering them
    for that, and scattering them back, took as long as a loop over the rows.
    """
    indices = state_indices.tolist()
    runs, first = [], 0
    while first < len(indices):
        end = first + 1
        step = indices[end] - indices[first] if end < len(indices) else 1
        while step > 0 and end < len(indices) and indices[end] - indices[end - 1] == step:
            end += 1
        runs.append((slice(first, end), state[indices[first] : indices[end - 1] + 1 : max(step, 1)]))
        first = end
    return runs


def _read_states(readers: torch.Tensor, states: torch.Tensor, read: torch.Tensor) -> None:
    """read [Hk, n, 2, V'] = readers [Hk, n, 2, K] times states [Hk, n, V', K], in few products."""
    num_heads, num_rows = readers.shape[:2]
    if num_rows < num_heads:
        for row in range(num_rows):
            torch.bmm(readers[:, row], states[:, row].mT, out=read[:, row])
    else:
        for head in range(num_heads):
            torch.bmm(readers[head], states[head].mT, out=read[head])


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis of fp32 x."""
    return x * torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().unsqueeze(-1)
