"""One-shot and two-shot all-reduce over memory that every rank can read, one launch each.

One-shot: every rank reads all of every rank's input. Two-shot: every rank sums its share of the rows, and
reads the other rows' sums from who made them; fewer bytes, one more barrier. Sums are fp32 in the order of
the ranks, so all ranks hold the same bits. Knows nothing of processes or of how memory came to be shared.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.all_reduce.peers import PeerMemory

WRITE, SUM, READ = 1, 2, 4
"""Phases of a call. On a GPU a call does all at once; without one, virtual ranks do them one after another,
each rank's of one phase before the first of the next, and wait for nobody."""
ALL = WRITE | SUM | READ
POLLS = tl.constexpr(256)
"""Of a barrier before it is asked whether waiting is given up: some 0.2 ms, and nothing for a sum in time."""


@triton.jit
def _address(table, index, dtype: tl.constexpr):
    return tl.load(table + index).to(tl.pointer_type(dtype))


@triton.jit
def _half(buffers, rank, start, dtype: tl.constexpr):
    """Where the call's half of a rank's buffer begins."""
    # an address out of a table is of no known alignment: without the hint every access is of one element
    return tl.multiple_of(_address(buffers, rank, dtype) + start, 16)


@triton.jit
def _barrier(signals, given_up, program, which, rank, call, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Tell every rank's program of the same number that this one is here, and wait until all have told, or
    until waiting is given up."""
    lane = tl.arange(0, LANES)
    peer = tl.minimum(lane, WORLD - 1)
    base = tl.load(signals + peer)
    place = (program * 2 + which) * WORLD
    theirs = (base + (place + rank) * 4).to(tl.pointer_type(tl.int32))
    # all threads' reads and writes before this are before the signal
    tl.debug_barrier()
    number = tl.full([LANES], 0, tl.int32) + call
    # lanes beyond the ranks repeat the last one's: a word may be set to the same number twice
    tl.atomic_xchg(theirs, number, sem="release", scope="sys")
    own = _address(signals, rank, tl.int32) + place + peer
    behind = 1
    while behind > 0:
        polls = 0
        while (behind > 0) & (polls < POLLS):
            seen = tl.atomic_add(own, tl.zeros([LANES], tl.int32), sem="acquire", scope="sys")
            # differences, so that the count may wrap
            behind = tl.sum((seen - call < 0).to(tl.int32), 0)
            polls += 1
        if behind > 0:
            # an atomic operation, of which all threads know the same
            ended = tl.atomic_add(given_up.to(tl.pointer_type(tl.int32)), 0, sem="relaxed", scope="sys")
            behind = tl.where(ended != 0, 0, behind)
    tl.debug_barrier()


@triton.jit
def launch_dependents_and_wait():
    """What comes behind may start once all programs have come here, and so can take none of their places: it
    may fetch its weights while the ranks wait for each other. Returns when the kernel ahead has ended."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def _begin(calls, program, counts: tl.constexpr):
    """The number of this call; a call is counted when it writes."""
    call = tl.load(calls + program)
    if counts:
        call += 1
        tl.debug_barrier()
        tl.store(calls + program, call)
    return call


@triton.jit(do_not_specialize=["num_rows", "rank", "given_up"])
def _one_shot_kernel(
    x,
    buffers,
    signals,
    calls,
    given_up,
    residual,
    weight,
    total,
    normed,
    num_rows,
    half_elements,
    rank,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    WRITES: tl.constexpr,
    READS: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    dtype: tl.constexpr = total.dtype.element_ty
    if HAS_NORM and READS:
        # as old as the model: needs no waiting for
        scales = tl.load(weight + cols, mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        launch_dependents_and_wait()
    call = _begin(calls, program, WRITES)
    start = (call & 1).to(tl.int64) * half_elements
    if WRITES:
        mine = _half(buffers, rank, start, dtype)
        for row in range(program, num_rows, tl.num_programs(0)):
            at = (tl.full([], 0, tl.int64) + row) * D + cols
            tl.store(mine + at, tl.load(x + at, mask, other=0.0), mask)
    if WRITES and READS:
        _barrier(signals, given_up, program, 0, rank, call, WORLD, LANES)
    if READS:
        for row in range(program, num_rows, tl.num_programs(0)):
            at = (tl.full([], 0, tl.int64) + row) * D + cols
            acc = tl.zeros([BLOCK_D], tl.float32)
            for peer in tl.static_range(WORLD):
                source = _half(buffers, peer, start, dtype)
                acc += tl.load(source + at, mask, other=0.0, volatile=True).to(tl.float32)
            if HAS_RESIDUAL:
                acc += tl.load(residual + at, mask, other=0.0).to(tl.float32)
            rounded = acc.to(dtype)
            tl.store(total + at, rounded, mask)
            if HAS_NORM:
                # of the rounded sum, as a norm after an unfused sum would see it
                y = rounded.to(tl.float32)
                scale = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
                tl.store(normed + at, (y * scale * scales).to(dtype), mask)


@triton.jit(do_not_specialize=["num_rows", "rank", "given_up"])
def _two_shot_kernel(
    x,
    buffers,
    signals,
    calls,
    given_up,
    residual,
    total,
    num_rows,
    half_elements,
    rank,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    WRITES: tl.constexpr,
    SUMS: tl.constexpr,
    READS: tl.constexpr,
):
    """Rows turn * WORLD to turn * WORLD + WORLD - 1 are a turn: row turn * WORLD + r is summed by rank r, and
    the same program of every rank has the turn, so that programs wait for their like alone."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    if DEPENDENT:
        launch_dependents_and_wait()
    call = _begin(calls, program, WRITES)
    start = (call & 1).to(tl.int64) * half_elements
    dtype: tl.constexpr = total.dtype.element_ty
    mine = _half(buffers, rank, start, dtype)
    step = tl.num_programs(0)
    turns = tl.cdiv(num_rows, WORLD)
    if WRITES:
        for turn in range(program, turns, step):
            for peer in tl.static_range(WORLD):
                row = turn * WORLD + peer
                if row < num_rows:
                    at = (tl.full([], 0, tl.int64) + row) * D + cols
                    tl.store(mine + at, tl.load(x + at, mask, other=0.0), mask)
    if WRITES and SUMS:
        _barrier(signals, given_up, program, 0, rank, call, WORLD, LANES)
    if SUMS:
        for turn in range(program, turns, step):
            row = turn * WORLD + rank
            if row < num_rows:
                at = (tl.full([], 0, tl.int64) + row) * D + cols
                acc = tl.zeros([BLOCK_D], tl.float32)
                for peer in tl.static_range(WORLD):
                    source = _half(buffers, peer, start, dtype)
                    acc += tl.load(source + at, mask, other=0.0, volatile=True).to(tl.float32)
                if HAS_RESIDUAL:
                    acc += tl.load(residual + at, mask, other=0.0).to(tl.float32)
                # in place: nobody else reads this rank's copy of a row that is its own
                tl.store(mine + at, acc.to(dtype), mask)
    if SUMS and READS:
        _barrier(signals, given_up, program, 1, rank, call, WORLD, LANES)
    if READS:
        for turn in range(program, turns, step):
            for peer in tl.static_range(WORLD):
                row = turn * WORLD + peer
                if row < num_rows:
                    at = (tl.full([], 0, tl.int64) + row) * D + cols
                    source = _half(buffers, peer, start, dtype)
                    tl.store(total + at, tl.load(source + at, mask, other=0.0, volatile=True), mask)


def one_shot_all_reduce(
    memory: PeerMemory,
    x: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    dependent: bool = False,
    phases: int = ALL,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum the ranks' x; all ranks must make the same calls in the same order.

    x: [T, D], contiguous. residual: [T, D], the same on all ranks, is added. weight: [D], plain; with it the
        sum's RMSNorm over D comes back too, computed from the rounded sum. phases: WRITE and READ.
    dependent: launch before the kernel ahead in the stream has ended (programmatic dependent launch).
    Returns (sum [T, D] in x's dtype, normed [T, D] or None): the same bits on all ranks. Can be captured.

    Raises:
        ValueError: the message does not fit the half of a buffer.
    """
    rows, dim = _checked(memory, x)
    total = torch.empty_like(x)
    normed = torch.empty_like(x) if weight is not None else None
    _one_shot_kernel[(memory.programs,)](
        x,
        memory.buffers,
        memory.signals,
        memory.calls,
        memory.given_up,
        total if residual is None else residual,
        total if weight is None else weight,
        total,
        total if normed is None else normed,
        rows,
        memory.half_bytes // x.element_size(),
        memory.rank,
        eps,
        WRITES=bool(phases & WRITE),
        READS=bool(phases & READ),
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        **_form(memory, dim, dependent),
    )
    return total, normed


def two_shot_all_reduce(
    memory: PeerMemory,
    x: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    dependent: bool = False,
    phases: int = ALL,
) -> torch.Tensor:
    """As `one_shot_all_reduce` without the norm, for messages whose bytes count. phases: all three."""
    rows, dim = _checked(memory, x)
    total = torch.empty_like(x)
    _two_shot_kernel[(memory.programs,)](
        x,
        memory.buffers,
        memory.signals,
        memory.calls,
        memory.given_up,
        total if residual is None else residual,
        total,
        rows,
        memory.half_bytes // x.element_size(),
        memory.rank,
        WRITES=bool(phases & WRITE),
        SUMS=bool(phases & SUM),
        READS=bool(phases & READ),
        HAS_RESIDUAL=residual is not None,
        **_form(memory, dim, dependent),
    )
    return total


def _form(memory: PeerMemory, dim: int, dependent: bool) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {
        "D": dim,
        "BLOCK_D": block,
        "WORLD": memory.world_size,
        "LANES": triton.next_power_of_2(memory.world_size),
        "DEPENDENT": dependent,
        # 8 elements a thread: a row is one access of 16 bytes to each peer
        "num_warps": min(16, max(4, block // 256)),
        **({"launch_pdl": True} if dependent else {}),
    }


def _checked(memory: PeerMemory, x: torch.Tensor) -> tuple[int, int]:
    rows, dim = x.shape
    if rows < 1 or dim < 1 or x.numel() * x.element_size() > memory.half_bytes:
        raise ValueError(
            f"a message of {rows} x {dim} elements, {x.numel() * x.element_size()} bytes, does not fit the "
            f"{memory.half_bytes} of a buffer's half"
        )
    assert x.is_contiguous(), x.stride()
    return rows, dim
