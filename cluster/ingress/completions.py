"""POST /v1/completions: OpenAI's text completion, whole or as a stream."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from hybridserve.cluster.ingress import body, sse
from hybridserve.cluster.ingress.disconnect import unless_gone
from hybridserve.cluster.ingress.generation import Answer, Job, Piece, collect, run
from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.ingress.logprobs import CompletionLogprobs, prompt_logprobs
from hybridserve.cluster.ingress.params import COMPLETION_MAX_TOKENS, fit_to_context, read_params
from hybridserve.cluster.ingress.priority import read_priority
from hybridserve.cluster.ingress.protocol import CompletionRequest
from hybridserve.cluster.ingress.service import Service
from hybridserve.cluster.ingress.usage import new_id, usage
from hybridserve.cluster.routing.admission import Priority
from hybridserve.replicas.engine.plan import TokenLogprobs


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        ask = await body.read(request, CompletionRequest)
        job = await self._prepare(ask, read_priority(request))
        writer = CompletionWriter(self._service, ask, job)
        if ask.stream:
            return sse.EventStream(writer.events(), self._service.report)
        answers = await unless_gone(request.receive, collect(self._service, job))
        return Response(to_json(writer.whole(answers)), media_type="application/json")

    async def _prepare(self, ask: CompletionRequest, priority: Priority) -> Job:
        service = self._service
        service.check_model(ask.model)
        info = await service.info()
        # echoed text has its own log-probabilities, which only the engine knows
        echoed = ask.logprobs if ask.echo else None
        params = read_params(
            ask,
            service.defaults,
            info,
            n=ask.n,
            max_tokens=ask.max_tokens,
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs if echoed is None else max(echoed, ask.prompt_logprobs or 0),
        )
        several = isinstance(ask.prompt, list) and not isinstance(ask.prompt[0], int)
        service.check_choices(len(ask.prompt) if several else 1, params.n)
        prompts = await service.prompts.read(ask.prompt, info)
        fitted = [
            fit_to_context(
                params, len(p.token_ids), info, default=COMPLETION_MAX_TOKENS, prompt_param="prompt"
            )
            for p in prompts
        ]
        return Job(new_id("cmpl"), prompts, fitted, ask.max_tokens, priority)


@dataclass
class _Progress:
    """One answer of a stream so far."""

    logprobs: CompletionLogprobs | None
    started: bool = False
    text_event: sse.TextEvent | None = None
    """For pieces that are nothing but text; made when the first comes."""


class CompletionWriter:
    """The JSON of one request's answers."""

    def __init__(self, service: Service, ask: CompletionRequest, job: Job) -> None:
        self._service = service
        self._ask = ask
        self._job = job
        self._head = {
            "id": job.request_id,
            "object": "text_completion",
            "created": job.created,
            "model": service.options.model_name,
        }

    def whole(self, answers: list[Answer]) -> dict[str, object]:
        choices = []
        for index, answer in enumerate(answers):
            choice = self._choice(
                index, self._echo(index) + answer.text, answer.finish_reason, answer.stop_reason
            )
            if self._ask.logprobs is not None:
                choice["logprobs"] = self._logprobs().take(*self._tokens(index, answer, first=True))
            if self._ask.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(self._service.tokenizer, answer.prompt_logprobs)
            choices.append(choice)
        completion_tokens = sum(len(answer.token_ids) for answer in answers)
        return {
            **self._head,
            "choices": choices,
            "usage": usage(self._job.prompt_tokens, completion_tokens),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        include_usage = self._ask.include_usage
        count = len(self._job.prompts) * self._job.n
        progress = [_Progress(None if self._ask.logprobs is None else self._logprobs()) for _ in range(count)]
        completion_tokens = 0
        async with aclosing(run(self._service, self._job)) as pieces:
            async for piece in pieces:
                completion_tokens += len(piece.token_ids)
                event = self._event(piece, progress[piece.index])
                if event is not None:
                    yield event
        if include_usage:
            total = usage(self._job.prompt_tokens, completion_tokens)
            yield sse.event({**self._head, "choices": [], "usage": total})
        yield sse.DONE

    def _event(self, piece: Piece, progress: _Progress) -> bytes | None:
        """What is sent for a piece, or None when it shows nothing."""
        if progress.started and piece.finish_reason is None and progress.logprobs is None:
            if not piece.text:
                return None
            if progress.text_event is None:
                index = piece.index
                progress.text_event = sse.TextEvent(
                    lambda text: self._chunk(self._choice(index, text, None, None))
                )
            return progress.text_event.with_text(piece.text)
        choice = self._piece(piece, progress)
        return None if choice is None else sse.event(self._chunk(choice))

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        chunk = {**self._head, "choices": [choice]}
        if self._ask.include_usage:
            chunk["usage"] = None
        return chunk

    def _piece(self, piece: Piece, progress: _Progress) -> dict[str, object] | None:
        """A chunk's choice, or None when the piece shows nothing."""
        first, progress.started = not progress.started, True
        text = self._echo(piece.index) + piece.text if first else piece.text
        has_logprobs = progress.logprobs is not None and piece.token_ids
        if not text and not has_logprobs and piece.finish_reason is None:
            return None
        choice = self._choice(piece.index, text, piece.finish_reason, piece.stop_reason)
        if progress.logprobs is not None:
            choice["logprobs"] = progress.logprobs.take(*self._tokens(piece.index, piece, first=first))
        return choice

    def _choice(
        self, index: int, text: str, finish_reason: str | None, stop_reason: int | str | None
    ) -> dict[str, object]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _echo(self, index: int) -> str:
        """What comes before an answer's own text: its prompt, if the client asked for it."""
        if not self._ask.echo:
            return ""
        prompt = self._job.prompts[index // self._job.n]
        if prompt.text is not None:
            return prompt.text
        return self._service.tokenizer.decode(
            prompt.token_ids, skip_special_tokens=self._ask.skip_special_tokens
        )

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._service.tokenizer,
            self._ask.logprobs or 0,
            skip_special_tokens=self._ask.skip_special_tokens,
        )

    def _tokens(
        self, index: int, part: Answer | Piece, *, first: bool
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens and log-probabilities of a part of an answer, the echoed prompt's before the first."""
        if not (first and self._ask.echo):
            return list(part.token_ids), list(part.logprobs)
        prompt_ids = self._job.prompts[index // self._job.n].token_ids
        prompt_values = [None, *(entry for _, entry in part.prompt_logprobs)]
        return [*prompt_ids, *part.token_ids], [*prompt_values, *part.logprobs]
