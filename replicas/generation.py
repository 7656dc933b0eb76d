"""Running many prompts through an engine until all their answers are there.

Owns the requests between `add_request` and their end, also when they end early. Knows nothing of how prompts
were written or how progress is drawn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from hybridserve.replicas.answer import Answer
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.outputs import RequestMetrics, RequestOutput
from hybridserve.replicas.progress import AnswerProgress
from hybridserve.replicas.prompts import TokenizedPrompt
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.tokenizer import Tokenizer

TextListener = Callable[[int, int, str], None]
"""Called with (prompt's index, answer's index, text) as text comes."""
_NUM_SEEDS = 2**64


class StepEngine(Protocol):
    """What this needs of an engine."""

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request. Raises ValueError when it cannot be served."""

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""

    def step(self) -> list[EngineOutput]:
        """Run one step and return its news."""

    def has_unfinished(self) -> bool:
        """True while a request is neither ended nor aborted."""


@dataclass
class _Job:
    """One prompt and its `n` answers."""

    index: int
    request_id: str
    prompt: TokenizedPrompt
    answers: list[Answer]


@contextmanager
def naming_prompt(index: int) -> Iterator[None]:
    """Put the prompt's index before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompts[{index}]: {error}") from error


def answer_prompts(
    engine: StepEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[TokenizedPrompt],
    params: Sequence[SamplingParams],
    request_ids: Iterator[int],
    progress: AnswerProgress | None = None,
    on_text: TextListener | None = None,
) -> list[RequestOutput]:
    """Answer `prompts` under `params`, one each; outputs come in the same order.

    Whatever ends this early (an interrupt, an error), no request of it stays in the engine.

    Raises:
        ValueError: the engine refuses a prompt; the message names its index, and nothing has run.
    """
    live: dict[str, tuple[_Job, Answer]] = {}
    try:
        jobs = [
            _add(engine, tokenizer, _Job(index, str(next(request_ids)), prompt, []), one, live)
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        while live:
            assert engine.has_unfinished(), f"the engine lost {sorted(live)}"
            for news in engine.step():
                # news of a request that a stop string ended may still come
                if news.request_id in live:
                    _deliver(engine, news, live, progress, on_text)
    finally:
        for request_id in live:
            engine.abort(request_id)
    return [_request_output(job) for job in jobs]


def _add(
    engine: StepEngine,
    tokenizer: Tokenizer,
    job: _Job,
    params: SamplingParams,
    live: dict[str, tuple[_Job, Answer]],
) -> _Job:
    """Queue the `n` requests of a job."""
    for i, one in enumerate(_answer_params(params)):
        request_id = job.request_id if params.n == 1 else f"{job.request_id}-{i}"
        answer = Answer(i, job.prompt.token_ids, one, tokenizer)
        job.answers.append(answer)
        live[request_id] = (job, answer)
        with naming_prompt(job.index):
            engine.add_request(request_id, job.prompt.token_ids, one)
    return job


def _answer_params(params: SamplingParams) -> Iterator[SamplingParams]:
    """Parameters of each of the `n` answers: seeds count up from `seed`, the prompt is scored once."""
    for i in range(params.n):
        seed = None if params.seed is None else (params.seed + i) % _NUM_SEEDS
        yield replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if i == 0 else None)


def _deliver(
    engine: StepEngine,
    news: EngineOutput,
    live: dict[str, tuple[_Job, Answer]],
    progress: AnswerProgress | None,
    on_text: TextListener | None,
) -> None:
    job, answer = live[news.request_id]
    delta = answer.add(news)
    if answer.needs_abort:
        engine.abort(news.request_id)
    if answer.finished:
        del live[news.request_id]
    if progress is not None:
        progress(int(answer.finished), len(news.token_ids))
    if on_text is not None and delta:
        on_text(job.index, answer.output.index, delta)


def _request_output(job: _Job) -> RequestOutput:
    answers = job.answers
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.prompt.text,
        prompt_token_ids=job.prompt.token_ids,
        outputs=[answer.output for answer in answers],
        prompt_logprobs=answers[0].prompt_logprobs,
        metrics=RequestMetrics(
            arrival_time=answers[0].arrival_time,
            first_scheduled_time=min(answer.first_scheduled_time for answer in answers),
            first_token_time=min(answer.first_token_time for answer in answers),
            finished_time=max(answer.finished_time for answer in answers),
            num_preemptions=sum(answer.num_preemptions for answer in answers),
        ),
    )
