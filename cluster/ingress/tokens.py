"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, and back."""

from starlette.requests import Request
from starlette.responses import Response

from hybridserve.cluster.ingress import body
from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.ingress.params import check_token_ids
from hybridserve.cluster.ingress.protocol import DetokenizeRequest, TokenizeRequest
from hybridserve.cluster.ingress.service import Service


class Tokens:
    """The two endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        ask = await body.read(request, TokenizeRequest)
        service = self._service
        service.check_model(ask.model)
        info = await service.info()
        if ask.messages is not None:
            token_ids = await service.prompts.encode_chat(ask.messages, ask)
        else:
            assert ask.prompt is not None
            token_ids = await service.prompts.encode(ask.prompt, add_special_tokens=ask.add_special_tokens)
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": info.max_model_len}
        return Response(to_json(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        ask = await body.read(request, DetokenizeRequest)
        service = self._service
        service.check_model(ask.model)
        check_token_ids("tokens", ask.tokens, await service.info())
        text = service.tokenizer.decode(ask.tokens, skip_special_tokens=False)
        return Response(to_json({"prompt": text}), media_type="application/json")
