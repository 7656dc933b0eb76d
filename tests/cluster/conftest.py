"""A small engine without a model, and one Ray instance for all tests that need one."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.cluster.serve_alpha import edge
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams

DIES_ON = 666
EXITS_ON = 777
REFUSES_ABOVE = 100


class FakeEngine:
    """Answers with `first_token(prompt), +1, +2 …`, one token a step and request; aware of aborts."""

    def __init__(self, step_s: float) -> None:
        self.model_config = ModelConfig("fake", 1000, 8, 8, 1e-6, True, 256, "float32", ())
        self.max_model_len = 256
        self.max_num_seqs = 64
        self.step_s = step_s
        self.steps = 0
        self.running: dict[str, list[int]] = {}
        self.limits: dict[str, tuple[int, int]] = {}
        self.dead: str | None = None

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        if len(prompt_token_ids) > REFUSES_ABOVE:
            raise ValueError(f"prompt of {len(prompt_token_ids)} tokens, at most {REFUSES_ABOVE} fit")
        if EXITS_ON in prompt_token_ids:
            os._exit(3)
        self.running[request_id] = list(output_token_ids)
        self.limits[request_id] = (sum(prompt_token_ids), params.max_tokens or 16)

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def check(self) -> None:
        if self.dead is not None:
            raise RuntimeError(self.dead)

    def step(self) -> list[EngineOutput]:
        time.sleep(self.step_s)
        self.steps += 1
        outputs = []
        for request_id, tokens in list(self.running.items()):
            first, limit = self.limits[request_id]
            if first == DIES_ON:
                raise RuntimeError("the fake engine was told to die")
            tokens.append(first + len(tokens))
            reason = "length" if len(tokens) == limit else None
            outputs.append(EngineOutput(request_id, len(tokens) - 1, (tokens[-1],), finish_reason=reason))
            if reason:
                del self.running[request_id]
        return outputs

    def load(self) -> EngineLoad:
        return EngineLoad(len(self.running), 0, 0, 0, 8, 0, 8, 8, self.step_s * 1000, 0, self.steps)


@dataclass(frozen=True)
class FakeFactory:
    """Builds a FakeEngine, or fails with `error`."""

    step_s: float = 0.002
    error: str | None = None

    def __call__(self) -> BuiltEngine:
        if self.error is not None:
            raise ValueError(self.error)
        return BuiltEngine(FakeEngine(self.step_s), "cpu", "float32")


@pytest.fixture
def anyio_backend() -> str:
    """What runs tests marked `anyio`."""
    return "asyncio"


@pytest.fixture
def fake_factory() -> Callable[..., FakeFactory]:
    return FakeFactory


@pytest.fixture(scope="session")
def ray_instance(free_port: Callable[[], int]) -> Iterator[int]:
    """Ray with enough logical CPUs for everything the tests start, and Serve on a free port, which it is."""
    # imported here: most tests of the cluster room need no Ray, and it takes two seconds
    import ray
    from ray import cloudpickle, serve

    cloudpickle.register_pickle_by_value(sys.modules[FakeFactory.__module__])
    with pytest.MonkeyPatch.context() as environment:
        # the processes that start inherit it, as from `hybridserve serve`; what else that sets is about speed
        environment.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", edge.IMPORT_PATH)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            configure_logging=False,
            log_to_driver=False,
        )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()
