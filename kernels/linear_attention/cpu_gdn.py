"""Gated DeltaNet's decode steps in plain PyTorch, with the arguments of the fused kernels for a GPU.

Composed of this package's CPU operators. Knows nothing of when a ring is flushed: `replay_entries`.
"""

from dataclasses import dataclass

import torch

from hybridserve.kernels.causal_conv1d import cpu as conv
from hybridserve.kernels.linear_attention.cpu import L2_EPS, gdn_gates, linear_attention_decode
from hybridserve.kernels.linear_attention.replay import ReplayRing
from hybridserve.kernels.rms_norm import cpu as norm


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
) -> torch.Tensor:
    """One token of each of B sequences; arguments as in `dispatch`."""
    rows = (torch.minimum(state_indices, positions) >= 0).nonzero().flatten()
    out = torch.zeros(z.shape, dtype=qkv.dtype, device=qkv.device)
    if not rows.numel():
        return out
    index = state_indices[rows]
    x = conv.causal_conv1d_decode(
        qkv[rows], conv.make_phase_weight(conv_weight), conv_bias, conv_state, index, positions[rows]
    )
    q, k, v = _split_heads(x, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    g, beta = gdn_gates(a[rows], b[rows], A_log, dt_bias)
    o = linear_attention_decode(q, k, v, g, beta, state, index)
    out[rows] = _norm_and_gate(o, z, rows, norm_weight, eps)
    return out


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
) -> torch.Tensor:
    """`gdn_decode_fused` from S + ring; arguments as in `dispatch`."""
    live = torch.minimum(torch.minimum(state_indices, positions), counts) >= 0
    rows = live.nonzero().flatten()
    out = torch.zeros(z.shape, dtype=qkv.dtype, device=qkv.device)
    if not rows.numel():
        return out
    index, counts, flushes = state_indices[rows], counts[rows], flushes[rows]
    x = conv.causal_conv1d_decode(
        qkv[rows], conv.make_phase_weight(conv_weight), conv_bias, conv_state, index, positions[rows]
    )
    q, k, v = (y.float() for y in _split_heads(x, num_k_heads, num_v_heads, head_k_dim, head_v_dim))
    g, beta = gdn_gates(a[rows], b[rows], A_log, dt_bias)
    group = num_v_heads // num_k_heads
    k_norm = _inverse_norm(k)
    q = q * _inverse_norm(q) * head_k_dim**-0.5

    value = _Value.load(state, ring, index, counts)
    decay = g.exp().unsqueeze(-1)
    u = beta.unsqueeze(-1) * (v - decay * value.read(k * k_norm))
    own = (q * k * k_norm).sum(-1).repeat_interleave(group, 1).unsqueeze(-1)
    o = (decay * value.read(q) + own * u).to(qkv.dtype)
    # the norm of k goes into u, so that the ring can keep k as it is
    u *= k_norm.repeat_interleave(group, 1)

    kept = (~flushes).nonzero().flatten()
    at = (index[kept, None], torch.arange(num_v_heads), counts[kept, None])
    ring.u[at], ring.g[at] = u[kept], g[kept]
    ring.k[index[kept, None], torch.arange(num_k_heads), counts[kept, None]] = k[kept].to(ring.k.dtype)
    folded = flushes.nonzero().flatten()
    if folded.numel():
        k = k.repeat_interleave(group, 1)
        new = decay.unsqueeze(-1) * value.folded() + u.unsqueeze(-1) * k.unsqueeze(-2)
        state.index_copy_(0, index[folded], new[folded].to(state.dtype))
    out[rows] = _norm_and_gate(o, z, rows, norm_weight, eps)
    return out


def flush_replay(
    state: torch.Tensor, ring: ReplayRing, state_indices: torch.Tensor, counts: torch.Tensor
) -> None:
    """Fold the rings of R rows into their states; arguments as in `dispatch`."""
    rows = ((state_indices >= 0) & (counts > 0)).nonzero().flatten()
    if rows.numel():
        index = state_indices[rows]
        folded = _Value.load(state, ring, index, counts[rows]).folded()
        state.index_copy_(0, index, folded.to(state.dtype))


@dataclass(frozen=True)
class _Value:
    """S + ring of some rows, fp32: what is left of S [B, Hv, V, K] and of entries (k, u) now."""

    state: torch.Tensor
    k: torch.Tensor
    """[B, Hv, window, K], zero behind the count."""
    u: torch.Tensor
    """[B, Hv, window, V], zero behind the count, decays since the entry folded in."""

    @classmethod
    def load(
        cls, state: torch.Tensor, ring: ReplayRing, index: torch.Tensor, counts: torch.Tensor
    ) -> "_Value":
        valid = torch.arange(ring.window) < counts[:, None, None]
        g = torch.where(valid, ring.g[index], 0.0)
        # sums of later entries' g: a difference of two running sums would lose small decays behind large ones
        until = g.flip(-1).cumsum(-1).flip(-1)
        later = torch.cat((until[..., 1:], torch.zeros_like(until[..., :1])), -1)
        k = torch.where(valid.unsqueeze(-1), ring.k[index].float(), 0.0)
        u = torch.where(valid.unsqueeze(-1), ring.u[index], 0.0) * later.exp().unsqueeze(-1)
        total = until[..., 0, None, None].exp()
        group = u.shape[1] // k.shape[1]
        return cls(state[index].float() * total, k.repeat_interleave(group, 1), u)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """(S + ring) x for x [B, Hk, K], as [B, Hv, V]."""
        x = x.repeat_interleave(self.u.shape[1] // x.shape[1], 1).unsqueeze(-1)
        return (self.state @ x + self.u.mT @ (self.k @ x)).squeeze(-1)

    def folded(self) -> torch.Tensor:
        """The state that has the ring's entries in it."""
        return self.state + self.u.mT @ self.k


def _norm_and_gate(
    o: torch.Tensor, z: torch.Tensor, rows: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """norm(o) * silu(z[rows]), or o without a weight; o [B, Hv, V], the result [B, Hv V]."""
    if norm_weight is not None:
        o = norm.rms_norm_gated(o, z[rows].view(o.shape), norm_weight, eps)
    return o.flatten(1)


def _split_heads(
    x: torch.Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    key_dim = num_k_heads * head_k_dim
    q, k, v = x.split((key_dim, key_dim, num_v_heads * head_v_dim), 1)
    keys, values = (num_k_heads, head_k_dim), (num_v_heads, head_v_dim)
    return q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values)


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(sum(x^2) + 1e-6) over the last axis, which is kept."""
    return torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().unsqueeze(-1)
