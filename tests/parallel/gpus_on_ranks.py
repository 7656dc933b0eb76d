"""What every rank does for `test_gpus.py`, on a GPU of its own."""

import threading
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridserve.parallel.comm_benchmark.timing import capture
from hybridserve.parallel.group import TensorParallelGroup, connect
from hybridserve.parallel.layers.sums import BegunSum, begin_sum

SHAPES = (
    *((1, 4096), (3, 5120), (64, 2048), (100, 4096), (7, 1001), (300, 4096), (32, 4096)),
    # a number a head and token, filled up to whole rows
    *((513, 32), (4099, 32)),
)
"""Between 2 ranks, in bf16, (100, 4096) and (300, 4096) are read from the other; the rest is written."""

LONG_ROWS, WIDTH = 2048, 4096
"""Of the longest message whose sum is begun and ended, in fp32."""


class Norm(NamedTuple):
    weight: torch.Tensor
    eps: float = 1e-6

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


def on_gpu(group: TensorParallelGroup, store: str) -> TensorParallelGroup:
    """The same ranks, connected by NCCL; `store`: a file that no other group has met on."""
    torch.cuda.set_device(group.rank)
    met = dist.FileStore(store, group.size)
    return connect(
        group.rank, group.size, met, backend="nccl", timeout_s=30, overlapped_bytes=LONG_ROWS * WIDTH * 4
    )


def drawn(shape: tuple[int, int], rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(turn * 64 + rank)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def sums(group: TensorParallelGroup, store: str, dtype: str) -> list[torch.Tensor]:
    """Every sum by reading peers, in order, on the CPU; each is held to the truth. Ranks are late in turn."""
    from hybridserve.kernels.all_reduce.triton_peers import two_shot_all_reduce

    gpus = on_gpu(group, store)
    assert gpus.peers is not None, gpus.why_no_peers
    kind = getattr(torch, dtype)
    found = []
    for turn in range(60):
        shape = SHAPES[turn % len(SHAPES)]
        parts = [drawn(shape, rank, turn, kind) for rank in range(group.size)]
        norm = Norm(torch.rand(shape[1], device="cuda") + 0.5)
        residual = drawn(shape, group.size, turn, kind)
        if (turn + group.rank) % 3 == 0:
            torch.cuda._sleep(1_000_000)
        if turn % 5 == 4:
            # with two ranks no message is so long that this is chosen
            total = two_shot_all_reduce(gpus.peers.memory, parts[group.rank], residual=residual)
            truth = sum(part.double() for part in parts) + residual.double()
        elif turn % 2:
            total, normed = gpus.peers.sum_and_norm(parts[group.rank], residual, norm)
            truth = sum(part.double() for part in parts) + residual.double()
            assert (normed.float() - norm(total).float()).abs().max() < (1e-5 if dtype == "float32" else 0.05)
        else:
            total = gpus.all_reduce(parts[group.rank])
            truth = sum(part.double() for part in parts)
        bound = torch.finfo(kind).eps * sum(part.double().abs() for part in [*parts, residual])
        assert ((total.double() - truth).abs() <= bound).all(), (turn, shape)
        found.append(total.float().cpu())
    return found


def graphs(group: TensorParallelGroup, store: str) -> torch.Tensor:
    """Sums in a graph, written to peers, read, by NCCL, and written again; replayed often, with eager sums
    in between."""
    gpus = on_gpu(group, store)
    x = torch.zeros(4, 2048, device="cuda")
    middle = torch.zeros(128, 2048, device="cuda")
    long = torch.zeros(2048, 2048, device="cuda")
    slots = gpus.peers.memory.slots
    assert slots.takes(*x.shape, 4) and not slots.takes(*middle.shape, 4)
    out = {}

    def step() -> None:
        out["first"] = gpus.all_reduce(x)
        # one behind the other, nothing between them
        out["middle"] = gpus.all_reduce(middle)
        out["again"] = gpus.all_reduce(out["middle"])
        out["long"] = gpus.all_reduce(long.clone())
        out["last"] = gpus.all_reduce(out["first"])

    replay = capture(step)
    for turn in range(1, 21):
        x.fill_(turn + group.rank)
        middle.fill_(turn)
        long.fill_(turn)
        replay()
        size, ranks = group.size, sum(range(group.size))
        assert (out["first"] == size * turn + ranks).all()
        assert (out["middle"] == size * turn).all() and (out["again"] == size * size * turn).all()
        assert (out["long"] == size * turn).all()
        assert (out["last"] == size * (size * turn + ranks)).all()
        assert (gpus.all_reduce(x) == size * turn + ranks).all()
        if turn % 3:
            assert (gpus.all_reduce(middle) == size * turn).all()
    # before the group: see `CapturedGraph`
    del replay
    return out["last"].cpu()


def many(group: TensorParallelGroup, store: str) -> list[torch.Tensor]:
    """A thousand replays of a chain of short sums with norms, ranks late in turn. Returns every hundredth's
    result, which all those before it have a part in."""
    gpus = on_gpu(group, store)
    norm = Norm(torch.full((4096,), 0.5, device="cuda"))
    h = drawn((2, 4096), 0, 0, torch.bfloat16)
    part = drawn((2, 4096), group.rank, 1, torch.bfloat16)

    def step() -> None:
        y = part
        for _ in range(5):
            total, y = gpus.peers.sum_and_norm(y, h, norm)
        h.copy_(total / total.float().square().mean().sqrt())

    replay = capture(step)
    found = []
    for turn in range(1000):
        if turn % 50 == group.rank:
            torch.cuda._sleep(1_000_000)
        replay()
        if turn % 100 == 99:
            found.append(h.float().cpu())
    del replay
    return found


def give_up(group: TensorParallelGroup, store: str, rows: int) -> bool:
    """Rank 0 waits for a sum that the others do not make, until it is told to give up."""
    gpus = on_gpu(group, store)
    if group.rank > 0:
        return True
    assert gpus.peers is not None, gpus.why_no_peers
    ended = torch.cuda.Event()
    x = torch.zeros(rows, 4096, device="cuda")
    for _ in range(2):
        gpus.all_reduce(x)
    ended.record()
    ended_early = ended.query()
    timer = threading.Timer(0.5, gpus.abort)
    timer.start()
    ended.synchronize()
    return not ended_early


def begun_sums(group: TensorParallelGroup, store: str, dtype: str) -> list[torch.Tensor]:
    """Sums beside products, two under way at a time, on the CPU; each is held to the truth. Ranks are late in
    turn, and memory is asked for and let go of meanwhile."""
    gpus = on_gpu(group, store)
    kind = getattr(torch, dtype)
    weight = torch.randn(WIDTH, WIDTH, device="cuda").to(kind) / 64
    norm = Norm(torch.rand(WIDTH, generator=torch.Generator("cuda").manual_seed(5), device="cuda") + 0.5)
    rows = [LONG_ROWS, 1, 300, LONG_ROWS - 7]
    under_way: list[tuple[int, BegunSum]] = []
    found = []

    def end() -> None:
        turn, begun = under_way.pop(0)
        total, normed = begun.end(norm)
        shape = (rows[turn % len(rows)], WIDTH)
        parts = [drawn(shape, rank, turn, kind) for rank in range(group.size)]
        residual = drawn(shape, group.size, turn, kind)
        truth = sum(part.double() for part in parts) + residual.double()
        # NCCL rounds the residual's sum before the ranks'
        terms = sum(part.double().abs() for part in [*parts, residual])
        assert ((total.double() - truth).abs() <= 2 * torch.finfo(kind).eps * terms).all(), turn
        assert (normed.float() - norm(total).float()).abs().max() < (1e-5 if dtype == "float32" else 0.05)
        found.append(total[:64].float().cpu())

    for turn in range(40):
        if len(under_way) == 2:
            end()
        shape = (rows[turn % len(rows)], WIDTH)
        if (turn + group.rank) % 3 == 0:
            torch.cuda._sleep(2_000_000)
        x, residual = drawn(shape, group.rank, turn, kind), drawn(shape, group.size, turn, kind)
        under_way.append(
            (turn, begin_sum(gpus, lambda own, x=x: x.clone() if own is None else x + own, residual))
        )
        del x, residual
        # what runs meanwhile, in memory that the part must not have been in
        for _ in range(3):
            torch.randn(LONG_ROWS, WIDTH, device="cuda").to(kind) @ weight
    while under_way:
        end()
    return found


def give_up_begun(group: TensorParallelGroup, store: str) -> bool:
    """Rank 0 ends a sum that the others do not make, until it is told to give up."""
    gpus = on_gpu(group, store)
    if group.rank > 0:
        return True
    assert gpus.exchange is not None
    ended = torch.cuda.Event()
    # as many programs wait as there may be
    x = torch.zeros(LONG_ROWS, WIDTH, device="cuda")
    gpus.exchange.begin(x, x).end(Norm(torch.ones(WIDTH, device="cuda")))
    ended.record()
    ended_early = ended.query()
    timer = threading.Timer(0.5, gpus.exchange.abort)
    timer.start()
    ended.synchronize()
    return not ended_early
