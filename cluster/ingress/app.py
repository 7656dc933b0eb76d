"""The ingress as one FastAPI application: endpoints, limits around them, and errors in one shape.

Composes; everything it composes is testable by itself. Knows nothing of Ray or of where the pool lives.
"""

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from hybridserve.cluster.access.gate import Access, Gate
from hybridserve.cluster.ingress.chat import Chat
from hybridserve.cluster.ingress.completions import Completions
from hybridserve.cluster.ingress.disconnect import ClientGone
from hybridserve.cluster.ingress.errors import AnswerFailed, ApiError, error_response, from_validation
from hybridserve.cluster.ingress.generate import Generate
from hybridserve.cluster.ingress.limits import Admission, BodyLimit, DropHeaders
from hybridserve.cluster.ingress.observed import Observed
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.ingress.service import Observers, Service
from hybridserve.cluster.ingress.status import Status
from hybridserve.cluster.ingress.tokens import Tokens
from hybridserve.cluster.pool.interface import PoolClient, PoolError
from hybridserve.replicas.text.tokenizer import Tokenizer

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
_STATUS_PATHS = ("/v1/models", "/tokenize", "/detokenize", "/health", "/ready", "/metrics", "/pools")
# asked every few seconds by machines
_QUIET_PATHS = ("/health", "/ready", "/metrics", "/pools")


def build_api(
    pool: PoolClient,
    tokenizer: Tokenizer,
    options: IngressOptions,
    generation_defaults: Mapping[str, object],
    observers: Observers | None = None,
    access: Access | None = None,
) -> FastAPI:
    """The HTTP application of one ingress replica.

    generation_defaults: the contents of the checkpoint's `generation_config.json`, or nothing.
    observers: by default none.
    access: who may use it; by default anybody.

    Raises:
        ValueError: a generation default is out of its bounds.
    """
    service = Service(pool, tokenizer, options, generation_defaults, observers or Observers())
    # bodies are read by hand and routes are Starlette's, which spares a fifth of a request's cost and leaves
    # nothing to generate documentation pages from
    api = FastAPI(title="hybridserve", openapi_url=None, redirect_slashes=False)
    api.state.service = service
    _add_endpoints(api, service)
    _add_error_handlers(api, service)
    _add_limits(api, service, access or Access())
    return api


def _add_endpoints(api: FastAPI, service: Service) -> None:
    status = Status(service, [*GENERATION_PATHS, *_STATUS_PATHS])
    tokens = Tokens(service)
    for path, endpoint in (
        ("/v1/completions", Completions(service).create),
        ("/v1/chat/completions", Chat(service).create),
        ("/generate", Generate(service).create),
        ("/tokenize", tokens.tokenize),
        ("/detokenize", tokens.detokenize),
    ):
        api.add_route(path, endpoint, methods=["POST"])
    for path, endpoint in (
        ("/", status.root),
        ("/v1/models", status.models),
        ("/v1/models/{model:path}", status.model),
        ("/health", status.health),
        ("/ready", status.ready),
        ("/metrics", status.metrics),
        ("/pools", status.pools),
    ):
        api.add_route(path, endpoint, methods=["GET"])


def _add_limits(api: FastAPI, service: Service, access: Access) -> None:
    """The last one added sees a request first."""
    options = service.options
    api.add_middleware(
        Admission,
        paths=frozenset(GENERATION_PATHS),
        max_requests=options.max_concurrent_requests,
        retry_after=options.retry_after,
        in_flight=service.in_flight,
        report=service.report,
        full=lambda priority: service.pool.full(priority),
    )
    api.add_middleware(BodyLimit, max_bytes=options.max_body_bytes, report=service.report)
    api.add_middleware(Gate, access=access, report=service.report)
    api.add_middleware(
        Observed,
        routes=(*GENERATION_PATHS, *_STATUS_PATHS),
        quiet=_QUIET_PATHS,
        metrics=service.metrics,
        tracer=service.tracer,
        name_requests=options.name_requests,
    )
    api.add_middleware(DropHeaders)


def _add_error_handlers(api: FastAPI, service: Service) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(service.report(error))

    async def not_routed(request: Request, error: HTTPException) -> Response:
        return error_response(service.report(_routing_error(request, error)))

    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return error_response(service.report(from_validation(error)))

    async def gone(request: Request, error: Exception) -> Response:
        # never seen by anyone; 499 is what access logs know for it
        return Response(status_code=499)

    for kind in (ApiError, AnswerFailed, PoolError, Exception):
        api.add_exception_handler(kind, failed)
    api.add_exception_handler(HTTPException, not_routed)
    api.add_exception_handler(RequestValidationError, not_valid)
    for kind in (ClientGone, ClientDisconnect):
        api.add_exception_handler(kind, gone)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """Starlette's own errors: no such path, no such method there."""
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {what}", code="not_found")
    if error.status_code == 405:
        headers = error.headers or {}
        allowed = headers.get("Allow", "another method")
        return ApiError(
            405, f"{what} is not allowed, only {allowed}", code="method_not_allowed", headers=headers
        )
    return ApiError(error.status_code, str(error.detail), code="http_error", headers=error.headers)
