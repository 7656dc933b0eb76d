"""Mixture of experts: from router logits to weights and expert ids, and the experts themselves."""

from hybridserve.kernels.moe.dispatch import moe_experts, moe_route

__all__ = ["moe_experts", "moe_route"]
