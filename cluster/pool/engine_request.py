"""A request in the engine's process: what is known of it, and what is said of its end.

Knows nothing of the engine, or of who holds the request.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from hybridserve.cluster.bus.frames import Failure, pack_failure
from hybridserve.cluster.bus.sender import Channel
from hybridserve.cluster.observe.logs import log_event
from hybridserve.cluster.pool.record import GenerationReply, OutputRecord
from hybridserve.replicas.engine.plan import EngineOutput

logger = logging.getLogger(__name__)


@dataclass
class EngineRequest:
    """From its submission to its end."""

    record: OutputRecord
    client_request_id: str
    reply: asyncio.Future[GenerationReply]
    key: bytes
    attempt: int = 0
    channel: Channel | None = None
    """None when the tokens go back by the call itself."""
    epoch: int = 0
    """The channel's epoch when this stream's news last went out in full."""
    stream: asyncio.Queue[EngineOutput | None] = field(default_factory=asyncio.Queue)
    """Used by `EngineActor.stream` alone; None: the reply is there."""
    by_bus: bool = False
    """It came by the bus; nobody waits for the reply."""

    def send_failure(self) -> None:
        """Where it has ended without output and no call says so."""
        if self.by_bus and self.reply.done() and self.reply.result().output is None:
            reply = self.reply.result()
            self.channel.send(pack_failure(Failure(self.key, self.attempt, reply.refused, reply.failed)))

    def log_end(self, reply: GenerationReply) -> None:
        """The ingress has a line of each request; here only what went wrong is for everyone to read."""
        output = reply.output
        wrong = output is None or output.finish_reason == "error"
        log_event(
            logger,
            logging.WARNING if wrong else logging.DEBUG,
            "engine_request",
            request_id=self.client_request_id,
            attempt=self.attempt,
            finish_reason="" if output is None else output.finish_reason,
            generation_tokens=0 if output is None else len(output.token_ids),
            error=reply.failed or reply.refused or (output.error if output else None),
        )
