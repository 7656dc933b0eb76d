"""The thread that steps an engine, and the inbox through which requests and cancels reach it.

Knows nothing of Ray, event loops or sockets: it tells an `EngineEvents` what happens, on its own thread. The
engine is built, used and dropped on this one thread.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

CHECK_S = 0.5
"""How often an engine without work is asked whether it could do any."""


class Engine(Protocol):
    """What the loop needs of an engine."""

    model_config: ModelConfig
    max_model_len: int
    max_num_seqs: int

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Raises ValueError when the request cannot be served."""

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[EngineOutput]: ...

    def has_unfinished(self) -> bool: ...

    def check(self) -> None:
        """Raises when no step can be made any more."""

    def load(self) -> EngineLoad: ...


@dataclass(frozen=True)
class BuiltEngine:
    """What an engine's factory returns."""

    engine: Engine
    device: str
    dtype: str


EngineFactory = Callable[[], BuiltEngine]


class EngineEvents(Protocol):
    """Called on the loop's thread; must return at once."""

    def started(self, info: EngineInfo) -> None: ...

    def stepped(self, outputs: list[EngineOutput], load: EngineLoad) -> None: ...

    def refused(self, request_id: str, message: str) -> None:
        """The request is not what the engine takes; `message` is for the client."""

    def failed(self, request_id: str, message: str) -> None:
        """The engine could not take the request, for a reason that is not the client's."""

    def died(self, message: str) -> None:
        """The engine could not be built, or a step failed; nothing more will come."""


class EngineLoop:
    """Steps the engine while it has work, and sleeps on a condition while it has none.

    Args:
        factory: builds the engine; called on the loop's thread.
        events: is told what happens.
    """

    def __init__(self, factory: EngineFactory, events: EngineEvents) -> None:
        self._factory = factory
        self._events = events
        self._inbox: deque[GenerationRequest | str] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._num_turns = 0
        self.turn: int | None = None
        """The number of the turn that is being made, for who watches from outside; None while there is
        nothing to do."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        self._put(request)

    def abort(self, request_id: str) -> None:
        """Free what the request holds before the next step; an unknown id is no error."""
        self._put(request_id)

    def close(self) -> None:
        """Stop after the current step and wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, message: GenerationRequest | str) -> None:
        with self._changed:
            self._inbox.append(message)
            self._changed.notify()

    def _run(self) -> None:
        try:
            built = self._factory()
        except Exception as error:
            # a ValueError is the configuration's, and says all there is to say
            logger.error(
                "the engine could not be built: %s", error, exc_info=not isinstance(error, ValueError)
            )
            self._events.died(_name(error))
            return
        try:
            self._events.started(_describe(built))
            while not self._closing:
                self._turn(built.engine)
        except Exception as error:
            logger.exception("the engine died")
            self._events.died(_name(error))

    def _turn(self, engine: Engine) -> None:
        """Wait for work, take in what has arrived, make one step."""
        busy = engine.has_unfinished()
        with self._changed:
            while not (busy or self._inbox or self._closing):
                if not self._changed.wait(CHECK_S):
                    engine.check()
            messages = list(self._inbox)
            self._inbox.clear()
        self._num_turns += 1
        self.turn = self._num_turns
        for message in messages:
            self._take(engine, message)
        outputs = engine.step() if engine.has_unfinished() else []
        self._events.stepped(outputs, engine.load())
        self.turn = None

    def _take(self, engine: Engine, message: GenerationRequest | str) -> None:
        if isinstance(message, str):
            engine.abort(message)
            return
        try:
            begun = (message.output_token_ids,) if message.output_token_ids else ()
            engine.add_request(message.request_id, list(message.prompt_token_ids), message.params, *begun)
        except ValueError as error:
            self._events.refused(message.request_id, str(error))
        except Exception as error:
            # one request that trips over a bug must not end the others
            logger.exception("request %s could not be added", message.request_id)
            self._events.failed(message.request_id, _name(error))


def _describe(built: BuiltEngine) -> EngineInfo:
    engine = built.engine
    return EngineInfo(
        model_type=engine.model_config.model_type,
        vocab_size=engine.model_config.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        dtype=built.dtype,
        device=built.device,
    )


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
