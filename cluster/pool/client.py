"""The ingress' side of a pool: requests by the bus or one handle call each, tokens by the bus.

A request goes by the bus where its replica's engine is connected already, which a call has made it do; a
call's reply fills what the bus leaves out. Knows how a pool is reached and how it can fail; nothing of HTTP,
of text, or of what a failure leads to.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextvars import Context

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from hybridserve.cluster.bus.frames import Failure, ReplyTo
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.stream import Stream, StreamOverflow, after
from hybridserve.cluster.bus.submission import Submission, pack_submission
from hybridserve.cluster.pool.interface import (
    EngineInfo,
    GenerationRequest,
    PoolBusy,
    PoolError,
    ReaderTooSlow,
    ReplicaFailed,
)
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.cluster.routing.admission import Priority
from hybridserve.cluster.routing.load import ReplicaLoad, sum_loads
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.state import PoolState
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

# how long the bus may lag behind the unary reply before the reply is used
_BUS_GRACE_S = 0.05
_QUICK_CALL_S = 2.0
_CALL_ERRORS = (RayError, RayServeException, TimeoutError, ConnectionError)

logger = logging.getLogger(__name__)


class HandlePoolClient:
    """A `PoolClient` over a Serve deployment handle.

    Args:
        handle: of the pool's deployment.
        listener: started, on the loop that this client is used on.
        token_transport: "bus", or "handle" for streaming through the handle.
        loads: of the pool; told when a replica has taken a request. By default nobody's.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        listener: BusListener,
        token_transport: str,
        loads: PoolLoads | None = None,
    ) -> None:
        assert token_transport in ("bus", "handle"), token_transport
        self._handle = handle
        self._listener = listener
        self._loads = loads or PoolLoads()
        self._use_bus = token_transport == "bus"
        self._info: EngineInfo | None = None
        self._golden: asyncio.Task[bool] | None = None
        self._calls: set[asyncio.Task[GenerationReply]] = set()
        self._load: ReplicaLoad | None = None

    async def info(self) -> EngineInfo:
        if self._info is None:
            self._info = await self._ask_info()
        return self._info

    async def ready(self) -> bool:
        """True when the engine has answered a prompt through the whole path, and its replica answers.

        After a replica that does not, the engine that takes its place has to answer a prompt of its own.
        """
        golden = self._golden
        if golden is None or (golden.done() and (golden.cancelled() or not golden.result())):
            # in a context of its own: Serve cancels the calls of an HTTP request whose client has gone, and
            # the next one is to find this prompt on its way
            golden = asyncio.create_task(self._answer_golden_prompt(), context=Context())
            self._golden = golden
        try:
            async with asyncio.timeout(_QUICK_CALL_S):
                await asyncio.wait((golden,))
                if not golden.cancelled() and golden.result():
                    self._info = await self._ask_info()
                    return True
        except PoolError:
            self._golden = None
        except TimeoutError:
            return False
        return False

    def pools(self) -> list[PoolState]:
        return []

    def load(self) -> ReplicaLoad | None:
        loads = self._listener.loads
        return sum_loads(loads) if loads else self._load

    async def refresh_load(self) -> None:
        if self._use_bus:
            # each step brings one
            return
        try:
            async with asyncio.timeout(_QUICK_CALL_S):
                self._load = await self._handle.load.remote()
        except _CALL_ERRORS as error:
            logger.info("the pool's load is not known: %s", _first_line(error))
            self._load = None

    def full(self, priority: Priority) -> PoolBusy | None:
        """A pool by itself refuses nothing."""
        return None

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        return self._from_bus(request) if self._use_bus else self._from_handle(request)

    def _open_stream(self, request: GenerationRequest) -> Stream:
        return self._listener.open_stream(
            request.attempt,
            first_index=len(request.output_token_ids),
            on_accepted=lambda: self._loads.accepted(request.request_id),
        )

    async def _from_bus(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        stream = self._open_stream(request)
        submitted = self._submit(request, stream)
        ending = stream.failure if submitted else self._start_call(request, stream.reply_to)
        ending.add_done_callback(lambda _: stream.wake())
        ended = False
        try:
            async for output in _merge(stream, ending):
                ended = output.finished
                yield output
        except StreamOverflow as error:
            raise ReaderTooSlow(f"the answer was given up, as its client reads too slowly: {error}") from None
        finally:
            self._listener.close_stream(stream)
            if submitted or not ended:
                # even when a call is over: Serve cancels it itself when the HTTP client goes, and that
                # cancellation may die on its way to the engine. What came by the bus it keeps until this
                self._listener.cancel(stream)
            if not ended:
                ending.cancel()

    def _submit(self, request: GenerationRequest, stream: Stream) -> bool:
        """Send the request by the bus; False: its replica is not connected, or there is none."""
        chosen = self._loads.pick(request.request_id)
        if chosen is None:
            return False
        key = stream.reply_to.key
        return self._listener.submit(
            chosen, stream, lambda token: pack_submission(Submission(token, key, request))
        )

    def _start_call(self, request: GenerationRequest, reply_to: ReplyTo) -> asyncio.Task[GenerationReply]:
        call = asyncio.create_task(self._call(request, reply_to))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _call(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
        """The unary call. It outlives its caller by the moment between the bus's end and the reply."""
        try:
            response = self._handle.generate.remote(request, reply_to)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise
        except _CALL_ERRORS as error:
            return GenerationReply(failed=f"the pool's replica failed: {_first_line(error)}")

    async def _from_handle(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        stream = self._open_stream(request)
        response = self._handle.options(stream=True).stream.remote(request, stream.reply_to)
        ended = False
        try:
            async for item in response:
                output = _output_of(item) if isinstance(item, GenerationReply) else item
                ended = output.finished
                yield output
            if not ended:
                raise ReplicaFailed("the pool's replica ended a stream before its request")
        except _CALL_ERRORS as error:
            raise ReplicaFailed(f"the pool's replica failed: {_first_line(error)}") from error
        finally:
            self._listener.close_stream(stream)
            if not ended:
                response.cancel()

    async def _ask_info(self) -> EngineInfo:
        try:
            async with asyncio.timeout(_QUICK_CALL_S):
                return await self._handle.info.remote()
        except TimeoutError:
            raise PoolError(self._why_nobody_answered()) from None
        except (*_CALL_ERRORS, RuntimeError) as error:
            # the last is a dead engine's, which Serve hands on as it was raised where it calls by gRPC
            raise PoolError(f"no replica of the pool answers: {_first_line(error)}") from error

    def _why_nobody_answered(self) -> str:
        known = len(self._loads.replicas())
        if not known:
            return f"no replica of the pool is up yet; {_QUICK_CALL_S:g} s were waited for one"
        return f"none of the pool's {known} replicas answered within {_QUICK_CALL_S:g} s"

    async def _answer_golden_prompt(self) -> bool:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = GenerationRequest("golden-prompt", (0,), params)
        try:
            outputs = [output async for output in self.generate(request)]
        except (PoolError, ValueError) as error:
            logger.warning("the golden prompt was not answered: %s", error)
            return False
        if outputs[-1].error is not None:
            logger.warning("the golden prompt failed: %s", outputs[-1].error)
            return False
        return True


async def _merge(
    stream: Stream, ending: asyncio.Future[GenerationReply] | asyncio.Future[Failure]
) -> AsyncGenerator[EngineOutput, None]:
    """The request's outputs in order and without gaps, from the bus, or else from the reply.

    After a gap the bus is followed again as soon as it has sent what was missing. When the reply is there
    (`stream` is woken then) and the bus has said nothing for `_BUS_GRACE_S`, the rest comes from the reply.

    ending: the call's reply, or the failure of a request that went by the bus.
    """
    delivered = stream.first_index
    while True:
        try:
            # a timeout costs more than a token
            if not ending.done():
                output = await stream.get()
            else:
                async with asyncio.timeout(_BUS_GRACE_S):
                    output = await stream.get()
        except TimeoutError:
            break
        if output is not None:
            delivered += len(output.token_ids)
            yield output
            if output.finished:
                return
        elif _reply_of(ending.result()).output is None:
            break
    yield after(_output_of(_reply_of(ending.result())), delivered)


def _reply_of(ending: GenerationReply | Failure) -> GenerationReply:
    if isinstance(ending, Failure):
        return GenerationReply(refused=ending.refused, failed=ending.failed)
    return ending


def _output_of(reply: GenerationReply) -> EngineOutput:
    """Raises ValueError or ReplicaFailed when the reply is an error."""
    if reply.refused is not None:
        raise ValueError(reply.refused)
    if reply.output is None:
        raise ReplicaFailed(reply.failed)
    return reply.output


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}"
