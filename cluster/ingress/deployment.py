"""Wraps the HTTP application as a Serve deployment: each replica builds its own pool client and tokenizer.

The only module of the ingress that imports Ray.
"""

import logging

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.router import LengthRouter
from hybridserve.cluster.settings import AppSettings
from hybridserve.replicas.models.config import load_generation_defaults
from hybridserve.replicas.sampling_params import MAX_N
from hybridserve.replicas.text.tokenizer import Tokenizer

INGRESS_NAME = "ingress"

_INGRESS_CPUS = 0.1
# HTTP requests that need no engine (health, metrics, tokenize) beside those that do, and those to be refused
_SPARE_REQUESTS = 256

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """One ingress replica.

    Args:
        settings: of the application.
        pool: handle of the pool's deployment.
    """

    async def __init__(self, settings: AppSettings, pool: DeploymentHandle) -> None:
        self._settings = settings
        self._listener = BusListener(ray.util.get_node_ip_address())
        await self._listener.start()
        client = HandlePoolClient(pool, self._listener, settings.serving.token_transport)
        self._router = LengthRouter(client, _share(settings))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve after the constructor."""
        settings = self._settings
        options = IngressOptions(
            model_name=settings.model.served_name,
            max_body_bytes=settings.ingress.max_body_bytes,
            max_concurrent_requests=_share(settings),
            # each answer is a request of the pool's: more than its share could never be admitted
            max_choices=min(MAX_N, _share(settings)),
            # Serve's proxy adds a header of that name itself
            name_requests=False,
        )
        tokenizer = Tokenizer.load(settings.model.path)
        return build_api(self._router, tokenizer, options, load_generation_defaults(settings.model.path))


def build_ingress(settings: AppSettings, pool: Application) -> Application:
    """The ingress' deployment, bound to the pool's."""
    deployment = serve.deployment(
        Ingress,
        name=INGRESS_NAME,
        num_replicas=settings.ingress.num_replicas,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
        max_ongoing_requests=_share(settings) + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.serving.longest_answer_s,
        max_constructor_retry_count=1,
    )
    return deployment.bind(settings, pool)


def _share(settings: AppSettings) -> int:
    """Requests in flight that one ingress replica may admit."""
    return -(-settings.serving.max_concurrent_requests // settings.ingress.num_replicas)
