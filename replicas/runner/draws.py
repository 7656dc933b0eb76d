"""What a step drew, on its way from the device to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridserve.replicas.engine.plan import Sampled, SampleSpec, TokenLogprobs


@dataclass(frozen=True)
class DrawnLogprobs:
    """Of the rows that asked for them; see `token_logprobs`."""

    rows: tuple[int, ...]
    """Which of the draws' rows these are."""
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs


@dataclass(frozen=True)
class Draws:
    """One row a sequence that samples, on the device."""

    tokens: torch.Tensor
    """int64 [R]"""
    finite: torch.Tensor
    """bool [R], or numbers that are 0 for a row of NaN or infinities, whose token means nothing."""
    logprobs: DrawnLogprobs | None = None


class FetchedDraws:
    """Draws that are on their way to the host; a GPU is not waited for before `sampled` is called."""

    def __init__(self, draws: Draws, specs: Sequence[SampleSpec]) -> None:
        self._specs = specs
        self._logprob_rows = draws.logprobs.rows if draws.logprobs is not None else ()
        wanted = (draws.tokens, draws.finite, *(draws.logprobs.tensors() if draws.logprobs else ()))
        self._host = [t.to("cpu", non_blocking=True) for t in wanted]
        self._arrived = None
        if draws.tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def sampled(self) -> list[Sampled]:
        """Wait for the draws; one entry a row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, finite, *logprobs = (t.tolist() for t in self._host)
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        for row, logprob, rank, ids, tops in (
            zip(self._logprob_rows, *logprobs, strict=True) if logprobs else ()
        ):
            keep = self._specs[row].params.logprobs
            found[row] = TokenLogprobs(logprob, rank, tuple(ids[:keep]), tuple(tops[:keep]))
        return [Sampled(t, bool(f), lp) for t, f, lp in zip(tokens, finite, found, strict=True)]
