"""An engine without a model: a step is as long as it is told, and one token for each request."""

import time
from dataclasses import dataclass

from hybridserve.cluster.garbage import collect_rarely
from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams

MAX_SEQUENCES = 1024


class FakeEngine:
    """Steps of `step_s` seconds of sleep, and what it takes to make a step's outputs."""

    def __init__(self, step_s: float, token_id: int) -> None:
        self.model_config = ModelConfig("fake", 100_000, 8, 8, 1e-6, True, 256, "float32", ())
        self.max_model_len = 1_000_000
        self.max_num_seqs = MAX_SEQUENCES
        self._step_s = step_s
        self._token_ids = (token_id,)
        self._running: dict[str, tuple[int, int]] = {}
        self._steps = 0

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._running[request_id] = (0, params.max_tokens or 16)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def check(self) -> None:
        """It cannot break."""

    def step(self) -> list[EngineOutput]:
        time.sleep(self._step_s)
        self._steps += 1
        outputs = []
        for request_id, (done, limit) in list(self._running.items()):
            last = done + 1 == limit
            reason = "length" if last else None
            outputs.append(EngineOutput(request_id, done, self._token_ids, finish_reason=reason))
            if last:
                del self._running[request_id]
            else:
                self._running[request_id] = (done + 1, limit)
        return outputs

    def load(self) -> EngineLoad:
        running = len(self._running)
        return EngineLoad(running, 0, 0, 0, 8, 0, 8, 8, self._step_s * 1000, 0, self._steps)


@dataclass(frozen=True)
class FakeFactory:
    """Builds a FakeEngine."""

    step_s: float
    token_id: int

    def __call__(self) -> BuiltEngine:
        collect_rarely()
        return BuiltEngine(FakeEngine(self.step_s, self.token_id), "cpu", "float32")
