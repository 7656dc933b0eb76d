"""POST /generate: one prompt, one answer, the least JSON."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from hybridserve.cluster.ingress import body, sse
from hybridserve.cluster.ingress.disconnect import unless_gone
from hybridserve.cluster.ingress.generation import Job, collect, run
from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.ingress.params import fit_to_context, read_params
from hybridserve.cluster.ingress.priority import read_priority
from hybridserve.cluster.ingress.protocol import GenerateRequest
from hybridserve.cluster.ingress.service import Service
from hybridserve.cluster.ingress.usage import new_id, usage
from hybridserve.cluster.routing.admission import Priority


class Generate:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        ask = await body.read(request, GenerateRequest)
        job = await self._prepare(ask, read_priority(request))
        if ask.stream:
            return sse.EventStream(self._events(job), self._service.report)
        (answer,) = await unless_gone(request.receive, collect(self._service, job))
        whole = {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "usage": usage(job.prompt_tokens, len(answer.token_ids)),
        }
        return Response(to_json(whole), media_type="application/json")

    async def _prepare(self, ask: GenerateRequest, priority: Priority) -> Job:
        service = self._service
        service.check_model(ask.model)
        info = await service.info()
        params = read_params(ask, service.defaults, info, max_tokens=ask.max_tokens)
        prompts = await service.prompts.read(ask.prompt, info)
        params = fit_to_context(
            params,
            len(prompts[0].token_ids),
            info,
            default=service.defaults.max_new_tokens,
            prompt_param="prompt",
        )
        return Job(new_id("gen"), prompts, [params], ask.max_tokens, priority)

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        completion_tokens = 0
        text_event = sse.TextEvent(lambda text: {"text": text, "finish_reason": None})
        async with aclosing(run(self._service, job)) as pieces:
            async for piece in pieces:
                completion_tokens += len(piece.token_ids)
                if piece.finish_reason is not None:
                    total = usage(job.prompt_tokens, completion_tokens)
                    yield sse.event(
                        {"text": piece.text, "finish_reason": piece.finish_reason, "usage": total}
                    )
                elif piece.text:
                    yield text_event.with_text(piece.text)
        yield sse.DONE
