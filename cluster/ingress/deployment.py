"""Wraps the HTTP application as a Serve deployment: each replica builds its own pool client and tokenizer.

The only module of the ingress that imports Ray.
"""

import asyncio
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from hybridserve.cluster.access.build import open_access
from hybridserve.cluster.access.bus_tls import listener_context
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.garbage import collect_rarely
from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.exposition import Snapshot
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.ingress.service import Observers
from hybridserve.cluster.observe.logs import set_up_logging
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.routing.admission import Admission
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.routing.registry import pool_loads
from hybridserve.cluster.serve_alpha.broadcast import AllReplicas
from hybridserve.cluster.serve_alpha.exposure import warn_if_exposed
from hybridserve.cluster.serve_alpha.ingress_router import ingress_options
from hybridserve.cluster.serve_alpha.proxy_mode import check, running
from hybridserve.cluster.settings import AppSettings
from hybridserve.replicas.models.config import load_generation_defaults
from hybridserve.replicas.sampling_params import MAX_N
from hybridserve.replicas.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    # imported where tracing is on
    from hybridserve.cluster.observe.traces import RequestTracer

INGRESS_NAME = "ingress"

_INGRESS_CPUS = 0.1
# HTTP requests that need no engine (health, metrics, tokenize) beside those that do, and those to be refused
_SPARE_REQUESTS = 256
# an update starts them all before the old ones stop: they are small
_SURGE_PERCENT = 100
# one that does not say in time what it counts is left out of a scrape
_SNAPSHOT_S = 2.0


@serve.ingress()
class Ingress:
    """One ingress replica.

    Args:
        settings: of the application.
        pools: handles of the pools' deployments, by the pools' names.
    """

    async def __init__(self, settings: AppSettings, pools: dict[str, DeploymentHandle]) -> None:
        check(settings.ingress.proxy, settings.ingress_requests())
        self._settings = settings
        self._tracer: RequestTracer | None = None
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        set_up_logging(settings.logging.options, component="ingress", replica=self._name)
        self._others = AllReplicas(context.deployment, context.app_name, "metrics_snapshot")
        self._access = open_access(settings.access, settings.ingress.num_replicas)
        tls = settings.access.bus_tls
        self._bus_tls = None if tls is None else listener_context(tls)
        if self._access.keys is None:
            await warn_if_exposed()
        specs = settings.pool_specs()
        self._router = LengthRouter([await self._open_pool(spec, pools[spec.name]) for spec in specs])
        self._learning = asyncio.create_task(self._router.learn())

    async def _open_pool(self, spec: PoolSpec, handle: DeploymentHandle) -> RoutedPool:
        # Serve's router for the handle, in this same process, chooses replicas by these loads
        loads = pool_loads(serve.get_replica_context().app_name, spec.name)
        # one for each pool, so that whose replicas' reports come in is plain
        listener = BusListener(ray.util.get_node_ip_address(), loads, tls=self._bus_tls)
        await listener.start()
        serving = self._settings.serving_of(spec.name)
        client = HandlePoolClient(handle, listener, serving.token_transport, loads)
        admission = Admission(spec.name, spec.limits, self._settings.ingress.num_replicas)
        return RoutedPool(spec, client, loads, admission, retry=serving.retry)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve after the constructor."""
        settings = self._settings
        options = IngressOptions(
            model_name=settings.model.served_name,
            max_body_bytes=settings.ingress.max_body_bytes,
            max_concurrent_requests=settings.ingress_requests(),
            max_choices=min(MAX_N, self._router.max_choices),
            # Serve's proxy adds a header of that name itself
            name_requests=False,
        )
        self._tracer = _build_tracer(settings, self._name)
        observers = Observers(self._name, self._tracer, self._other_ingresses)
        self._api = build_api(
            self._router,
            Tokenizer.load(settings.model.tokenizer_path),
            options,
            load_generation_defaults(settings.model.path),
            observers,
            self._access,
        )
        collect_rarely()
        return self._api

    def __del__(self) -> None:
        """Called by Serve before the process ends."""
        if self._tracer is not None:
            self._tracer.shut_down()

    async def metrics_snapshot(self) -> Snapshot:
        """Called by other ingress replicas, when one of them is asked for all metrics."""
        return self._api.state.service.metrics.snapshot()

    async def stop(self, limit_s: float) -> int:
        """Called by who is about to shut Serve down: ends what is in flight, at the limit with an error.

        Returns how many requests were cut off.
        """
        return await self._api.state.service.in_flight.stop(limit_s)

    async def _other_ingresses(self) -> list[Snapshot]:
        if self._settings.ingress.num_replicas == 1:
            return []
        return [one for one in await self._others.ask(_SNAPSHOT_S) if one.ingress != self._name]


def build_ingress(settings: AppSettings, pools: dict[str, Application]) -> Application:
    """The ingress' deployment, bound to the pools'."""
    deployment = serve.deployment(
        Ingress,
        name=INGRESS_NAME,
        num_replicas=settings.ingress.num_replicas,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
        max_ongoing_requests=settings.ingress_requests() + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.serving.longest_answer_s,
        max_constructor_retry_count=1,
        max_surge_percent=_SURGE_PERCENT,
        logging_config=settings.logging.serve_config,
        **ingress_options(running()),
    )
    return deployment.bind(settings, pools)


def _build_tracer(settings: AppSettings, name: str) -> "RequestTracer | None":
    """None without tracing. Raises ValueError when the exporter is not installed."""
    tracing = settings.tracing
    if tracing.exporter == "none":
        return None
    from hybridserve.cluster.observe.traces import RequestTracer, otlp_processor

    return RequestTracer(
        settings.model.served_name,
        otlp_processor(tracing.endpoint),
        tracing.sampling_ratio,
        {"service.instance.id": name},
    )
