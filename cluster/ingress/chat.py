"""POST /v1/chat/completions: OpenAI's chat, whole or as a stream."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from hybridserve.cluster.ingress import body, sse
from hybridserve.cluster.ingress.disconnect import unless_gone
from hybridserve.cluster.ingress.generation import Answer, Job, Piece, collect, run
from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.ingress.logprobs import chat_logprobs, prompt_logprobs
from hybridserve.cluster.ingress.params import fit_to_context, read_params
from hybridserve.cluster.ingress.priority import read_priority
from hybridserve.cluster.ingress.prompts import TokenizedPrompt
from hybridserve.cluster.ingress.protocol import ChatRequest
from hybridserve.cluster.ingress.service import Service
from hybridserve.cluster.ingress.usage import new_id, usage
from hybridserve.cluster.routing.admission import Priority
from hybridserve.replicas.engine.plan import TokenLogprobs


class Chat:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        ask = await body.read(request, ChatRequest)
        job = await self._prepare(ask, read_priority(request))
        writer = ChatWriter(self._service, ask, job)
        if ask.stream:
            return sse.EventStream(writer.events(), self._service.report)
        answers = await unless_gone(request.receive, collect(self._service, job))
        return Response(to_json(writer.whole(answers)), media_type="application/json")

    async def _prepare(self, ask: ChatRequest, priority: Priority) -> Job:
        service = self._service
        service.check_model(ask.model)
        info = await service.info()
        newer = ask.max_completion_tokens is not None
        max_tokens = ask.max_completion_tokens if newer else ask.max_tokens
        aliases = {"max_tokens": "max_completion_tokens"} if newer else {}
        params = read_params(
            ask,
            service.defaults,
            info,
            n=ask.n,
            max_tokens=max_tokens,
            logprobs=(ask.top_logprobs or 0) if ask.logprobs else None,
            prompt_logprobs=ask.prompt_logprobs,
            aliases=aliases,
        )
        service.check_choices(1, params.n)
        token_ids = await service.prompts.encode_chat(ask.messages, ask, room=info.max_model_len - 1)
        params = fit_to_context(
            params,
            len(token_ids),
            info,
            default=service.defaults.max_new_tokens,
            prompt_param="messages",
            max_tokens_param=aliases.get("max_tokens", "max_tokens"),
        )
        prompt = TokenizedPrompt(tuple(token_ids), None)
        return Job(new_id("chatcmpl"), [prompt], [params], max_tokens, priority)


class ChatWriter:
    """The JSON of one request's answers."""

    def __init__(self, service: Service, ask: ChatRequest, job: Job) -> None:
        self._service = service
        self._ask = ask
        self._job = job
        self._head = {
            "id": job.request_id,
            "object": "chat.completion",
            "created": job.created,
            "model": service.options.model_name,
        }

    def whole(self, answers: list[Answer]) -> dict[str, object]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.token_ids, answer.logprobs),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        completion_tokens = sum(len(answer.token_ids) for answer in answers)
        out = {
            **self._head,
            "choices": choices,
            "usage": usage(self._job.prompt_tokens, completion_tokens),
        }
        if self._ask.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(self._service.tokenizer, answers[0].prompt_logprobs)
        return out

    async def events(self) -> AsyncGenerator[bytes, None]:
        include_usage = self._ask.include_usage
        started: dict[int, sse.TextEvent] = {}
        completion_tokens = 0
        async with aclosing(run(self._service, self._job)) as pieces:
            async for piece in pieces:
                completion_tokens += len(piece.token_ids)
                text_event = started.get(piece.index)
                if text_event is not None and piece.finish_reason is None and not self._ask.logprobs:
                    if piece.text:
                        yield text_event.with_text(piece.text)
                    continue
                for choice in self._choices(piece, started):
                    yield sse.event(self._chunk([choice]))
        if include_usage:
            total = usage(self._job.prompt_tokens, completion_tokens)
            yield sse.event({**self._chunk([]), "usage": total})
        yield sse.DONE

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._ask.include_usage:
            chunk["usage"] = None
        return chunk

    def _text_event(self, index: int) -> sse.TextEvent:
        """For an answer's pieces that are nothing but text."""
        return sse.TextEvent(lambda text: self._chunk([_choice(index, {"content": text})]))

    def _choices(self, piece: Piece, started: dict[int, sse.TextEvent]) -> list[dict[str, object]]:
        """The chunks' choices for a piece: the role once, text when there is some, the end by itself."""
        choices = []
        if piece.index not in started:
            started[piece.index] = self._text_event(piece.index)
            choices.append(_choice(piece.index, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs(piece.token_ids, piece.logprobs) if piece.token_ids else None
        if piece.text or logprobs is not None:
            choices.append(_choice(piece.index, {"content": piece.text}, logprobs))
        if piece.finish_reason is not None:
            last = _choice(piece.index, {})
            last["finish_reason"] = piece.finish_reason
            last["stop_reason"] = piece.stop_reason
            choices.append(last)
        return choices

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, object] | None:
        if not self._ask.logprobs:
            return None
        return chat_logprobs(self._service.tokenizer, token_ids, logprobs, self._ask.top_logprobs or 0)


def _choice(
    index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
