"""Many streams that begin at once, over processes of their own, so that no client is what limits them."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import aiohttp
from serve.client import LoadClient, Target

from hybridserve.cluster.simulation.outcomes import OK, Outcome
from hybridserve.cluster.simulation.workload import Arrival

_STREAMS_PER_PROCESS = 32
_LEAD_S = 0.3


@dataclass(frozen=True)
class CrowdFigures:
    """What a crowd saw, from the moment when all were sent."""

    seconds: float
    """To the last token."""
    tokens: int
    first_token_s: tuple[float, ...]
    tokens_per_event: float


class Crowd:
    """Client processes of one server, from `with` to its end."""

    def __init__(self, target: Target, streams: int) -> None:
        most = max(1, (os.cpu_count() or 2) // 2)
        self._target = target
        self._count = min(most, -(-streams // _STREAMS_PER_PROCESS))

    def __enter__(self) -> "Crowd":
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(self._target, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()

    def send(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> CrowdFigures:
        """All prompts at once; each answer has `new_tokens`.

        Raises:
            RuntimeError: an answer failed, or has another number of tokens.
        """
        for index, pipe in enumerate(self._pipes):
            pipe.send((prompts[index :: self._count], new_tokens))
        for pipe in self._pipes:
            pipe.recv()
        due = time.perf_counter() + _LEAD_S
        for pipe in self._pipes:
            pipe.send(due)
        outcomes: list[Outcome] = []
        events = 0
        for pipe in self._pipes:
            some, count = pipe.recv()
            outcomes += some
            events += count
        for one in outcomes:
            if one.end != OK or one.tokens != new_tokens:
                raise RuntimeError(f"an answer of {one.tokens} of {new_tokens} tokens ended with {one.end!r}")
        tokens = sum(one.tokens for one in outcomes)
        firsts = tuple(one.first_token_s for one in outcomes if one.first_token_s is not None)
        return CrowdFigures(max(one.end_s for one in outcomes), tokens, firsts, tokens / events)


def _client(target: Target, pipe: Connection) -> None:
    asyncio.run(_answer_jobs(target, pipe))


async def _answer_jobs(target: Target, pipe: Connection) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        client = LoadClient(target, session)
        pipe.send("ready")
        while (job := pipe.recv()) is not None:
            prompts, new_tokens = job
            arrivals = [Arrival(0.0, len(prompt), new_tokens) for prompt in prompts]
            bodies = [client.body(one, prompt) for one, prompt in zip(arrivals, prompts, strict=True)]
            pipe.send("prepared")
            due = pipe.recv()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            gaps: list[float] = []
            sent = (client.send(one, body, due, gaps) for one, body in zip(arrivals, bodies, strict=True))
            outcomes = await asyncio.gather(*sent)
            pipe.send((outcomes, len(gaps) + len(outcomes)))
