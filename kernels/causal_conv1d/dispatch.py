"""The causal convolution where its input lies: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.causal_conv1d import cpu


def causal_conv1d_decode(
    x: torch.Tensor,
    phase_weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token of each of B sequences.

    x: [B, C]. phase_weight: of `make_phase_weight`. bias: [C] or None.
    conv_state: [N, kernel, C] rings; rows `state_indices` (int64 [B], distinct) take x in place.
    positions: int64 [B], position of each token in its sequence.
    Returns silu(conv(x) + bias), [B, C] in the dtype of x.
    """
    if x.is_cuda:
        from hybridserve.kernels.causal_conv1d import triton_decode

        return triton_decode.causal_conv1d_decode(x, phase_weight, bias, conv_state, state_indices, positions)
    return cpu.causal_conv1d_decode(x, phase_weight, bias, conv_state, state_indices, positions)


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
) -> torch.Tensor:
    """S sequences laid end to end, each going on from its ring.

    x: [T, C], T = sum(query_lens). bias: [C] or None.
    weight: [C, kernel], its last column meets the current token.
    conv_state: [N, kernel, C]; rows `state_indices` (int64 [S], distinct) are updated in place and wholly
        defined afterwards; rows may overlap in memory as long as the named ones do not.
    has_initial_state: bool [S]; where False the history is zero and the ring's old bytes are not used.
    query_lens, context_lens: tokens of each sequence now and before. One without tokens keeps its ring.
    Returns silu(conv(x) + bias), [T, C] in the dtype of x.
    """
    args = x, weight, bias, conv_state, state_indices, has_initial_state, query_lens, context_lens
    if x.is_cuda:
        from hybridserve.kernels.causal_conv1d import triton_prefill

        return triton_prefill.causal_conv1d_prefill(*args)
    return cpu.causal_conv1d_prefill(*args)


def causal_conv1d_prefill_split(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    sizes: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`causal_conv1d_prefill` whose result comes as three tensors [T, size] of neighbouring channels.

    sizes: channels of q, k and v, sum C. Dense on a GPU, where the kernel writes them so; else views.
    """
    args = x, weight, bias, conv_state, state_indices, has_initial_state, query_lens, context_lens
    if x.is_cuda:
        from hybridserve.kernels.causal_conv1d import triton_prefill

        return triton_prefill.causal_conv1d_prefill_split(*args, sizes)
    return cpu.causal_conv1d_prefill(*args).split_with_sizes(sizes, -1)
