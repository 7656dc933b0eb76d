"""One-shot and two-shot all-reduce over memory that every rank can read, one launch each.

One-shot: every rank reads all of every rank's input. Two-shot: every rank sums its share of the rows, and
reads the other rows' sums from who made them; fewer bytes, one more barrier. Sums are fp32 in the order of
the ranks, so all ranks hold the same bits. Knows nothing of processes or of how memory came to be shared.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.all_reduce.peers import MAX_PROGRAMS, PeerMemory


@triton.jit
def _address(table, index, dtype: tl.constexpr):
    return tl.load(table + index).to(tl.pointer_type(dtype))


@triton.jit
def _barrier(signals, program, which, rank, call, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Tell every rank's program of the same number that this one is here, and wait until all have told."""
    lane = tl.arange(0, LANES)
    # lanes beyond the ranks repeat the last one's: a word may be set to the same number twice
    peer = tl.minimum(lane, WORLD - 1)
    base = tl.load(signals + peer)
    place = (program * 2 + which) * WORLD
    theirs = (base + (place + rank) * 4).to(tl.pointer_type(tl.int32))
    # all threads' reads and writes before this are before the signal
    tl.debug_barrier()
    tl.atomic_xchg(theirs, tl.full([LANES], 0, tl.int32) + call, sem="release", scope="sys")
    own = _address(signals, rank, tl.int32) + place + peer
    behind = 1
    while behind > 0:
        seen = tl.atomic_add(own, tl.zeros([LANES], tl.int32), sem="acquire", scope="sys")
        # differences, so that the count may wrap
        behind = tl.sum((seen - call < 0).to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _next_call(calls, program):
    call = tl.load(calls + program) + 1
    tl.debug_barrier()
    tl.store(calls + program, call)
    return call


@triton.jit(do_not_specialize=["num_rows", "start", "rank"])
def _one_shot_kernel(
    buffers,
    signals,
    calls,
    residual,
    weight,
    total,
    normed,
    num_rows,
    start,
    rank,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SYNC: tl.constexpr,
):
    program = tl.program_id(0)
    if SYNC:
        _barrier(signals, program, 0, rank, _next_call(calls, program), WORLD, LANES)
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    dtype: tl.constexpr = total.dtype.element_ty
    for row in range(program, num_rows, tl.num_programs(0)):
        at = (tl.full([], 0, tl.int64) + row) * D + cols
        acc = tl.zeros([BLOCK_D], tl.float32)
        for peer in tl.static_range(WORLD):
            source = _address(buffers, peer, dtype) + start
            acc += tl.load(source + at, mask, other=0.0, volatile=True).to(tl.float32)
        if HAS_RESIDUAL:
            acc += tl.load(residual + at, mask, other=0.0).to(tl.float32)
        rounded = acc.to(dtype)
        tl.store(total + at, rounded, mask)
        if HAS_NORM:
            # of the rounded sum, as a norm after an unfused sum would see it
            x = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            y = x * scale * tl.load(weight + cols, mask, other=0.0).to(tl.float32)
            tl.store(normed + at, y.to(dtype), mask)


@triton.jit(do_not_specialize=["num_rows", "start", "rank"])
def _two_shot_kernel(
    buffers,
    signals,
    calls,
    residual,
    total,
    num_rows,
    start,
    rank,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SYNC: tl.constexpr,
    GATHER: tl.constexpr,
):
    """GATHER: 0 for the sums alone, 1 for the reading alone, 2 for both."""
    program = tl.program_id(0)
    if SYNC:
        call = _next_call(calls, program)
        _barrier(signals, program, 0, rank, call, WORLD, LANES)
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    dtype: tl.constexpr = total.dtype.element_ty
    mine = _address(buffers, rank, dtype) + start
    step = tl.num_programs(0)
    if GATHER != 1:
        # row i is rank i % WORLD's, of whose rows each program takes some
        for turn in range(program, tl.cdiv(num_rows, WORLD), step):
            row = turn * WORLD + rank
            if row < num_rows:
                at = (tl.full([], 0, tl.int64) + row) * D + cols
                acc = tl.zeros([BLOCK_D], tl.float32)
                for peer in tl.static_range(WORLD):
                    source = _address(buffers, peer, dtype) + start
                    acc += tl.load(source + at, mask, other=0.0, volatile=True).to(tl.float32)
                if HAS_RESIDUAL:
                    acc += tl.load(residual + at, mask, other=0.0).to(tl.float32)
                # in place: nobody else reads this rank's copy of a row that is its own
                tl.store(mine + at, acc.to(dtype), mask)
    if GATHER != 0:
        if SYNC:
            _barrier(signals, program, 1, rank, call, WORLD, LANES)
        for turn in range(program, tl.cdiv(num_rows, WORLD), step):
            for peer in tl.static_range(WORLD):
                row = turn * WORLD + peer
                if row < num_rows:
                    at = (tl.full([], 0, tl.int64) + row) * D + cols
                    source = _address(buffers, peer, dtype) + start
                    tl.store(total + at, tl.load(source + at, mask, other=0.0, volatile=True), mask)


def one_shot_all_reduce(
    memory: PeerMemory,
    shape: tuple[int, int],
    dtype: torch.dtype,
    half: int,
    *,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    sync: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum the [T, D] that every rank has put into its buffer's `half`; all ranks must call it.

    half: 0 or 1, in turn from call to call and the same on all ranks; a captured graph holds an even number
        of calls.
    residual: [T, D], the same on all ranks, is added. weight: [D], plain; with it the sum's RMSNorm over D
        comes back too, computed from the rounded sum. sync: False where nobody is to be waited for.
    Returns (sum [T, D] in `dtype`, normed [T, D] or None): the same bits on all ranks. Can be captured.

    Raises:
        ValueError: the message does not fit the half of a buffer.
    """
    rows, dim = _checked(memory, shape)
    device = memory.buffers.device
    total = torch.empty(shape, dtype=dtype, device=device)
    normed = torch.empty_like(total) if weight is not None else None
    _one_shot_kernel[(min(rows, MAX_PROGRAMS),)](
        memory.buffers,
        memory.signals,
        memory.calls,
        total if residual is None else residual,
        total if weight is None else weight,
        total,
        total if normed is None else normed,
        rows,
        half * memory.half_elements,
        memory.rank,
        eps,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        WORLD=memory.world_size,
        LANES=triton.next_power_of_2(memory.world_size),
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        SYNC=sync,
        num_warps=4 if dim <= 4096 else 8,
    )
    return total, normed


def two_shot_all_reduce(
    memory: PeerMemory,
    shape: tuple[int, int],
    dtype: torch.dtype,
    half: int,
    *,
    residual: torch.Tensor | None = None,
    sync: bool = True,
    phase: int = 2,
) -> torch.Tensor:
    """As `one_shot_all_reduce` without the norm, for messages whose bytes count.

    phase: 0 and 1 do the sums and the reading apart, for ranks that run one after another without `sync`.
    """
    rows, dim = _checked(memory, shape)
    total = torch.empty(shape, dtype=dtype, device=memory.buffers.device)
    turns = triton.cdiv(rows, memory.world_size)
    _two_shot_kernel[(min(turns, MAX_PROGRAMS),)](
        memory.buffers,
        memory.signals,
        memory.calls,
        total if residual is None else residual,
        total,
        rows,
        half * memory.half_elements,
        memory.rank,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        WORLD=memory.world_size,
        LANES=triton.next_power_of_2(memory.world_size),
        HAS_RESIDUAL=residual is not None,
        SYNC=sync,
        GATHER=phase,
        num_warps=4 if dim <= 4096 else 8,
    )
    return total


def _checked(memory: PeerMemory, shape: tuple[int, int]) -> tuple[int, int]:
    rows, dim = shape
    if rows < 1 or dim < 1 or rows * dim > memory.half_elements:
        raise ValueError(
            f"a message of {rows} x {dim} elements does not fit the {memory.half_elements} of a buffer's half"
        )
    return rows, dim
