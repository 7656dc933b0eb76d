"""Sampling on the GPU: temperature, top-k, top-p, min-p and the draw, without sorting the vocabulary.

The token drawn has the largest logit / temperature plus Gumbel noise, so that a row without filters takes one
pass over its logits; filtered rows take two, in five launches that a CUDA graph can hold.
Rows are independent, and greedy, unfiltered and filtered ones may be mixed. Knows nothing of requests.
"""

from dataclasses import dataclass

import torch
import triton

from hybridserve.kernels.sampler.triton_locate import PLAN, gather_between, locate
from hybridserve.kernels.sampler.triton_measure import (
    FLOATS,
    PIVOTS,
    PIVOTS_PADDED,
    choose_pivots,
    measure_chunks,
)
from hybridserve.kernels.sampler.triton_resolve import resolve


@dataclass(frozen=True)
class Tuning:
    """Sizes that change speed, and rounding by way of `chunk`, but nothing else. Powers of two."""

    chunk: int = 4096
    """Columns that one program of the first pass reads."""
    gathered: int = 2048
    """Columns that one program of the second pass reads."""
    programs: int = 2048
    """Of the second pass, enough to fill a GPU; with more rows each goes through up to eight chunks."""
    piece: int = 512
    """Columns looked at together where a program of either goes through its own again."""
    sample: int = 8192
    """Logits of a row that its pivots are chosen from."""
    bins: int = 512
    """Of the histogram of that sample."""
    candidates: int = 32768
    """Tokens that may be gathered around a boundary; where it takes more, the row is scanned whole."""
    ranked: int = 512
    """Tokens that are sorted to end the search for a boundary."""
    tile: int = 512
    """Tokens looked at together while it goes on."""


SERVED = Tuning()
"""What an H200 and vocabularies up to 262,144 are served with."""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    tuning: Tuning = SERVED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, and whether the row is free of NaN and infinities.

    logits: fp32, bf16 or fp16 [B, V], columns contiguous, any row stride. temperature, top_p, min_p: floating
        [B]; top_k: integer [B]. Temperature 0 is greedy (the lowest id of the largest logit); top_k <= 0,
        top_p >= 1 and min_p <= 0 are off.
    keys: int64 [B], of `draw_key`.
    Returns int64 [B] in [0, V) and bool [B]; the token of a row that is not finite means nothing. Logits
    beyond 2 ** 126 count as that; forbid a token by the lowest finite number, so that its row stays finite.

    The definition is the CPU path's. Filters compare sums of fp32 weights, so that a token within about 1e-6
    of the row's mass from a boundary may be kept here and dropped there; equal logits are equal here too and
    rank by rising id. Scores are fp32, so that two within about 1e-6 of each other may change places. A row's
    result does not depend on the other rows or their number.
    """
    return _launch(logits, temperature, top_k, top_p, min_p, keys, None, tuning)


def sample_seeded(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tuning: Tuning = SERVED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` with the keys that `draw_key(seed, position)` gives, computed on the device.

    seeds: int64 [B], the seed modulo 2 ** 64 as two's complement. positions: int64 [B].
    """
    return _launch(logits, temperature, top_k, top_p, min_p, seeds, positions, tuning)


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor | None,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:
    """keys: with positions, the seeds."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert all(x.shape == (num_rows,) for x in (temperature, top_k, top_p, min_p, keys))
    assert positions is None or positions.shape == (num_rows,)
    device, hashed = logits.device, positions is not None
    num_chunks, num_parts = triton.cdiv(vocab, tuning.chunk), triton.cdiv(vocab, tuning.gathered)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return tokens, finite
    pivots = torch.empty(num_rows, PIVOTS_PADDED, device=device)
    floats = torch.empty(num_rows, FLOATS, num_chunks, device=device)
    counts = torch.empty(num_rows, PIVOTS, num_chunks, dtype=torch.int32, device=device)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=device)
    above = torch.empty(num_rows, num_parts, dtype=torch.int64, device=device)
    plans = torch.empty(num_rows, PLAN, dtype=torch.float64, device=device)
    gathered = torch.empty(num_rows, dtype=torch.int32, device=device)
    lists = torch.empty(num_rows, tuning.candidates, dtype=torch.int64, device=device)
    scratch = torch.empty(num_rows, tuning.ranked, dtype=torch.int64, device=device)

    rows, chunks = (num_rows,), (num_rows * num_chunks,)
    given = (logits, logits.stride(0), vocab)
    options = (temperature, top_k, top_p, min_p)
    choose_pivots[rows](
        *given,
        *options,
        pivots,
        SAMPLE=tuning.sample,
        BINS=tuning.bins,
        CANDIDATES=tuning.candidates,
        PADDED=PIVOTS_PADDED,
        num_warps=8,
    )
    measure_chunks[chunks](
        *given,
        *options,
        keys,
        positions,
        pivots,
        floats,
        counts,
        best,
        HASHED=hashed,
        CHUNK=tuning.chunk,
        CANDIDATES=tuning.candidates,
        PIVOTS=PIVOTS,
        PADDED=PIVOTS_PADDED,
        TILE=min(tuning.piece, tuning.chunk),
        num_warps=4,
        maxnreg=80,
    )
    locate[rows](
        vocab,
        *options,
        pivots,
        floats,
        counts,
        best,
        plans,
        gathered,
        tokens,
        finite,
        CHUNK=tuning.chunk,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        CANDIDATES=tuning.candidates,
        PIVOTS=PIVOTS,
        PADDED=PIVOTS_PADDED,
        PLAN=PLAN,
        num_warps=4,
    )
    # where there are many rows, programs without anything to do would cost more than longer ones
    share = max(1, min(8, num_rows * num_parts // tuning.programs))
    gather_between[(num_rows * triton.cdiv(num_parts, share),)](
        *given,
        share,
        temperature,
        keys,
        positions,
        plans,
        gathered,
        lists,
        above,
        HASHED=hashed,
        CHUNK=tuning.gathered,
        CANDIDATES=tuning.candidates,
        PLAN=PLAN,
        TILE=min(tuning.piece, tuning.gathered),
        num_warps=4,
        maxnreg=96,
    )
    resolve[rows](
        *given,
        *options,
        keys,
        positions,
        plans,
        gathered,
        lists,
        scratch,
        above,
        tokens,
        HASHED=hashed,
        CHUNK=tuning.gathered,
        CHUNKS_PADDED=triton.next_power_of_2(num_parts),
        CANDIDATES=tuning.candidates,
        RANKED=tuning.ranked,
        PLAN=PLAN,
        TILE=tuning.tile,
        num_warps=8,
    )
    return tokens, finite
