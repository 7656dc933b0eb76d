"""An engine without a model whose answers can be checked token by token, wherever they were computed."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams

# of the demo model's tokens, a stretch that are all plain text
_FIRST, _COUNT = 340, 140
CONTEXT = 20_000


def answer(prompt_token_ids: Sequence[int], count: int, start: int = 0) -> list[int]:
    """The tokens of an answer from index `start` to `count`."""
    total = sum(prompt_token_ids)
    return [_FIRST + (total + index) % _COUNT for index in range(start, count)]


class CountingEngine:
    """One token a step for each of at most `max_num_seqs` requests, the others wait."""

    def __init__(self, step_s: float, max_num_seqs: int) -> None:
        self.model_config = ModelConfig("counting", 8192, 8, 8, 1e-6, True, CONTEXT, "float32", ())
        self.max_model_len = CONTEXT
        self.max_num_seqs = max_num_seqs
        self._step_s = step_s
        self._steps = 0
        self._waiting: deque[str] = deque()
        self._running: dict[str, tuple[int, int, int]] = {}
        """By request: the prompt's sum, tokens so far, and how many there will be."""
        self._requests: dict[str, tuple[int, int, int]] = {}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        assert list(output_token_ids) == answer(prompt_token_ids, len(output_token_ids))
        self._requests[request_id] = (sum(prompt_token_ids), len(output_token_ids), params.max_tokens or 16)
        self._waiting.append(request_id)

    def abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None and self._running.pop(request_id, None) is None:
            self._waiting.remove(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def check(self) -> None:
        """It can always step."""

    def step(self) -> list[EngineOutput]:
        time.sleep(self._step_s)
        self._steps += 1
        while self._waiting and len(self._running) < self.max_num_seqs:
            request_id = self._waiting.popleft()
            self._running[request_id] = self._requests[request_id]
        outputs = []
        for request_id, (total, count, limit) in list(self._running.items()):
            self._running[request_id] = (total, count + 1, limit)
            reason = "length" if count + 1 == limit else None
            [token_id] = answer([total], count + 1, count)
            outputs.append(EngineOutput(request_id, count, (token_id,), finish_reason=reason))
            if reason is not None:
                del self._running[request_id], self._requests[request_id]
        return outputs

    def load(self) -> EngineLoad:
        running, waiting = len(self._running), len(self._waiting)
        return EngineLoad(
            running, waiting, waiting, running, 100, 0, 0, 100, self._step_s * 1e3, 0, self._steps
        )


@dataclass(frozen=True)
class CountingFactory:
    """Builds a CountingEngine."""

    step_s: float = 0.01
    max_num_seqs: int = 64

    def __call__(self) -> BuiltEngine:
        return BuiltEngine(CountingEngine(self.step_s, self.max_num_seqs), "cpu", "float32")
