"""Replay decode written out: one token of one sequence from S + ring, in the dtype it is given.

The truth for the replay kernel beside `reference`, which it must agree with at every step. Counts and flushes
are the caller's.
"""

from dataclasses import dataclass

import torch

from hybridserve.kernels.linear_attention.reference import L2_EPS


@dataclass
class ReplayState:
    """One sequence: S [Hv, V, K] and, since it was written, k [n, Hk, K], u [n, Hv, V] and g [n, Hv]."""

    state: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor

    @classmethod
    def start(cls, state: torch.Tensor, num_k_heads: int) -> "ReplayState":
        """An empty ring behind a copy of `state`."""
        num_v_heads, v_dim, k_dim = state.shape
        return cls(
            state.clone(),
            state.new_empty(0, num_k_heads, k_dim),
            state.new_empty(0, num_v_heads, v_dim),
            state.new_empty(0, num_v_heads),
        )

    def decays(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is left now of S, [Hv], and of each entry, [n, Hv]: exponentials of sums of later g."""
        later = self.g.flip(0).cumsum(0).flip(0)
        total = later[0] if later.shape[0] else self.g.new_zeros(self.g.shape[1])
        return total.exp(), (later - self.g).exp()

    def read(self, vector: torch.Tensor) -> torch.Tensor:
        """(S + ring) x for x [Hk, K], [Hv, V]: exp(G) S x + sum_j exp(G - G_j) u_j (k_j . x)."""
        group = self.state.shape[0] // vector.shape[0]
        total, left = self.decays()
        products = (self.k * vector).sum(-1).repeat_interleave(group, 1)
        kept = (self.state * vector.repeat_interleave(group, 0)[:, None, :]).sum(-1)
        return total[:, None] * kept + ((left * products).unsqueeze(-1) * self.u).sum(0)

    def append(self, k: torch.Tensor, u: torch.Tensor, g: torch.Tensor) -> None:
        self.k, self.u, self.g = (torch.cat((a, b[None])) for a, b in ((self.k, k), (self.u, u), (self.g, g)))

    def flush(self) -> None:
        """Fold the ring into S and empty it; the value does not change."""
        total, left = self.decays()
        k = self.k.repeat_interleave(self.state.shape[0] // self.k.shape[1], 1)
        updates = left[:, :, None, None] * self.u.unsqueeze(-1) * k.unsqueeze(-2)
        self.state = total[:, None, None] * self.state + updates.sum(0)
        self.k, self.u, self.g = self.k[:0], self.u[:0], self.g[:0]


def replay_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    replay: ReplayState,
    flush: bool,
) -> torch.Tensor:
    """One token: q, k [Hk, K], v [Hv, V], g, beta [Hv]; q and k are normalised here, q scaled by K^-0.5.

    Returns o [Hv, V]; the token goes into the ring, and with `flush` the ring into S.
    """
    group = v.shape[0] // k.shape[0]
    k_norm = torch.rsqrt((k * k).sum(-1, keepdim=True) + L2_EPS)
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    decay = g.exp()[:, None]
    u = beta[:, None] * (v - decay * replay.read(k * k_norm))
    own = (q * k * k_norm).sum(-1).repeat_interleave(group)
    out = decay * replay.read(q) + own[:, None] * u
    replay.append(k, u * k_norm.repeat_interleave(group, 0), g)
    if flush:
        replay.flush()
    return out
