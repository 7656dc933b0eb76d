"""What is noted of one HTTP request while it runs, for its log line, its trace and its metrics.

One note for a request and one for each of its answers; both travel in context variables, so that whoever
learns something (the router which pool, a client which attempt) writes it down where it is. Never the text or
the tokens of a prompt or an answer.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from hybridserve.replicas.sampling_params import SamplingParams


@dataclass
class AnswerTrail:
    """One answer; times are `time.monotonic` seconds of this process."""

    prompt_tokens: int = 0
    params: SamplingParams | None = None
    priority: str = ""
    sent: float = 0.0
    pool: str = ""
    """Filled by the router."""
    replica: str = ""
    """Filled by the router, once it is known."""
    attempt: int = 1
    """How often it was sent to a replica."""
    scheduled: float | None = None
    """When the engine first computed something of it, by that host's wall clock."""
    first_token: float | None = None
    ended: float | None = None
    generation_tokens: int = 0
    preemptions: int = 0
    finish_reason: str = ""


@dataclass
class RequestTrail:
    """One HTTP request."""

    request_id: str = ""
    """The `x-request-id` that the client is told."""
    method: str = ""
    route: str = ""
    """The path, if there is an endpoint of that path, else "other"."""
    traceparent: str = ""
    """W3C's header, as the client sent it."""
    tracestate: str = ""
    began: float = field(default_factory=time.monotonic)
    began_wall: float = field(default_factory=time.time)
    ended: float | None = None
    status: int = 0
    """0 when the client left before there was one."""
    streamed: bool = False
    answer_id: str | None = None
    """As its chunks have it; None before there is an answer."""
    answers: list[AnswerTrail] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """(name, begin, end) of what this process did before the answers."""

    def wall(self, moment: float) -> float:
        """Seconds since the epoch of one of this trail's moments."""
        return self.began_wall + moment - self.began

    def moment(self, wall: float) -> float:
        """The reverse: hosts' wall clocks are taken to agree."""
        return self.began + wall - self.began_wall

    def scheduled(self, answer: AnswerTrail) -> float | None:
        """The moment at which the engine began with it; between its neighbours, whatever two clocks say."""
        if answer.scheduled is None:
            return None
        latest = answer.first_token or answer.ended or time.monotonic()
        return min(max(answer.sent, self.moment(answer.scheduled)), latest)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes how long the body takes."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases.append((name, begin, time.monotonic()))


_request: ContextVar[RequestTrail | None] = ContextVar("hybridserve_request", default=None)
_answer: ContextVar[AnswerTrail | None] = ContextVar("hybridserve_answer", default=None)


def current_request() -> RequestTrail:
    """The trail of the request that this code runs for; one that nobody reads outside of any."""
    return _request.get() or RequestTrail()


def current_request_id() -> str:
    """ "" outside of any request."""
    trail = _request.get()
    return "" if trail is None else trail.request_id


def current_answer() -> AnswerTrail:
    """The trail of the answer that this code runs for; one that nobody reads outside of any."""
    return _answer.get() or AnswerTrail()


def follow(trail: RequestTrail) -> None:
    """Make it the current one, for this task and those it starts."""
    _request.set(trail)
    _answer.set(None)


def new_answer(prompt_tokens: int, params: SamplingParams, priority: str) -> AnswerTrail:
    """The current request's next answer, which becomes the current one."""
    answer = AnswerTrail(prompt_tokens, params, priority, time.monotonic())
    current_request().answers.append(answer)
    _answer.set(answer)
    return answer
