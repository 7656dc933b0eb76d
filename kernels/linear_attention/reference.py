"""The recurrence of linear attention, token by token: the truth the fast paths are tested against.

Works in the dtype it is given (fp64 for the truth, fp32 for the yardstick). Knows nothing of chunks.
"""

import torch

L2_EPS = 1e-6


def l2norm_reference(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, in the dtype of x."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def gdn_gates_reference(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated DeltaNet's gates (Yang et al. 2024), in the dtype of a: a, b [T, Hv]; A_log, dt_bias [Hv]."""
    x = a + dt_bias.to(a)
    softplus = torch.where(x > 0, x, torch.zeros_like(x)) + torch.log1p(torch.exp(-x.abs()))
    return -torch.exp(A_log.to(a)) * softplus, 1 / (1 + torch.exp(-b))


def linear_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, all tensors of one floating dtype.

    q, k [T, Hk, K]; v [T, Hv, V]; g [T, Hv], [T, Hv, K] or None; beta [T, Hv] or None.
    initial_state [Hv, V, K].
    Returns (out [T, Hv, V], final state [Hv, V, K]); the input state is not changed. For each token and head
        S = exp(g) S;  u = beta (v - S k), or v without beta;  S = S + outer(u, k);  o = S q
    """
    num_tokens, num_v_heads, _ = v.shape
    group = num_v_heads // k.shape[1]
    if qk_l2norm:
        q, k = l2norm_reference(q), l2norm_reference(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    state = initial_state.clone()
    out = torch.empty_like(v)
    for t in range(num_tokens):
        if g is not None:
            decay = g[t].exp()
            state = state * (decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])
        u = v[t]
        if beta is not None:
            u = beta[t][:, None] * (u - (state * k[t][:, None, :]).sum(-1))
        state = state + u[:, :, None] * k[t][:, None, :]
        out[t] = (state * q[t][:, None, :]).sum(-1)
    return out, state
