"""Rotary embedding where its input lies: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.rotary import cpu


def rotary_cos_sin(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int64 [T] -> (cos, sin), fp32 [T, rotary_dim // 2], of fp32 angles."""
    if positions.is_cuda:
        from hybridserve.kernels.rotary import triton_qk

        return triton_qk.rotary_cos_sin(positions, rotary_dim, theta)
    return cpu.rotary_cos_sin(positions, rotary_dim, theta)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    gated: bool,
    k_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate the queries and keys of T tokens, and write keys and values into their pages.

    qkv: [T, (Hq + Hq + 2 Hkv) * D] in the order q | gate | k | v, without the gate unless `gated`; the last
        axis dense.
    q_weight, k_weight: [D], what the normed heads are multiplied by: 1 + w, where a checkpoint holds w.
    rotary: cos and sin of `rotary_cos_sin`, fp32 [T, half], dense; dims (i, i + half) of each head turn.
    key_slots, value_slots: [slots, Hkv, D] in the dtype of qkv; row slot_mapping[t] (int64 [T]) takes token
        t's key and value. On a GPU a negative one (padding) touches no page.
    k_out: [T, Hkv, D], dense; takes the keys too, for attention that does not read them from pages.
    Returns q [T, Hq, D], dense.
    """
    args = (qkv, q_weight, k_weight, eps, rotary, key_slots, value_slots, slot_mapping)
    if qkv.is_cuda:
        from hybridserve.kernels.rotary import triton_qk

        return triton_qk.qk_norm_rope_write(*args, gated=gated, k_out=k_out)
    return cpu.qk_norm_rope_write(*args, gated=gated, k_out=k_out)
