"""The causal convolution token by token: the truth for the fast paths. Knows nothing of rings."""

import torch


def causal_conv1d_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, history: torch.Tensor
) -> torch.Tensor:
    """One sequence, in the dtype of x.

    x: [T, C]. weight: [C, kernel], its last column meets the current token. bias: [C] or None.
    history: [kernel - 1, C], the inputs before x, oldest first (zeros at the start of a sequence).
    Returns silu(conv(x) + bias), [T, C].
    """
    kernel = weight.shape[1]
    inputs = torch.cat((history, x))
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        y = (inputs[t : t + kernel] * weight.T).sum(0)
        y = y if bias is None else y + bias
        out[t] = y / (1 + torch.exp(-y))
    return out
