"""Edits of logits before sampling on the GPU: penalties, biases and bans of whole batches, in place.

Rows may mix any of them; a row without edits costs next to nothing. Capturable in a CUDA graph. Knows nothing
of requests.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
# of a token's count: it occurs in the prompt; the bits below count it in the output
_IN_PROMPT = tl.constexpr(1 << 30)
# lowest finite numbers, so that a banned token does not make its row look broken
_BANNED_FP16 = tl.constexpr(-65504.0)
_BANNED_BF16 = tl.constexpr(-3.3895313892515355e38)
_BANNED_FP32 = tl.constexpr(-3.4028234663852886e38)


def penalize_batch(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Apply penalties to logits [B, V] in place, from each row's tokens so far; the CPU path's `penalize`.

    logits: fp32, bf16 or fp16, columns contiguous. token_ids: int32 or int64 [B, L], prompt then output, ids
        in [0, V), columns contiguous; what lies past a row's end is not read. prompt_lens, lens: int [B],
        tokens of the prompt and of both.
    repetition, presence, frequency: fp32 [B]; 1, 0 and 0 change nothing.
    counts: int32 [at least B, V], all zero, and all zero again afterwards; it saves clearing one each time.
    A row costs time by its tokens, not by V; bitwise what fp32 arithmetic in PyTorch gives.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and token_ids.stride(1) == 1 and token_ids.shape[0] == num_rows
    assert all(x.shape == (num_rows,) for x in (prompt_lens, lens, repetition, presence, frequency))
    if counts is None:
        counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=logits.device)
    blocks = triton.cdiv(token_ids.shape[1], _BLOCK)
    if not num_rows * blocks:
        return
    tokens = (token_ids, token_ids.stride(0), blocks, prompt_lens, lens)
    penalties = (repetition, presence, frequency)
    grid = (num_rows * blocks,)
    _count_tokens[grid](*tokens, *penalties, counts, counts.stride(0), BLOCK=_BLOCK)
    # a product and a sum of it must be rounded twice, as in PyTorch
    _apply_penalties[grid](
        logits,
        logits.stride(0),
        *tokens,
        *penalties,
        counts,
        counts.stride(0),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )


def bias_batch(
    logits: torch.Tensor,
    bias_ids: torch.Tensor,
    biases: torch.Tensor,
    banned_ids: torch.Tensor,
) -> None:
    """Add `biases` to the logits of `bias_ids`, then forbid `banned_ids`, in place.

    logits: fp32, bf16 or fp16 [B, V], columns contiguous. bias_ids: int64 [B, N], ids of a row distinct;
        biases: fp32 [B, N]; banned_ids: int64 [B, M]; all contiguous, N and M may be 0, ids outside [0, V)
        are padding. A forbidden logit becomes the lowest finite number, which no draw reaches and which keeps
        the row finite for the sampler's flag.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and bias_ids.shape == biases.shape
    assert all(x.shape[0] == num_rows and x.is_contiguous() for x in (bias_ids, biases, banned_ids))
    num_biases, num_banned = bias_ids.shape[1], banned_ids.shape[1]
    if num_rows and num_biases + num_banned:
        _bias_rows[(num_rows,)](
            logits,
            logits.stride(0),
            vocab,
            bias_ids,
            biases,
            num_biases,
            banned_ids,
            num_banned,
            BLOCK=256,
        )


@triton.jit
def _tokens_of(token_ids, token_stride, blocks, lens, repetition, presence, frequency, BLOCK: tl.constexpr):
    """Row, the positions of this program, their ids, which are real; none in a row without penalties."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    changes = (
        (tl.load(repetition + row) != 1) | (tl.load(presence + row) != 0) | (tl.load(frequency + row) != 0)
    )
    real = at < tl.where(changes, tl.load(lens + row), 0)
    ids = tl.load(token_ids + row * token_stride + at, mask=real, other=0).to(tl.int64)
    return row, at, ids, real


@triton.jit(do_not_specialize=["token_stride", "blocks"])
def _count_tokens(
    token_ids,
    token_stride,
    blocks,
    prompt_lens,
    lens,
    repetition,
    presence,
    frequency,
    counts,
    count_stride,
    BLOCK: tl.constexpr,
):
    row, at, ids, real = _tokens_of(
        token_ids, token_stride, blocks, lens, repetition, presence, frequency, BLOCK
    )
    in_prompt = at < tl.load(prompt_lens + row)
    here = counts + row * count_stride + ids
    tl.atomic_or(here, tl.full([BLOCK], _IN_PROMPT, tl.int32), mask=real & in_prompt, sem="relaxed")
    tl.atomic_add(here, tl.full([BLOCK], 1, tl.int32), mask=real & (in_prompt == 0), sem="relaxed")


@triton.jit(do_not_specialize=["token_stride", "blocks"])
def _apply_penalties(
    logits,
    row_stride,
    token_ids,
    token_stride,
    blocks,
    prompt_lens,
    lens,
    repetition,
    presence,
    frequency,
    counts,
    count_stride,
    BLOCK: tl.constexpr,
):
    row, _, ids, real = _tokens_of(
        token_ids, token_stride, blocks, lens, repetition, presence, frequency, BLOCK
    )
    # of a token that occurs often, only one program takes the count, and leaves zero
    nothing = tl.full([BLOCK], 0, tl.int32)
    count = tl.atomic_xchg(counts + row * count_stride + ids, nothing, mask=real, sem="relaxed")
    taken = real & (count != 0)
    here = logits + row * row_stride + ids
    x = tl.load(here, mask=taken, other=0.0).to(tl.float32)
    factor = tl.full([BLOCK], 1.0, tl.float32) * tl.load(repetition + row)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    in_output = count & (_IN_PROMPT - 1)
    once, each = tl.load(presence + row), tl.load(frequency + row)
    x = tl.where(in_output > 0, x - (each * in_output.to(tl.float32) + once), x)
    tl.store(here, x.to(logits.dtype.element_ty), mask=taken)


@triton.jit(do_not_specialize=["num_biases", "num_banned"])
def _bias_rows(
    logits,
    row_stride,
    vocab,
    bias_ids,
    biases,
    num_biases,
    banned_ids,
    num_banned,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    this_row = logits + row * row_stride
    for start in range(0, num_biases, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids + row * num_biases + at, mask=at < num_biases, other=-1)
        real = (ids >= 0) & (ids < vocab)
        bias = tl.load(biases + row * num_biases + at, mask=real, other=0.0)
        x = tl.load(this_row + ids, mask=real, other=0.0).to(tl.float32)
        tl.store(this_row + ids, (x + bias).to(logits.dtype.element_ty), mask=real)
    # a token may be in both lists
    tl.debug_barrier()
    if logits.dtype.element_ty == tl.float16:
        banned = _BANNED_FP16
    elif logits.dtype.element_ty == tl.bfloat16:
        banned = _BANNED_BF16
    else:
        banned = _BANNED_FP32
    for start in range(0, num_banned, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(banned_ids + row * num_banned + at, mask=at < num_banned, other=-1)
        real = (ids >= 0) & (ids < vocab)
        tl.store(this_row + ids, tl.full([BLOCK], banned, tl.float32).to(logits.dtype.element_ty), mask=real)
