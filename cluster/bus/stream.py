"""One request's news on their way out of the bus: put in order, once each, and no more than fit.

Knows nothing of sockets. Filled by the listener, emptied by the request's owner, both on one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from hybridserve.cluster.bus.frames import Failure, ReplyTo
from hybridserve.cluster.bus.joined import joined
from hybridserve.cluster.bus.pace import Pace
from hybridserve.replicas.engine.plan import EngineOutput

MAX_UNREAD_TOKENS = 4096
"""Of one stream: as many as a fast engine makes while a client's network pauses for half a minute."""

Taken = Literal["new", "nothing", "duplicate", "gap", "overflow"]


class StreamOverflow(Exception):
    """The stream's owner has read too slowly; what was queued is gone."""


def after(output: EngineOutput, index: int) -> EngineOutput:
    """What `output` says from the request's output token `index` on, not having said what comes before."""
    known = index - output.first_index
    if known <= 0:
        return output
    return replace(
        output,
        first_index=index,
        token_ids=output.token_ids[known:],
        logprobs=output.logprobs[known:],
        prompt_logprobs=(),
    )


class Stream:
    """News of one attempt of one request.

    Args:
        reply_to: names it to the engine.
        first_index: of the first token that is expected; earlier ones are known.
        on_accepted: called once, when an engine has taken the request and its load counts it.
        max_unread_tokens: with so many unread, the next news overflow the stream.
        pace: how often it is read after its first news; None: whenever there are any.
    """

    def __init__(
        self,
        reply_to: ReplyTo,
        first_index: int = 0,
        on_accepted: Callable[[], None] | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        pace: Pace | None = None,
    ) -> None:
        self.reply_to = reply_to
        self.first_index = first_index
        self.next_index = first_index
        """Of the token that is to be taken in next."""
        self.writer: asyncio.StreamWriter | None = None
        """The connection that the last news came by, or the request went by."""
        self.failure: asyncio.Future[Failure] | None = None
        """Of a request that went by the bus: its end when it comes without output."""
        self.overflowed = False
        self._on_accepted = on_accepted
        self._max_unread_tokens = max_unread_tokens
        self._unread_tokens = 0
        self._finished = False
        self._news: deque[EngineOutput | None] = deque()
        self._pace = pace
        self._urgent = False
        """Something of the news is to be read at once."""
        self._held = False
        """The pace will rouse it; until then its tokens cost next to nothing."""
        self._read_at = 0.0
        self._waiter: asyncio.Future[None] | None = None

    def take(self, output: EngineOutput) -> Taken:
        """Queue what is new in `output`; news that leave a gap wait for nobody, as they will come again."""
        if self._on_accepted is not None:
            self._on_accepted()
            self._on_accepted = None
        if self.overflowed or self._finished:
            return "duplicate"
        if output.first_index > self.next_index:
            return "gap"
        fresh = after(output, self.next_index)
        if not fresh.token_ids and not fresh.finished:
            return "duplicate" if output.token_ids else "nothing"
        # before they are counted: one resend of a long answer is no sign of a slow reader
        if self._unread_tokens >= self._max_unread_tokens:
            self._overflow()
            return "overflow"
        self.next_index += len(fresh.token_ids)
        self._unread_tokens += len(fresh.token_ids)
        self._finished = fresh.finished
        self._put(fresh, urgent=fresh.finished or fresh.first_index == self.first_index)
        return "new"

    def fail(self, failure: Failure) -> None:
        """The request has ended without output; of one that went by a call, the call says so."""
        if self.failure is not None and not self.failure.done():
            self.failure.set_result(failure)

    def wake(self) -> None:
        """Let `get` return None once, after the news that are queued."""
        self._put(None, urgent=True)

    async def get(self) -> EngineOutput | None:
        """All news that are there, as one, or the next; in order and without gaps. One caller at a time.

        Raises:
            StreamOverflow: they came faster than they were read.
        """
        while not self._news or not self.due():
            if self.overflowed:
                raise StreamOverflow(f"{self._max_unread_tokens} tokens were not read")
            if self._news and not self._held:
                self._hold()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pace is not None:
            self._read_at = self._pace.clock()
        news = self._take_all()
        # what is left follows at once
        self._urgent = bool(self._news)
        return news

    def _take_all(self) -> EngineOutput | None:
        if self._news[0] is None:
            return self._news.popleft()
        fresh = []
        # the first token goes alone, as the time of its step is told
        while self._news and self._news[0] is not None and (not fresh or fresh[0].first_index):
            fresh.append(self._news.popleft())
        news = joined(fresh)
        self._unread_tokens -= len(news.token_ids)
        return news

    def due(self, now: float | None = None) -> bool:
        """Whether news are to be read now."""
        pace = self._pace
        if self._urgent or pace is None or not pace.interval_s:
            return True
        return (pace.clock() if now is None else now) - self._read_at >= pace.interval_s

    def _put(self, news: EngineOutput | None, urgent: bool) -> None:
        self._news.append(news)
        if urgent:
            self._urgent = True
            self.rouse()
        elif self._held:
            return
        elif self.due():
            self.rouse()
        else:
            self._hold()

    def _hold(self) -> None:
        self._held = True
        self._pace.hold(self)

    def _overflow(self) -> None:
        self.overflowed = True
        self._news.clear()
        self.rouse()

    def rouse(self) -> None:
        """Let the reader see what there is."""
        self._held = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
