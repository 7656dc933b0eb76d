"""What every endpoint needs: the pool, the tokenizer, the options, and one way to report failures."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridserve.cluster.ingress.errors import ApiError, brief, translate
from hybridserve.cluster.ingress.exposition import Snapshot
from hybridserve.cluster.ingress.in_flight import InFlight
from hybridserve.cluster.ingress.metrics import IngressMetrics
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.ingress.params import GenerationDefaults
from hybridserve.cluster.ingress.prompts import PromptReader
from hybridserve.cluster.pool.interface import EngineInfo, PoolClient
from hybridserve.replicas.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    # imported where tracing is on
    from hybridserve.cluster.observe.traces import RequestTracer


async def _nobody() -> list[Snapshot]:
    return []


@dataclass(frozen=True)
class Observers:
    """Who is told of requests beside the log."""

    ingress: str = "ingress"
    """This ingress replica's name in metrics."""
    tracer: "RequestTracer | None" = None
    other_ingresses: Callable[[], Awaitable[list[Snapshot]]] = _nobody
    """What the other ingress replicas count."""


class Service:
    """One ingress replica's collaborators."""

    def __init__(
        self,
        pool: PoolClient,
        tokenizer: Tokenizer,
        options: IngressOptions,
        generation_defaults: Mapping[str, object],
        observers: Observers,
    ) -> None:
        self.pool = pool
        self.tokenizer = tokenizer
        self.options = options
        self.defaults = GenerationDefaults(generation_defaults)
        self.prompts = PromptReader(tokenizer, options.inline_encode_characters)
        self.metrics = IngressMetrics(pool, observers.ingress)
        self.in_flight = InFlight(self.metrics.in_flight.set)
        self.tracer = observers.tracer
        self.other_ingresses = observers.other_ingresses
        self._info: EngineInfo | None = None

    async def info(self) -> EngineInfo:
        """The engine's facts, asked for once. Raises PoolError while no replica answers."""
        if self._info is None:
            self._info = await self.pool.info()
        return self._info

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless `name` is the served model's; None is."""
        if name is not None and name != self.options.model_name:
            raise ApiError(
                404,
                f"model {brief(name)} does not exist; this server has {self.options.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Raise a 400 when a request wants more answers than one request may."""
        if num_prompts * n > self.options.max_choices:
            raise ApiError(
                400,
                f"n {n} answers to each of {num_prompts} prompts are {num_prompts * n}, at most "
                f"{self.options.max_choices} answers a request",
                param="n" if n > 1 else "prompt",
            )

    def report(self, error: Exception) -> ApiError:
        """The failure as the client is told it, counted."""
        told = translate(error, self.options.retry_after)
        self.metrics.count_error(told)
        return told
