"""Causal depthwise convolution on the CPU, in place on rings of inputs.

A ring holds the input of position p in column p % kernel, so that going on never moves a byte. Knows nothing
of requests or of what the channels mean.
"""

import torch
import torch.nn.functional as F

# tokens of one pass over the taps: the block stays in the cache between passes
TOKEN_BLOCK = 64


def make_phase_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight [C, kernel] -> fp32 [kernel (phase), kernel (column), C], for `causal_conv1d_decode`.

    Entry [phase, column] is the tap that meets what lies in the ring's `column` when the current position
    is `phase` modulo kernel.
    """
    kernel = weight.shape[1]
    step = torch.arange(kernel, device=weight.device)
    lag = (step[:, None] - step[None, :]) % kernel
    return weight.T.float()[kernel - 1 - lag].contiguous()


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
    kernel = phase_weight.shape[0]
    if x.shape[0] == 1:
        phase = int(positions) % kernel
        ring = conv_state.select(0, int(state_indices))
        ring[phase] = x[0]
        y = torch.linalg.vecdot(ring.float(), phase_weight[phase], dim=0).unsqueeze(0)
    else:
        phase = positions % kernel
        conv_state[state_indices, phase] = x.to(conv_state.dtype)
        rings = conv_state.index_select(0, state_indices).float()
        y = torch.linalg.vecdot(rings, phase_weight.index_select(0, phase), dim=1)
    return _silu(y, bias).to(x.dtype)


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
    Returns silu(conv(x) + bias), [T, C] in the dtype of x; the bits do not depend on
    where a sequence is cut if C is a multiple of 64.
    """
    assert sum(query_lens) == x.shape[0] and len(query_lens) == len(context_lens) == state_indices.shape[0]
    if x.shape[0] == 0:
        return torch.empty_like(x)
    kernel = weight.shape[1]
    taps = weight.T.float().contiguous()
    lens, context = (torch.tensor(n, device=x.device) for n in (query_lens, context_lens))
    starts = lens.cumsum(0) - lens
    old = torch.where(has_initial_state[:, None, None], conv_state.index_select(0, state_indices), 0.0)

    y = _convolve_blocks(x, taps)
    _fix_first_tokens(y, x, taps, old, starts, lens, context)
    y = _silu(y, bias).to(x.dtype)

    # column c belongs to the last position before the end that is c modulo kernel; where that lies before
    # this chunk the old column is already it
    end = context + lens
    column = torch.arange(kernel, device=x.device)
    from_end = (end[:, None] - 1 - column) % kernel + 1
    token = (starts + lens)[:, None] - from_end
    is_new = (from_end <= lens[:, None]).unsqueeze(-1)
    rings = torch.where(is_new, x[token.clamp(0, x.shape[0] - 1)].to(old.dtype), old)
    used = lens.nonzero().squeeze(1)
    conv_state.index_copy_(0, state_indices[used], rings[used])
    return y


def _silu(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(y + bias) in place on fp32 y."""
    return F.silu(y if bias is None else y.add_(bias.float()), inplace=True)


def _convolve_blocks(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """fp32 [T, C]: the convolution of x as if it were one sequence with nothing before it."""
    kernel = taps.shape[0]
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], TOKEN_BLOCK):
        end = min(start + TOKEN_BLOCK, x.shape[0])
        first = max(0, start - kernel + 1)
        block = x[first:end].float()
        out = torch.mul(block[start - first :], taps[-1], out=y[start:end])
        for lag in range(1, kernel):
            skip = max(0, lag - start)
            if skip < end - start:
                source = block[start + skip - lag - first : end - lag - first]
                out[skip:].addcmul_(source, taps[kernel - 1 - lag])
    return y


def _fix_first_tokens(
    y: torch.Tensor,
    x: torch.Tensor,
    taps: torch.Tensor,
    old: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    context: torch.Tensor,
) -> None:
    """Redo the first kernel - 1 tokens of every sequence in y, which look back before its start.

    old: [S, kernel, C] rings before this chunk. The order of additions is that of `_convolve_blocks`.
    """
    kernel = taps.shape[0]
    near = torch.arange(kernel - 1, device=x.device)
    columns = (context[:, None] - (kernel - 1) + near) % kernel
    history = old.gather(1, columns.unsqueeze(-1).expand(-1, -1, x.shape[1]))
    tokens = starts[:, None] + near
    inputs = torch.cat((history.float(), x[tokens.clamp(max=x.shape[0] - 1)].float()), 1)
    fixed = inputs[:, kernel - 1 :] * taps[-1]
    for lag in range(1, kernel):
        fixed.addcmul_(inputs[:, kernel - 1 - lag : 2 * kernel - 2 - lag], taps[kernel - 1 - lag])
    real = near < lens[:, None]
    y[tokens[real]] = fixed[real]
