"""Whether a collective's result is right, before anything is timed."""

import hashlib

import torch

from hybridserve.parallel.comm_benchmark.implementations import Implementation, Run
from hybridserve.parallel.group import TensorParallelGroup


def drawn(numel: int, rank: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Rank `rank`'s input, uniform in [-1, 1): every rank can draw every other's."""
    generator = torch.Generator(device).manual_seed(seed * 4096 + rank)
    return (
        torch.empty(numel, dtype=torch.float32, device=device).uniform_(-1, 1, generator=generator).to(dtype)
    )


def check_result(
    implementation: Implementation, group: TensorParallelGroup, x: torch.Tensor, run: Run, seed: int
) -> float:
    """Run once on drawn inputs and compare; returns the largest absolute error against the fp32 sum.

    A sum may err by n times the dtype's unit roundoff of the sum of magnitudes; a gathered result must be
    exact, and an all-reduce's must have the same bits on all ranks, or their tokens would part.

    Raises:
        ArithmeticError: it does not hold; names the implementation, the size and the numbers.
    """
    x.copy_(drawn(x.numel(), group.rank, x.dtype, x.device, seed))
    result = run().clone()
    what = f"{implementation.collective} by {implementation.name} of {x.numel()} {x.dtype} a rank"
    every = (drawn(x.numel(), rank, x.dtype, x.device, seed) for rank in range(group.size))
    if implementation.collective == "all_gather":
        if not torch.equal(result, torch.cat(list(every))):
            raise ArithmeticError(f"{what}: rank {group.rank} did not get what the ranks hold")
        return 0.0
    total = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
    magnitude = torch.zeros_like(total)
    for part in every:
        total += part.float()
        magnitude += part.float().abs()
    if implementation.collective == "reduce_scatter":
        own = slice(group.rank * result.numel(), (group.rank + 1) * result.numel())
        total, magnitude = total[own], magnitude[own]
    error = (result.float() - total).abs()
    # a NaN must not compare as small
    if not bool((error <= magnitude * group.size * torch.finfo(x.dtype).eps).all()):
        raise ArithmeticError(
            f"{what}: rank {group.rank} errs by {float(error.max()):.3g} against the fp32 sum"
        )
    if implementation.collective == "all_reduce":
        _same_bits(what, group, result)
    return float(error.max())


def _same_bits(what: str, group: TensorParallelGroup, result: torch.Tensor) -> None:
    content = result.contiguous().view(torch.uint8).cpu().numpy()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
    own = torch.tensor([digest], dtype=torch.int64, device=result.device)
    digests = group.all_gather(own, 0).tolist()
    if len(set(digests)) > 1:
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise ArithmeticError(f"{what}: ranks {different} have other bits than rank 0")
