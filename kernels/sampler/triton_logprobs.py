"""Log probabilities of given tokens, their ranks and the likeliest tokens, on the GPU, in one pass.

Each chunk of a row gives its own sum and its own likeliest tokens; one program a row merges them. Knows
nothing of requests.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.sampler.triton_math import LOWEST, key_of, load_columns, value_of

CHUNK = 4096
MAX_TOP = 64
_LOG2E = tl.constexpr(1.4426950408889634)
_IDS = tl.constexpr(0x7FFFFFFF)
_EMPTY = tl.constexpr(-(2**63))


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of given tokens and of the likeliest ones, as the CPU path's function of this name.

    logits: fp32, bf16 or fp16 [R, V], columns contiguous, any row stride. token_ids: int64 [R] in [0, V).
    num_top: how many of the likeliest to return, at most V and MAX_TOP; ValueError beyond.
    Returns logprob fp32 [R]; rank int64 [R] (1: no token is likelier); top_ids int64 [R, num_top] and their
    top_logprobs fp32, likeliest first, equal ones by rising id. Two launches, no synchronisation.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and token_ids.shape == (num_rows,)
    if not 0 <= num_top <= min(vocab, MAX_TOP):
        raise ValueError(f"num_top is {num_top}, must be in [0, {min(vocab, MAX_TOP)}]")
    device, num_chunks = logits.device, triton.cdiv(vocab, chunk)
    sums = torch.empty(num_rows, 2, num_chunks, device=device)
    ranks = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    # an entry orders as its logit does, equal ones by falling id
    best = torch.empty(num_rows, num_chunks, num_top, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, device=device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, num_top, device=device)
    if num_rows:
        given = (logits, logits.stride(0), vocab, token_ids, num_top, sums, ranks, best)
        _chunk_logprobs[(num_rows * num_chunks,)](*given, CHUNK=chunk, num_warps=4)
        _row_logprobs[(num_rows,)](
            *given,
            logprobs,
            rank,
            top_ids,
            top_logprobs,
            CHUNK=chunk,
            CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
            BEST_PADDED=triton.next_power_of_2(num_chunks * MAX_TOP),
            num_warps=8,
        )
    return logprobs, rank, top_ids, top_logprobs


@triton.jit(do_not_specialize=["num_top"])
def _chunk_logprobs(logits, row_stride, vocab, token_ids, num_top, sums, ranks, best, CHUNK: tl.constexpr):
    num_chunks = tl.cdiv(vocab, CHUNK)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    this_row = logits + row * row_stride
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_columns(this_row, cols, vocab)
    chosen = tl.load(this_row + tl.load(token_ids + row)).to(tl.float32)
    tl.store(ranks + row * num_chunks + chunk, tl.sum(((x > chosen) & (cols < vocab)).to(tl.int32)))
    # lowest where every logit is -inf
    peak = tl.maximum(tl.max(x), LOWEST)
    weight = tl.where(cols < vocab, tl.exp2((x - peak) * _LOG2E), 0.0)
    out = sums + row * 2 * num_chunks + chunk
    tl.store(out, peak)
    tl.store(out + num_chunks, tl.sum(weight))
    # -0.0 must rank as 0.0 does
    entry = (key_of(tl.where(x == 0.0, 0.0, x)) << 32) | (cols ^ _IDS).to(tl.int64)
    entry = tl.where(cols < vocab, entry, _EMPTY)
    best += (row * num_chunks + chunk) * num_top
    for i in range(num_top):
        most = tl.max(entry)
        tl.store(best + i, most)
        entry = tl.where(entry == most, _EMPTY, entry)


@triton.jit(do_not_specialize=["num_top"])
def _row_logprobs(
    logits,
    row_stride,
    vocab,
    token_ids,
    num_top,
    sums,
    ranks,
    best,
    logprobs,
    rank,
    top_ids,
    top_logprobs,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BEST_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(vocab, CHUNK)
    chunks = tl.arange(0, CHUNKS_PADDED)
    real = chunks < num_chunks
    here = sums + row * 2 * num_chunks + chunks
    peaks = tl.load(here, mask=real, other=LOWEST)
    mass = tl.load(here + num_chunks, mask=real, other=0.0).to(tl.float64)
    peak = tl.max(peaks)
    total = tl.sum(mass * tl.exp((peaks - peak).to(tl.float64)))
    normalizer = peak.to(tl.float64) + tl.log(total)
    chosen = tl.load(logits + row * row_stride + tl.load(token_ids + row)).to(tl.float64)
    tl.store(logprobs + row, (chosen - normalizer).to(tl.float32))
    likelier = tl.load(ranks + row * num_chunks + chunks, mask=real, other=0)
    tl.store(rank + row, 1 + tl.sum(likelier).to(tl.int64))
    index = tl.arange(0, BEST_PADDED)
    count = num_chunks * num_top
    entry = tl.load(best + row * count + index, mask=index < count, other=_EMPTY)
    for i in range(num_top):
        most = tl.max(entry)
        tl.store(top_ids + row * num_top + i, (most & _IDS) ^ _IDS)
        value = value_of(most >> 32).to(tl.float64)
        tl.store(top_logprobs + row * num_top + i, (value - normalizer).to(tl.float32))
        entry = tl.where(entry == most, _EMPTY, entry)
