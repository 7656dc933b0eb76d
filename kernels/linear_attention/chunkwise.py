"""The chunkwise form of linear attention: matrix products inside chunks, one serial pass over chunks.

Inside a chunk the delta rule's updates are u = T (beta v - beta exp(G) k S^T), with G the running sum of the
log decay and T = (I + A)^-1, A the strictly lower triangle of beta_i (k_i . k_j) exp(G_i - G_j) (the WY form;
Yang et al. 2024, arXiv 2406.06484 and 2412.06464). Only exponentials of non-positive numbers are ever taken.
Knows nothing of where states are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

# chunks worked on together: enough for batched products, few enough that their matrices stay in the cache
GROUP_CHUNKS = 8


@dataclass(frozen=True)
class ChunkLayout:
    """Where tokens lie when every sequence is padded to whole chunks.

    Sequences that have tokens are ranked by their number of chunks, most first; chunk i of all sequences that
    have one lie together, by rank. So step i of the serial pass is one slice, over a prefix of the sequences.
    """

    chunk_size: int
    order: torch.Tensor
    """int64 [S']: index of the sequence of each rank; sequences without tokens are absent."""
    offsets: tuple[int, ...]
    """First chunk row of each step of the serial pass, and the number of chunks last."""
    tokens: torch.Tensor | None
    """int64 [T]: tokens in the order in which they lie; None for the order they came in."""
    slots: torch.Tensor
    """int64 [T]: where each of `tokens` lies, rising: chunk slot // chunk_size, place slot % chunk_size."""

    @classmethod
    def build(cls, query_lens: tuple[int, ...], chunk_size: int, device: torch.device) -> "ChunkLayout":
        counts = [-(-n // chunk_size) for n in query_lens]
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: -counts[i])
        offsets = [0]
        for step in range(counts[order[0]]):
            offsets.append(offsets[-1] + sum(counts[i] > step for i in order))
        ranks = torch.tensor(order, device=device)
        if len(order) == 1:
            slots = torch.arange(sum(query_lens), device=device)
            return cls(chunk_size, ranks, tuple(offsets), None, slots)
        first_rows = torch.tensor(offsets[:-1])
        parts: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * len(query_lens)
        for rank, i in enumerate(order):
            token = torch.arange(query_lens[i])
            parts[i] = (first_rows[token // chunk_size] + rank) * chunk_size + token % chunk_size
        slots, tokens = torch.cat(parts).to(device).sort()
        return cls(chunk_size, ranks, tuple(offsets), tokens, slots)

    def groups(self) -> Iterator["ChunkGroup"]:
        """The steps of the serial pass, some at a time, with the tokens that lie in them."""
        first = 0
        while first < len(self.offsets) - 1:
            last = first + 1
            while (
                last < len(self.offsets) - 1 and self.offsets[last + 1] - self.offsets[first] <= GROUP_CHUNKS
            ):
                last += 1
            offsets = self.offsets[first : last + 1]
            edges = torch.tensor((offsets[0], offsets[-1]), device=self.slots.device) * self.chunk_size
            start, end = torch.searchsorted(self.slots, edges).tolist()
            tokens = None if self.tokens is None else self.tokens[start:end]
            slots = self.slots[start:end] - offsets[0] * self.chunk_size
            yield ChunkGroup(
                self.chunk_size, tuple(n - offsets[0] for n in offsets), start, end, tokens, slots
            )
            first = last


@dataclass(frozen=True)
class ChunkGroup:
    """Some steps of a `ChunkLayout`, with rows and slots counted from the first of them."""

    chunk_size: int
    offsets: tuple[int, ...]
    start: int
    end: int
    tokens: torch.Tensor | None
    slots: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The group's tokens of x [T, ...], in the order in which they lie."""
        return x[self.start : self.end] if self.tokens is None else x.index_select(0, self.tokens)

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write x [chunks, chunk_size, H, V], padding and all, to the group's tokens of out [T, H, V]."""
        if self.tokens is not None:
            out.index_copy_(0, self.tokens, x.flatten(0, 1).index_select(0, self.slots).to(out.dtype))
            return
        part = out[self.start : self.end]
        whole = part.shape[0] // self.chunk_size
        head = part[: whole * self.chunk_size].view(whole, *x.shape[1:])
        head.copy_(x[:whole])
        if whole < x.shape[0]:
            part[whole * self.chunk_size :] = x[whole, : part.shape[0] - whole * self.chunk_size]

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, H, ...] as taken -> [chunks, H, chunk_size, ...], zero where there is no token."""
        padded_size = self.offsets[-1] * self.chunk_size
        if x.shape[0] < padded_size:
            padded = torch.zeros(padded_size, *x.shape[1:], device=x.device)
            x = padded.index_copy_(0, self.slots, x)
        return x.view(-1, self.chunk_size, *x.shape[1:]).transpose(1, 2).contiguous()


@dataclass
class _Chunks:
    """What the serial pass and the outputs need of all chunks. Hx is Hk where decay is per head, else Hv."""

    q: torch.Tensor
    """[chunks, Hx, C, K]: q, with a per-channel decay since the chunk's start folded in."""
    k: torch.Tensor
    """[chunks, Hx, C, K]: k, with a per-channel decay to the chunk's end folded in."""
    scores: torch.Tensor
    """[chunks, Hv, C, C]: lower triangle of (q_i . k_j) with the decay between them."""
    u: torch.Tensor
    """[chunks, Hv, V, C]: the updates a zero state at the chunk's start would get."""
    w: torch.Tensor | None
    """[chunks, Hv, C, K]: what is subtracted from u is S w^T; None without delta rule."""
    decay_in: torch.Tensor | None
    """[chunks, Hv, C]: decay from the chunk's start to each token, where not folded into q."""
    decay_out: torch.Tensor | None
    """[chunks, Hv, C]: decay from each token to the chunk's end, where not folded into k."""
    decay_chunk: torch.Tensor | None
    """[chunks, Hv, 1, 1 or K]: decay over the whole chunk."""


def chunkwise_scan(
    group: ChunkGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    """The tokens of one group, from the states fp32 [S', Hv, V, K] (by rank), which are carried on in place.

    q, k, v, g, beta: fp32, the group's tokens, otherwise as in `linear_attention_prefill`; q and k normalised
    and scaled. Returns fp32 [chunks, chunk_size, Hv, V], padding and all.
    """
    q, k, v = group.to_chunks(q), group.to_chunks(k), group.to_chunks(v)
    beta = None if beta is None else group.to_chunks(beta)
    if g is None:
        chunks = _no_decay(q, k, v, beta)
    elif g.ndim == 2:
        chunks = _head_decay(q, k, v, group.to_chunks(g), beta)
    else:
        chunks = _channel_decay(q, k, v, group.to_chunks(g), beta)
    before = _serial_pass(group.offsets, chunks, state)
    return _outputs(chunks, before)


def _no_decay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None) -> _Chunks:
    group = v.shape[1] // k.shape[1]
    scores = (q @ k.transpose(-1, -2)).tril_().repeat_interleave(group, 1)
    if beta is None:
        u, w = v.transpose(-1, -2).contiguous(), None
    else:
        kk = (k @ k.transpose(-1, -2)).repeat_interleave(group, 1)
        inverse = unit_lower_inverse(kk * beta.unsqueeze(-1)) * beta.unsqueeze(-2)
        u, w = v.transpose(-1, -2) @ inverse.transpose(-1, -2), _stacked(inverse, k)
    return _Chunks(q, k, scores, u, w, None, None, None)


def _head_decay(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
) -> _Chunks:
    """Decay per head: products of q and k are made once per key head and shared by its value heads."""
    num_chunks, num_k_heads, size, _ = k.shape
    # sums in fp64: the difference of two large fp32 sums would lose the small decays between them
    total = g.double().cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp_(max=0).float().exp_()
    between = between.view(num_chunks, num_k_heads, -1, size, size)
    scores = ((q @ k.transpose(-1, -2)).tril_().unsqueeze(2) * between).flatten(1, 2)
    decay_in = total.float().exp_()
    decay_out = (total[..., -1:] - total).float().exp_()
    if beta is None:
        u, w = v.transpose(-1, -2).contiguous(), None
    else:
        kk = (k @ k.transpose(-1, -2)).unsqueeze(2)
        a = between.mul_(kk).flatten(1, 2).mul_(beta.unsqueeze(-1))
        inverse = unit_lower_inverse(a).mul_(beta.unsqueeze(-2))
        u = v.transpose(-1, -2) @ inverse.transpose(-1, -2)
        w = _stacked(inverse.mul_(decay_in.unsqueeze(-2)), k)
    return _Chunks(q, k, scores, u, w, decay_in, decay_out, decay_in[..., -1:, None])


def _channel_decay(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
) -> _Chunks:
    """Decay per key channel: nothing is shared between value heads."""
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    total = g.double().cumsum(-2)
    scores, kk = _decayed_products(q, k, total)
    decay_in = total.float().exp_()
    decay_out = (total[..., -1:, :] - total).float().exp_()
    if beta is None:
        u, w = v.transpose(-1, -2).contiguous(), None
    else:
        inverse = unit_lower_inverse(kk * beta.unsqueeze(-1)) * beta.unsqueeze(-2)
        u, w = v.transpose(-1, -2) @ inverse.transpose(-1, -2), inverse @ (k * decay_in)
    return _Chunks(q * decay_in, k * decay_out, scores, u, w, None, None, decay_in[..., -1:, :])


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower triangle of sum_c q_ic k_jc exp(G_ic - G_jc), and strictly lower one of the same with k for q.

    By halving: tokens i of a block's second half and j of its first are both measured from the last token of
    the first half, so that each factor's exponent is <= 0 and no [C, C, K] tensor is built.
    """
    size, key_dim = k.shape[-2:]
    scores = torch.diag_embed((q * k).sum(-1))
    kk = torch.zeros_like(scores)
    half = size // 2
    while half:
        split = (*k.shape[:-2], size // (2 * half), 2, half, key_dim)
        sums, qs, ks = total.view(split), q.view(split), k.view(split)
        middle = sums[..., 0, -1:, :]
        late = (sums[..., 1, :, :] - middle).float().exp_()
        early = (ks[..., 0, :, :] * (middle - sums[..., 0, :, :]).float().exp_()).transpose(-1, -2)
        for product, rows in ((scores, qs), (kk, ks)):
            blocks = product.unflatten(-1, (-1, 2 * half)).unflatten(-3, (-1, 2 * half))
            diagonal = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            diagonal[..., half:, :half] = (rows[..., 1, :, :] * late) @ early
        half //= 2
    return scores, kk


def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 for a [..., C, C] of which only the strictly lower triangle is read.

    By substitution: products of powers of a would cancel badly where keys are alike. Tried against blocks of
    8 merged in pairs by products, which took twice as long.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    # the transposed problem is the one LAPACK's column order takes and gives without a copy
    return torch.linalg.solve_triangular(a.mT, eye, upper=True, unitriangular=True).mT


def _stacked(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [chunks, Hv, R, C] @ right [chunks, Hx, C, K] of its key head -> [chunks, Hv, R, K]."""
    chunks, num_v_heads, rows, _ = left.shape
    stacked = left.reshape(chunks, right.shape[1], -1, left.shape[-1])
    return (stacked @ right).view(chunks, num_v_heads, rows, right.shape[-1])


def _serial_pass(offsets: tuple[int, ...], chunks: _Chunks, state: torch.Tensor) -> torch.Tensor:
    """Carry `state` [S', Hv, V, K] through the chunks, in place, turning `chunks.u` into the true updates.

    Returns the states before each chunk, [chunks, Hv, V, K].
    """
    before = torch.empty(offsets[-1], *state.shape[1:], device=state.device)
    for start, end in pairwise(offsets):
        active = state[: end - start]
        before[start:end] = active
        u = chunks.u[start:end]
        if chunks.w is not None:
            u.flatten(0, 1).baddbmm_(active.flatten(0, 1), chunks.w[start:end].flatten(0, 1).mT, alpha=-1)
        if chunks.decay_chunk is not None:
            active *= chunks.decay_chunk[start:end]
        if chunks.decay_out is not None:
            u = u * chunks.decay_out[start:end].unsqueeze(-2)
        k = chunks.k[start:end].flatten(0, 1)
        active.view(k.shape[0], -1, k.shape[2]).baddbmm_(u.view(k.shape[0], -1, k.shape[1]), k)
    return before


def _outputs(chunks: _Chunks, before: torch.Tensor) -> torch.Tensor:
    """[chunks, C, Hv, V]: what the state at the chunk's start gives each token, and what its chunk does."""
    num_chunks, num_v_heads, v_dim, _ = before.shape
    num_x_heads, size = chunks.q.shape[1:3]
    stacked = before.view(num_chunks, num_x_heads, -1, before.shape[-1])
    old = (chunks.q @ stacked.mT).view(num_chunks, num_x_heads, size, -1, v_dim).transpose(2, 3)
    out = torch.empty(num_chunks, num_v_heads, size, v_dim, device=before.device)
    grouped = out.view(old.shape)
    if chunks.decay_in is None:
        grouped.copy_(old)
    else:
        torch.mul(old, chunks.decay_in.view(*old.shape[:-1], 1), out=grouped)
    out.flatten(0, 1).baddbmm_(chunks.scores.flatten(0, 1), chunks.u.flatten(0, 1).mT)
    return out.transpose(1, 2)
