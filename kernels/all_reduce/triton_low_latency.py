"""All-reduce of the shortest messages: each word is written to the other ranks, with its call's number.

The word and the number are 8 bytes, written at once: whoever sees the number has the word. So there is no
barrier, and a message goes one way between two GPUs, where a signal, an answer and a read go three. Twice the
bytes are sent, to each rank, so it is for messages that cost a latency and nothing else. Sums are fp32 in the
order of the ranks, the bits of `one_shot_all_reduce`. Knows nothing of processes or of how memory came to be
shared.

**Why two halves are enough.** A rank writes call c + 2 over call c. It does so after its kernel of call c + 1
has ended (kernels of a stream follow each other; one launched early waits before it writes), which had every
peer's words of c + 1; and a peer writes those after its own kernel of call c has ended, with all of c read.

**Why no old word passes for a new one.** Numbers in a half differ from one another until they wrap, after
2**31 calls that use it. Long before, all its words are overwritten or cleared, as one in 2**29 of those calls
clears what lies beyond its message.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.all_reduce.peers import MAX_PROGRAMS, PeerMemory
from hybridserve.kernels.all_reduce.triton_peers import ALL, POLLS, READ, WRITE, launch_dependents_and_wait

CLEARING = tl.constexpr((1 << 30) - 1)
"""Calls whose number has none of these bits, or the lowest alone, clear their half."""


@triton.jit
def _bits(values, HALVES: tl.constexpr):
    """A row as words, in the low halves of int64; HALVES: elements are of 2 bytes, two to a word."""
    if HALVES:
        bits = values.to(tl.int16, bitcast=True)
        low, high = tl.split(tl.reshape(bits, [values.shape[0] // 2, 2]))
        words = (low.to(tl.int64) & 0xFFFF) | ((high.to(tl.int64) & 0xFFFF) << 16)
    else:
        words = values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return words


@triton.jit
def _values(words, dtype: tl.constexpr, HALVES: tl.constexpr):
    """What `_bits` made words of, in fp32."""
    if HALVES:
        low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        values = tl.interleave(low, high)
    else:
        values = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return values


@triton.jit(do_not_specialize=["num_rows", "rank", "given_up"])
def _low_latency_kernel(
    x,
    slots,
    calls,
    given_up,
    residual,
    weight,
    total,
    normed,
    num_rows,
    max_words,
    rank,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    WRITES: tl.constexpr,
    READS: tl.constexpr,
):
    WORDS: tl.constexpr = (D + 1) // 2 if HALVES else D
    BLOCK: tl.constexpr = BLOCK_D // 2 if HALVES else BLOCK_D
    program = tl.program_id(0)
    step = tl.num_programs(0)
    dtype: tl.constexpr = total.dtype.element_ty
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    words = tl.arange(0, BLOCK)[None, :]
    peers = tl.arange(0, LANES)[:, None]
    others = (peers < WORLD) & (peers != rank) & (words < WORDS)
    # none of this changes, so it is read before anything is waited for
    bases = tl.load(slots + tl.minimum(peers, WORLD - 1)).to(tl.pointer_type(tl.int64))
    mine = tl.load(slots + rank).to(tl.pointer_type(tl.int64))
    stop = given_up.to(tl.pointer_type(tl.int32))
    if HAS_NORM and READS:
        scales = tl.load(weight + cols, mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        launch_dependents_and_wait()
    call = tl.load(calls)
    if WRITES:
        call += 1
    half = (call & 1).to(tl.int64) * WORLD * max_words
    # never 0, and no other call's: those of a half are all even or all odd
    number = (call | 1).to(tl.int64)
    if WRITES:
        theirs = tl.multiple_of(bases + (half + rank * max_words.to(tl.int64)), [16, 16])
        for row in range(program, num_rows, step):
            at = (tl.full([], 0, tl.int64) + row) * D + cols
            sent = _bits(tl.load(x + at, mask, other=0.0), HALVES) | (number << 32)
            to = theirs + ((tl.full([], 0, tl.int64) + row) * WORDS + words)
            tl.store(to, tl.broadcast_to(sent[None, :], [LANES, BLOCK]), others)
        # every program has read the number once all have told; the last one sets the next call's. Here, while
        # the words are on their way
        tl.debug_barrier()
        if tl.atomic_add(calls + 1, 1, sem="acq_rel", scope="gpu") == step - 1:
            tl.store(calls + 1, 0)
            tl.store(calls, call)
    if READS:
        own = tl.multiple_of(mine + (half + peers * max_words.to(tl.int64)), [16, 16])
        for row in range(program, num_rows, step):
            at = (tl.full([], 0, tl.int64) + row) * D + cols
            part = _bits(tl.load(x + at, mask, other=0.0), HALVES)
            if HAS_RESIDUAL:
                added = tl.load(residual + at, mask, other=0.0).to(tl.float32)
            source = own + ((tl.full([], 0, tl.int64) + row) * WORDS + words)
            got = tl.load(source, others, other=0, volatile=True)
            behind = tl.sum((others & ((got >> 32) != number)).to(tl.int32))
            while behind > 0:
                polls = 0
                while (behind > 0) & (polls < POLLS):
                    got = tl.load(source, others, other=0, volatile=True)
                    behind = tl.sum((others & ((got >> 32) != number)).to(tl.int32))
                    polls += 1
                if behind > 0:
                    # an atomic operation, of which all threads know the same
                    behind = tl.where(tl.atomic_add(stop, 0, sem="relaxed", scope="sys") != 0, 0, behind)
            got = tl.where(peers == rank, part[None, :], got)
            acc = tl.zeros([BLOCK_D], tl.float32)
            for peer in tl.static_range(WORLD):
                # of one rank, the others being 0
                acc += _values(tl.sum(tl.where(peers == peer, got, 0), 0), dtype, HALVES)
            if HAS_RESIDUAL:
                acc += added
            rounded = acc.to(dtype)
            tl.store(total + at, rounded, mask)
            if HAS_NORM:
                # of the rounded sum, as a norm after an unfused sum would see it
                y = rounded.to(tl.float32)
                scale = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
                tl.store(normed + at, (y * scale * scales).to(dtype), mask)
        if (call & CLEARING) < 2:
            # nobody writes there before the call after the next
            used = num_rows * WORDS
            for first in range(used + program * BLOCK, max_words, step * BLOCK):
                beyond = (peers < WORLD) & (first + words < max_words)
                tl.store(own + (first + words), tl.zeros([LANES, BLOCK], tl.int64), beyond)


def low_latency_all_reduce(
    memory: PeerMemory,
    x: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    dependent: bool = False,
    phases: int = ALL,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `one_shot_all_reduce`, for messages that the slots take, in float32, float16 or bfloat16.

    Raises:
        ValueError: the message does not fit the slots.
    """
    rows, dim = x.shape
    slots, size = memory.slots, x.element_size()
    if not slots.takes(rows, dim, size):
        raise ValueError(
            f"a message of {rows} x {dim} elements of {size} bytes does not fit {slots.max_words} words of 4"
        )
    assert x.is_contiguous(), x.stride()
    total = torch.empty_like(x)
    normed = torch.empty_like(x) if weight is not None else None
    # a thread holds an element at least: copies of one in several threads may see different words
    block = max(256, triton.next_power_of_2(dim))
    words = block * size // 4
    _low_latency_kernel[(min(rows, MAX_PROGRAMS),)](
        x,
        slots.slots,
        slots.calls,
        memory.given_up,
        total if residual is None else residual,
        total if weight is None else weight,
        total,
        total if normed is None else normed,
        rows,
        slots.max_words,
        memory.rank,
        eps,
        D=dim,
        BLOCK_D=block,
        WORLD=memory.world_size,
        # of a single lane Triton 3.6 cannot tell the alignment
        LANES=max(2, triton.next_power_of_2(memory.world_size)),
        HALVES=size == 2,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        DEPENDENT=dependent,
        WRITES=bool(phases & WRITE),
        READS=bool(phases & READ),
        # 8 words a thread from a peer, and from several 4
        num_warps=min(16, max(4, words // (256 if memory.world_size == 2 else 128))),
        **({"launch_pdl": True} if dependent else {}),
    )
    return total, normed
