"""What the server says of itself: models, liveness, readiness, metrics."""

import time

from starlette.requests import Request
from starlette.responses import Response

from hybridserve.cluster.ingress.exposition import CONTENT_TYPE
from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.ingress.service import Service
from hybridserve.cluster.pool.interface import PoolError
from hybridserve.cluster.routing.state import as_json


class Status:
    """The endpoints without a body."""

    def __init__(self, service: Service, endpoints: list[str]) -> None:
        self._service = service
        self._endpoints = endpoints
        self._created = int(time.time())

    async def root(self, request: Request) -> Response:
        return _json({"model": self._service.options.model_name, "endpoints": self._endpoints})

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [await self._model()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["model"])
        return _json(await self._model())

    async def _model(self) -> dict[str, object]:
        info = await self._service.info()
        return {
            "id": self._service.options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "hybridserve",
            "max_model_len": info.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """This process answers; says nothing of the engine."""
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 once the engine has answered a prompt, else, or when it stops, 503 with the reason."""
        if self._service.in_flight.stopping:
            return _json({"status": "not ready", "reason": "the server is stopping"}, status=503)
        try:
            reason = None if await self._service.pool.ready() else "the engine has not answered a prompt yet"
        except PoolError as error:
            reason = str(error)
        if reason is None:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": reason}, status=503)

    async def pools(self, request: Request) -> Response:
        """Every pool's live state, as the ingress replica sees it that answers."""
        pool = self._service.pool
        await pool.refresh_load()
        return _json({"pools": [as_json(state) for state in pool.pools()]})

    async def metrics(self, request: Request) -> Response:
        """Of all ingress replicas, whichever of them is asked."""
        await self._service.pool.refresh_load()
        others = await self._service.other_ingresses()
        return Response(self._service.metrics.render(others), media_type=CONTENT_TYPE)


def _json(value: object, *, status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")
