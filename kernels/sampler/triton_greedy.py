"""Greedy sampling on the GPU: the likeliest token and whether the row is finite, in one pass over the logits.

A row is read by one program a chunk, so that one row alone fills a good part of the GPU. Knows nothing of
temperatures or filters.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_math import LOWEST, bounded, load_columns

CHUNK = 4096


def greedy(logits: torch.Tensor, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of each row's largest logit, and whether the row is free of NaN and infinities.

    logits: fp32, bf16 or fp16 [B, V], columns contiguous, any row stride. Returns int64 [B] and bool [B]; the
    id of a row that is not finite is in [0, V) and means nothing else. Two launches, no synchronisation.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab, chunk)
    peaks = torch.empty(num_rows, 2, num_chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        stride = logits.stride(0)
        _chunk_peaks[(num_rows * num_chunks,)](logits, stride, vocab, peaks, CHUNK=chunk, num_warps=4)
        _pick_peak[(num_rows,)](
            logits,
            stride,
            vocab,
            peaks,
            tokens,
            finite,
            chunk,
            triton.next_power_of_2(num_chunks),
            num_warps=4,
        )
    return tokens, finite


@triton.jit
def _first_at(logits_row, vocab, start, value, CHUNK: tl.constexpr):
    """Lowest column in [start, start + CHUNK) that holds the bounded `value`; in [0, vocab) in any case."""
    cols = start + tl.arange(0, CHUNK)
    x = bounded(load_columns(logits_row, cols, vocab))
    return tl.minimum(tl.min(tl.where(x == value, cols, vocab)), vocab - 1)


@triton.jit
def _chunk_peaks(logits, row_stride, vocab, peaks, CHUNK: tl.constexpr):
    num_chunks = tl.cdiv(vocab, CHUNK)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_columns(logits + row * row_stride, cols, vocab)
    # 0 * NaN and 0 * inf are NaN
    nothing = tl.sum(x * 0.0)
    out = peaks + row * 2 * num_chunks + chunk
    tl.store(out, tl.max(bounded(x)))
    tl.store(out + num_chunks, tl.where(nothing == 0.0, 0.0, 1.0))


@triton.jit
def _pick_peak(
    logits, row_stride, vocab, peaks, tokens, finite, CHUNK: tl.constexpr, CHUNKS_PADDED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(vocab, CHUNK)
    chunks = tl.arange(0, CHUNKS_PADDED)
    here = peaks + row * 2 * num_chunks + chunks
    peak = tl.load(here, mask=chunks < num_chunks, other=LOWEST)
    broken = tl.load(here + num_chunks, mask=chunks < num_chunks, other=0.0)
    top = tl.max(peak)
    first = tl.min(tl.where(peak == top, chunks, CHUNKS_PADDED))
    token = _first_at(logits + row * row_stride, vocab, first * CHUNK, top, CHUNK)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, tl.sum(broken) == 0.0)
