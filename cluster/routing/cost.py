"""What a request weighs, in tokens, and how that shrinks as its answer comes.

Both ends of the bus count with this: the ingress what it has sent, the engine's actor what it holds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

EXPECTED_ANSWER_TOKENS = 256
"""Of a client that did not say `max_tokens`, which is most of them."""


@dataclass(frozen=True)
class Cost:
    """Tokens of one request."""

    prompt_tokens: int
    answer_tokens: int
    """As expected: most answers end before their limit, and some after `EXPECTED_ANSWER_TOKENS`."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def cost_of(prompt_tokens: int, max_tokens: int | None, stated_max_tokens: int | None) -> Cost:
    """The cost of a request.

    max_tokens: the answer's limit in force. stated_max_tokens: what the client asked for, None if it did not.
    """
    if stated_max_tokens is not None:
        return Cost(prompt_tokens, stated_max_tokens)
    return Cost(prompt_tokens, min(max_tokens or EXPECTED_ANSWER_TOKENS, EXPECTED_ANSWER_TOKENS))


@dataclass
class _Entry:
    remaining: int
    prompt_tokens: int
    arrival: float
    started: bool = False


class Backlog:
    """The outstanding tokens of one engine's requests.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # in order of arrival: the first that has not started is the oldest
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, _Entry] = {}
        self.outstanding_tokens = 0
        self.queued_tokens = 0
        """Of prompts without a first token."""
        self.progressed_tokens = 0
        self.started_tokens = 0

    def add(self, name: str, cost: Cost) -> None:
        assert name not in self._entries, name
        entry = _Entry(cost.tokens, cost.prompt_tokens, self._clock())
        self._entries[name] = self._waiting[name] = entry
        self.outstanding_tokens += entry.remaining
        self.queued_tokens += entry.prompt_tokens

    def progress(self, name: str, tokens: int) -> None:
        """`tokens` more of the answer are there; the first of them say that the prompt is computed."""
        entry = self._entries.get(name)
        if entry is None or tokens == 0:
            return
        done = tokens
        if not entry.started:
            self._leave_queue(name, entry)
            self.started_tokens += entry.prompt_tokens
            done += entry.prompt_tokens
        self.progressed_tokens += done
        released = min(done, entry.remaining)
        entry.remaining -= released
        self.outstanding_tokens -= released

    def end(self, name: str) -> None:
        """The request is over, however it ended; an unknown name is no error."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            if not entry.started:
                self._leave_queue(name, entry)
            self.outstanding_tokens -= entry.remaining

    def queue_age_s(self) -> float:
        """Seconds that the oldest request without a first token has waited, 0 without one."""
        oldest = next(iter(self._waiting.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.arrival

    def _leave_queue(self, name: str, entry: _Entry) -> None:
        entry.started = True
        del self._waiting[name]
        self.queued_tokens -= entry.prompt_tokens
