"""The engine's own process: requests come in by actor calls or the token bus, tokens go out by the bus.

Owns which requests there are and their way out. Knows nothing of Serve, and imports no torch: the engine's
factory does, in this process alone. Everything but the step loop runs on the actor's event loop.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from hybridserve.cluster.access.bus_tls import sender_context
from hybridserve.cluster.access.options import BusTls
from hybridserve.cluster.bus.frames import KEY_BYTES, Entry, ReplyTo, pack_entry
from hybridserve.cluster.bus.sender import BusSender, Channel
from hybridserve.cluster.bus.submission import Submission
from hybridserve.cluster.observe.logs import LogOptions, set_up_logging
from hybridserve.cluster.pool.engine_loop import EngineFactory, EngineLoop
from hybridserve.cluster.pool.engine_request import EngineRequest
from hybridserve.cluster.pool.golden import golden_fault, golden_request
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.pool.record import GenerationReply, OutputRecord
from hybridserve.cluster.pool.unheard import Unheard
from hybridserve.cluster.pool.watchdog import StepWatchdog
from hybridserve.cluster.routing.cost import Backlog, cost_of
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput

# the longest that an ingress may go by an old load while the engine steps
_LOAD_PERIOD_S = 0.1
# streams that are said again in one go after a broken connection
_CAUGHT_UP_AT_ONCE = 16


class EngineActor:
    """Made a Ray actor by the pool's replica; plain so that tests can run it on their own event loop.

    The engine knows requests by their stream's key in hex, which is unique, whatever ids clients choose.

    Args:
        factory: builds the engine, on the step thread.
        pool: the name of the pool, for log lines.
        logs: how its process logs; None: as it does already.
        bus_tls: certificates for the token bus; None: in the clear.
        stuck_after_s: how long a step may take before the engine counts as dead.
    """

    def __init__(
        self,
        factory: EngineFactory,
        pool: str = "",
        logs: LogOptions | None = None,
        bus_tls: BusTls | None = None,
        stuck_after_s: float = 60.0,
    ) -> None:
        self._pool = pool
        self._logs = logs
        self._bus_tls = bus_tls
        self._stuck_after_s = stuck_after_s
        self._watching: asyncio.Task[None] | None = None
        self._loop = EngineLoop(factory, _OnEventLoop(self))
        self._requests: dict[str, EngineRequest] = {}
        self._unheard: Unheard[EngineRequest] = Unheard(lambda one: self._sender.close_stream(one.channel))
        self._accepted: list[EngineRequest] = []
        """Came by the bus; their ingress is to be told so."""
        self._last_load: EngineLoad | None = None
        self._last_load_sent = 0.0
        self._backlog = Backlog()
        self._death: str | None = None

    async def start(self, replica: str = "") -> EngineInfo | str:
        """Build the engine and have it answer the golden prompt, through all of its shards. Returns what it
        says of itself, or why it cannot serve.

        replica: the name under which its load is reported.
        """
        if self._logs is not None:
            set_up_logging(self._logs, component="engine", pool=self._pool, replica=replica)
        self.event_loop = asyncio.get_running_loop()
        self._info: asyncio.Future[EngineInfo | str] = self.event_loop.create_future()
        self._died: asyncio.Future[str] = self.event_loop.create_future()
        try:
            tls = None if self._bus_tls is None else sender_context(self._bus_tls)
        except ValueError as error:
            return str(error)
        self._sender = BusSender(
            on_cancel=self.on_cancel,
            load=self._load,
            replica=replica,
            on_gone=self.on_ingress_gone,
            tls=tls,
            on_submission=self.on_submission,
            catch_up=self.catch_up,
        )
        self._loop.start()
        info = await self._info
        if isinstance(info, str):
            return info
        fault = golden_fault(info, await self._answer(golden_request(info)))
        if fault is None:
            # only now: the first steps may take longer than any other
            self._watching = asyncio.create_task(self._watch_steps())
        return fault or info

    async def ping(self) -> None:
        """Answers while the process lives, whatever its engine does."""

    async def wait_for_death(self) -> str:
        """Returns the reason, when the step loop has ended by itself."""
        return await asyncio.shield(self._died)

    async def generate(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
        """Serve a request, its tokens going to `reply_to` as they come, and in the reply at the end."""
        one = self._submit(request, reply_to, self._sender.open_stream(reply_to.address, reply_to.passes))
        try:
            # an entry without tokens: the ingress learns by which connection it can cancel
            self._send({one.channel: [(one, EngineOutput(request.request_id, first_index=0))]})
            return await one.reply
        finally:
            # the call itself may be cancelled; a request that has ended is not known any more
            self.on_abort(one.key.hex())
            self._sender.close_stream(one.channel)

    async def stream(
        self, request: GenerationRequest, reply_to: ReplyTo
    ) -> AsyncIterator[EngineOutput | GenerationReply]:
        """Serve a request without the bus: its outputs as they come, or one reply without output."""
        one = self._submit(request, reply_to, channel=None)
        try:
            while (output := await one.stream.get()) is not None:
                yield output
            reply = await one.reply
            if reply.output is None:
                yield reply
        finally:
            self.on_abort(one.key.hex())

    async def abort(self, key: bytes) -> None:
        """The caller has gone; an unknown or finished stream is no error."""
        self.on_abort(key.hex())

    async def load(self) -> ReplicaLoad | None:
        return self._load()

    async def num_requests(self) -> int:
        """That have not ended, or whose end may not have been heard of."""
        return len(self._requests) + len(self._unheard)

    async def close(self) -> None:
        """Stop stepping and close the connections (for tests; an actor's process just ends)."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.to_thread(self._loop.close)
        await self._sender.close()

    async def _answer(self, request: GenerationRequest) -> GenerationReply:
        """To a request of this process' own."""
        return await self._submit(request, ReplyTo("", 0, secrets.token_bytes(KEY_BYTES)), None).reply

    async def _watch_steps(self) -> None:
        await StepWatchdog(self._stuck_after_s).watch(lambda: self._loop.turn)
        self._die(f"the engine has made no step for {self._stuck_after_s:g} s (serving.stuck_after_s)")

    def _submit(
        self,
        request: GenerationRequest,
        reply_to: ReplyTo,
        channel: Channel | None,
        by_bus: bool = False,
    ) -> EngineRequest:
        engine_id = reply_to.key.hex()
        one = EngineRequest(
            OutputRecord(request.request_id, len(request.output_token_ids)),
            request.client_request_id,
            self.event_loop.create_future(),
            reply_to.key,
            reply_to.attempt,
            channel,
            channel.epoch if channel else 0,
            by_bus=by_bus,
        )
        if self._death is not None:
            self._finish(one, GenerationReply(failed=self._death))
            return one
        self._requests[engine_id] = one
        cost = cost_of(len(request.prompt_token_ids), request.params.max_tokens, request.stated_max_tokens)
        self._backlog.add(engine_id, cost)
        self._loop.submit(replace(request, request_id=engine_id))
        return one

    def _load(self) -> ReplicaLoad | None:
        """The engine's load after its last step, and the requests' tokens as of now."""
        if self._last_load is None:
            return None
        backlog = self._backlog
        return ReplicaLoad(
            **vars(self._last_load),
            outstanding_tokens=backlog.outstanding_tokens,
            queued_tokens=backlog.queued_tokens,
            progressed_tokens=backlog.progressed_tokens,
            started_tokens=backlog.started_tokens,
            queue_age_s=backlog.queue_age_s(),
        )

    def _send(self, by_channel: Mapping[Channel, list[tuple[EngineRequest, EngineOutput]]]) -> None:
        """One frame for each ingress; where something may have been lost, `catch_up` says all of it."""
        for channel, news in by_channel.items():
            packed = [
                pack_entry(Entry(one.key, one.attempt, output))
                for one, output in news
                if one.epoch == channel.epoch
            ]
            if packed:
                self._sender.send(channel, packed)

    def _finish(self, one: EngineRequest, reply: GenerationReply) -> None:
        if not one.reply.done():
            one.reply.set_result(reply)
            one.stream.put_nowait(None)
            one.log_end(reply)
            if one.by_bus:
                self._unheard.add(one.key.hex(), one)
                if one.epoch == one.channel.epoch:
                    one.send_failure()

    def _say_accepted(self) -> None:
        """An entry without tokens: the load that comes with it counts the request.

        To the other ingresses the load alone: a step may take longer than it is until they choose again.
        """
        by_channel: dict[Channel, list[tuple[EngineRequest, EngineOutput]]] = defaultdict(list)
        for one in self._accepted:
            by_channel[one.channel].append((one, EngineOutput("", first_index=0)))
        self._accepted.clear()
        self._send(by_channel)
        self._sender.send_load(but=by_channel.keys())

    # what follows is called on the event loop: by `_OnEventLoop` for the step thread, and by the bus

    def on_started(self, info: EngineInfo) -> None:
        self._info.set_result(info)

    def on_stepped(self, outputs: list[EngineOutput], load: EngineLoad) -> None:
        self._last_load = load
        by_channel: dict[Channel, list[tuple[EngineRequest, EngineOutput]]] = defaultdict(list)
        for output in outputs:
            one = self._requests.get(output.request_id)
            if one is None:
                # aborted while the step ran
                continue
            if output.first_index == 0 and output.first_scheduled_time:
                output = replace(output, first_scheduled_time=_on_wall_clock(output.first_scheduled_time))
            one.record.append(output)
            self._backlog.progress(output.request_id, len(output.token_ids))
            if output.finished:
                self._backlog.end(output.request_id)
            if one.channel is not None:
                by_channel[one.channel].append((one, output))
            else:
                one.stream.put_nowait(output)
        self._send(by_channel)
        now = time.monotonic()
        # a cancel or a piece of a long prompt has no tokens to send, but the load has changed; and ingresses
        # that wait for no tokens of ours choose replicas too
        if not outputs or now - self._last_load_sent > _LOAD_PERIOD_S:
            self._last_load_sent = now
            self._sender.send_load(but=by_channel.keys())
        for output in outputs:
            if output.finished and output.request_id in self._requests:
                one = self._requests.pop(output.request_id)
                self._finish(one, GenerationReply(output=one.record.merged()))

    def on_abort(self, engine_id: str) -> None:
        one = self._requests.pop(engine_id, None)
        if one is not None:
            self._backlog.end(engine_id)
            self._loop.abort(engine_id)
            self._finish(one, GenerationReply(output=replace(one.record.merged(), finish_reason="abort")))

    def on_submission(self, channel: Channel, submission: Submission) -> None:
        """A request has come by the bus."""
        reply_to = ReplyTo(*channel.address, submission.key, submission.request.attempt)
        self._sender.join_stream(channel)
        one = self._submit(submission.request, reply_to, channel, by_bus=True)
        if not self._accepted:
            # those that come together are told of together
            self.event_loop.call_soon(self._say_accepted)
        self._accepted.append(one)

    def on_cancel(self, key: bytes) -> None:
        """The ingress has given a request up, or knows how it ended."""
        self.on_abort(key.hex())
        self._unheard.forget(key.hex())

    def on_ingress_gone(self, channel: Channel) -> None:
        """Nobody is left to hear of its requests."""
        for engine_id in [name for name, one in self._requests.items() if one.channel is channel]:
            self.on_abort(engine_id)
        self._unheard.forget_where(lambda one: one.channel is channel)

    def catch_up(self, channel: Channel) -> bool:
        """Say again, of some streams, what may have been lost. Returns whether there are more of them."""
        known = (*self._requests.values(), *self._unheard)
        behind = [one for one in known if one.channel is channel and one.epoch != channel.epoch]
        for one in behind[:_CAUGHT_UP_AT_ONCE]:
            one.epoch = channel.epoch
            self._sender.send(channel, [pack_entry(Entry(one.key, one.attempt, one.record.merged()))])
            one.send_failure()
        return len(behind) > _CAUGHT_UP_AT_ONCE

    def on_rejected(self, engine_id: str, reply: GenerationReply) -> None:
        one = self._requests.pop(engine_id, None)
        if one is not None:
            self._backlog.end(engine_id)
            self._finish(one, reply)

    def on_died(self, message: str) -> None:
        if not self._info.done():
            self._info.set_result(message)
        self._die(f"the engine died: {message}")

    def _die(self, death: str) -> None:
        """Answer all requests. A step that was given up may still raise."""
        if self._death is not None:
            return
        self._death = death
        self._died.set_result(death)
        for one in self._requests.values():
            self._finish(one, GenerationReply(failed=self._death))
        self._requests.clear()


def _on_wall_clock(moment: float) -> float:
    """Of a time on this host's monotonic clock, which an ingress on another host does not share."""
    return time.time() - (time.monotonic() - moment)


class _OnEventLoop:
    """Carries the step thread's events over to the actor's event loop."""

    def __init__(self, actor: EngineActor) -> None:
        self._actor = actor

    def started(self, info: EngineInfo) -> None:
        self._actor.event_loop.call_soon_threadsafe(self._actor.on_started, info)

    def stepped(self, outputs: list[EngineOutput], load: EngineLoad) -> None:
        self._actor.event_loop.call_soon_threadsafe(self._actor.on_stepped, outputs, load)

    def refused(self, request_id: str, message: str) -> None:
        reply = GenerationReply(refused=message)
        self._actor.event_loop.call_soon_threadsafe(self._actor.on_rejected, request_id, reply)

    def failed(self, request_id: str, message: str) -> None:
        reply = GenerationReply(failed=message)
        self._actor.event_loop.call_soon_threadsafe(self._actor.on_rejected, request_id, reply)

    def died(self, message: str) -> None:
        self._actor.event_loop.call_soon_threadsafe(self._actor.on_died, message)
