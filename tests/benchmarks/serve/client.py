"""The HTTP side of the load generator: one streamed completion, and a load of them sent at their times.

aiohttp, as it takes 0.6 times httpx's CPU for a server-sent event (docs/log.md).
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from hybridserve.cluster.ingress.errors import REJECT_REASON_HEADER
from hybridserve.cluster.ingress.priority import HEADER as PRIORITY_HEADER
from hybridserve.cluster.simulation.outcomes import OK, Outcome
from hybridserve.cluster.simulation.workload import Arrival

_TICK_S = 0.005
_LEAD_S = 0.2


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    url: str
    """Without a slash at the end."""
    model: str
    api_key: str | None = None
    timeout_s: float = 300.0
    """Of a whole answer."""


@dataclass
class Measured:
    """What a load gave."""

    began: float = 0.0
    """What the arrivals' times count from, by `time.perf_counter`."""
    outcomes: list[Outcome] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between two events of an answer, of all answers that ended well."""
    late_s: list[float] = field(default_factory=list)
    """By how much each request was sent after its time: the client's own delay."""
    loop_delay_s: list[float] = field(default_factory=list)
    """By how much a timer of the client's event loop fired late."""
    cpu_share: float = 0.0
    """Of one core, that the client used."""


@dataclass
class _Stream:
    """One answer as it comes."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def take(self, chunk: bytes, now: float) -> None:
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                self.done = True
                continue
            value = json.loads(data)
            if "error" in value:
                self.error = f"error event {value['error'].get('code') or value['error'].get('message')}"
            elif value.get("choices"):
                self.times.append(now)
            if value.get("usage"):
                self.tokens = value["usage"]["completion_tokens"]


class LoadClient:
    """Streams completions of one server."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self._target = target
        self._session = session

    def body(self, arrival: Arrival, prompt: Sequence[int]) -> bytes:
        """The request, made beforehand so that the load itself costs little."""
        return json.dumps(
            {
                "model": self._target.model,
                "prompt": list(prompt),
                "max_tokens": arrival.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                # a token without text of its own would be no event
                "skip_special_tokens": False,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def send(self, arrival: Arrival, body: bytes, due: float, gaps_s: list[float]) -> Outcome:
        """`due`: when it was to be sent, by `time.perf_counter`; all times count from there."""
        stream = _Stream()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                end = await self._receive(arrival, body, stream)
        except TimeoutError:
            end = "timeout"
        except aiohttp.ClientError as error:
            end = type(error).__name__
        now = time.perf_counter()
        if end == OK:
            gaps_s += [later - one for one, later in zip(stream.times, stream.times[1:], strict=False)]
        return Outcome(
            arrival.at_s,
            arrival.length,
            arrival.prompt_tokens,
            stream.tokens,
            stream.times[0] - due if stream.times else None,
            (stream.times[-1] if end == OK else now) - due,
            end,
        )

    async def _receive(self, arrival: Arrival, body: bytes, stream: _Stream) -> str:
        """How it ended."""
        headers = {"Content-Type": "application/json", PRIORITY_HEADER: arrival.priority}
        if self._target.api_key is not None:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        path = f"{self._target.url}/v1/completions"
        async with self._session.post(path, data=body, headers=headers) as response:
            if response.status != 200:
                return f"{response.status} {response.headers.get(REJECT_REASON_HEADER) or response.reason}"
            async for chunk in response.content.iter_any():
                stream.take(chunk, time.perf_counter())
        if stream.error is not None:
            return stream.error
        return OK if stream.done and stream.times else "broken stream"


async def drive(
    target: Target, arrivals: Sequence[Arrival], prompt_of: Callable[[int], Sequence[int]]
) -> Measured:
    """Send every request at its time, whatever became of those before it.

    prompt_of: token ids of a prompt of so many tokens.
    """
    measured = Measured()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        client = LoadClient(target, session)
        bodies = [client.body(one, prompt_of(one.prompt_tokens)) for one in arrivals]
        watch = asyncio.create_task(_watch_loop(measured.loop_delay_s))
        cpu, began = time.process_time(), time.perf_counter() + _LEAD_S
        measured.began = began
        tasks = []
        for arrival, body in zip(arrivals, bodies, strict=True):
            due = began + arrival.at_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            measured.late_s.append(time.perf_counter() - due)
            tasks.append(asyncio.create_task(client.send(arrival, body, due, measured.gaps_s)))
        measured.outcomes = list(await asyncio.gather(*tasks))
        measured.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began + _LEAD_S)
        watch.cancel()
    return measured


async def _watch_loop(delays: list[float]) -> None:
    while True:
        due = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        delays.append(max(0.0, time.perf_counter() - due))
