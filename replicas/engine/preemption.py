"""What happens to a running request when the arena is full."""

from typing import Protocol

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.engine.request import Request


class Preemption(Protocol):
    """A way to take a request's unit and pages from it so that it can go on later."""

    def release(self, request: Request) -> None:
        """Free what the request holds of the arena; it is scheduled again as a waiting request."""


class RecomputePreemption:
    """Forget what was computed; prompt and output so far are prefilled again when there is room."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def release(self, request: Request) -> None:
        self._arena.release(request.unit_table, request.page_table)
        request.num_computed_tokens = 0
        if request.wants_prompt_logprobs:
            # half a prompt's worth is worth nothing: its chunks are run again
            request.prompt_logprobs.clear()
