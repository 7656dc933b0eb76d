"""The one path from a checked request to text: n answers to each prompt, run over the pool side by side.

Owns incremental text, stop strings, and ending the pool's requests as soon as nobody waits for them. Knows
nothing of HTTP or of an endpoint's JSON.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hybridserve.cluster.access.record import current_record
from hybridserve.cluster.ingress.answer_size import check_answer_size
from hybridserve.cluster.ingress.errors import AnswerFailed, ApiError
from hybridserve.cluster.ingress.metrics import AnswerClock
from hybridserve.cluster.ingress.prompts import TokenizedPrompt
from hybridserve.cluster.ingress.service import Service
from hybridserve.cluster.observe.trail import current_request, current_request_id
from hybridserve.cluster.pool.interface import GenerationRequest, PoolError
from hybridserve.cluster.routing.admission import Priority
from hybridserve.cluster.routing.cost import cost_of
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.answer_text import AnswerText

# of several answers side by side; where their client reads slowly, the wait is theirs
_MAX_PIECES = 256

PromptLogprobs = tuple[tuple[int, TokenLogprobs], ...]


@dataclass(frozen=True)
class Job:
    """A client's request, ready to run. Answer j to prompt i has index i * n + j."""

    request_id: str
    prompts: Sequence[TokenizedPrompt]
    params: Sequence[SamplingParams]
    """One for each prompt; `n` is the same in all."""
    stated_max_tokens: int | None = None
    """As the client sent it; None when `params` have a default."""
    priority: Priority = "normal"
    arrival: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def n(self) -> int:
        return self.params[0].n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def expected_tokens(self) -> int:
        """Of all answers, as the pools' admission expects them."""
        stated = self.stated_max_tokens
        return self.n * sum(cost_of(0, one.max_tokens, stated).answer_tokens for one in self.params)

    def request(self, index: int) -> GenerationRequest:
        """What the pool is asked for answer `index`."""
        prompt, answer = divmod(index, self.n)
        params = self.params[prompt]
        if self.n > 1:
            seed = params.seed if params.seed is None else _next_seed(params.seed, answer)
            params = replace(params, n=1, seed=seed)
        return GenerationRequest(
            f"{self.request_id}-{index}",
            self.prompts[prompt].token_ids,
            params,
            self.stated_max_tokens,
            self.priority,
            current_request_id(),
        )


class Piece(NamedTuple):
    """What one answer gained."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Answer:
    """The pieces of one index, joined."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason


async def collect(service: Service, job: Job) -> list[Answer]:
    """All answers, whole, in the order of their indexes."""
    answers = [Answer() for _ in range(len(job.prompts) * job.n)]
    async with aclosing(run(service, job)) as pieces:
        async for piece in pieces:
            answers[piece.index].add(piece)
    return answers


def run(service: Service, job: Job) -> AsyncGenerator[Piece, None]:
    """Pieces of all answers as they come; each answer's last has a `finish_reason`.

    Closing it early, or a failure of one answer, cancels all that still run.

    Raises (while iterating):
        AnswerFailed: because of an ApiError where the engine refused or failed an answer, of a PoolError
            where the pool did.
        PoolBusy: from the call itself, there is no room for the client's key.
    """
    check_answer_size([len(prompt.token_ids) for prompt in job.prompts], job.params)
    current_request().answer_id = job.request_id
    current_record().admit(job.request_id, service.options.model_name, job.prompt_tokens, job.expected_tokens)
    return _interleave([_answer(service, job, index) for index in range(len(job.prompts) * job.n)])


async def _answer(service: Service, job: Job, index: int) -> AsyncGenerator[Piece, None]:
    request = job.request(index)
    text = AnswerText(service.tokenizer, request.prompt_token_ids, request.params)
    clock = AnswerClock(service.metrics, request, job.arrival, counts_prompt=index % job.n == 0)
    record = current_record()
    reason = "cancelled"
    try:
        async with aclosing(service.pool.generate(request)) as news:
            while True:
                output = await _next(news, request.request_id)
                clock.news(output)
                if not output.token_ids and not output.finished:
                    # only says that the engine has the request
                    continue
                piece = _piece(text, index, output)
                record.add(index, len(piece.token_ids), piece.text)
                if piece.finish_reason is not None:
                    break
                yield piece
        # here the pool's request is closed, whatever the client does with the last piece
        reason = piece.finish_reason
        yield piece
    except Exception as error:
        reason = "error"
        raise AnswerFailed(job.request_id) from error
    finally:
        clock.end(reason)
        record.end_answer(index, reason)


async def _next(news: AsyncGenerator[EngineOutput, None], request_id: str) -> EngineOutput:
    """The pool's next news, with its ways to fail told apart from our own."""
    try:
        return await anext(news)
    except ValueError as error:
        raise ApiError(400, str(error), code="refused_by_engine") from None
    except StopAsyncIteration:
        raise PoolError(f"the answer {request_id} broke off before it was finished") from None


def _piece(text: AnswerText, index: int, news: EngineOutput) -> Piece:
    """What the engine's news add to an answer.

    Raises:
        ApiError: 500, the engine gave the answer up.
    """
    if news.finish_reason in ("error", "abort"):
        message = news.error or f"the engine ended the request: {news.finish_reason}"
        raise ApiError(500, message, code="engine_error")
    added = text.take(news)
    return Piece(
        index,
        added.text,
        news.token_ids[: added.num_tokens],
        news.logprobs[: added.num_tokens],
        news.prompt_logprobs,
        added.finish_reason,
        added.stop_reason,
    )


async def _interleave(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of all streams in the order they come; the first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_MAX_PIECES)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[Piece, None], queue: "asyncio.Queue[Piece | Exception | None]"
) -> None:
    """Move a stream into `queue`: its pieces, then None, or its failure."""
    try:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                await queue.put(piece)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


def _next_seed(seed: int, answer: int) -> int:
    """A seed for each of n answers, within the 64 bits a seed may have."""
    return seed + answer if seed + answer < 2**64 else seed + answer - 2**64
