"""Rotary position embedding on the CPU (Su et al. 2021), dims paired with their half-way partners."""

import torch

from hybridserve.kernels.attention.cpu import write_kv
from hybridserve.kernels.rms_norm.cpu import rms_norm


def rotary_cos_sin(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int64 [T] -> (cos, sin), fp32 [T, rotary_dim // 2].

    The angles are fp32 products of position and fp32 frequency, as checkpoints were trained with; at large
    positions exact angles would differ from those.
    """
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x [T, H, D], in fp32; the others pass. In the dtype of x."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return torch.cat((turned[0].to(x.dtype), turned[1].to(x.dtype), x[..., 2 * half :]), -1)


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
    """As the folder's `qk_norm_rope_write`, step by step; every slot is a real one."""
    kv_heads, dim = key_slots.shape[1:]
    heads = qkv.unflatten(1, (-1, dim))
    queries = (heads.shape[1] - 2 * kv_heads) // (2 if gated else 1)
    q, k, v = heads[:, :queries], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    q = apply_rotary(rms_norm(q, q_weight, eps, zero_centered=False), *rotary)
    k = apply_rotary(rms_norm(k, k_weight, eps, zero_centered=False), *rotary)
    write_kv(k, v, key_slots, value_slots, slot_mapping)
    if k_out is not None:
        k_out.copy_(k)
    return q
