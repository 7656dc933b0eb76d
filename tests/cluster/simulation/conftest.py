"""Engines of simple steps, and clusters of them."""

from collections.abc import Callable

import pytest

from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.cluster.simulation.engine import EngineModel
from hybridserve.cluster.simulation.step_curve import StepCurve

OPEN = PoolLimits(10**9, 10**9, 1e9, 1.0, 1.0)


@pytest.fixture
def constant_steps() -> Callable[..., EngineModel]:
    """constant_steps(step_s, **engine): every step takes the same time."""

    def make(step_s: float = 1.0, **engine: object) -> EngineModel:
        curve = StepCurve("constant", ((1, step_s),), ((1, step_s),))
        return EngineModel(curve, **{"max_num_seqs": 8, "max_num_batched_tokens": 2048, **engine})

    return make


@pytest.fixture
def one_server() -> Callable[..., EngineModel]:
    """one_server(token_s): a queue's server: one request at a time, `token_s` for a token of its prompt."""

    def make(token_s: float) -> EngineModel:
        curve = StepCurve("proportional", ((1, 0.0),), ((0, 0.0), (1, token_s)))
        return EngineModel(curve, max_num_seqs=1, max_num_batched_tokens=10**9)

    return make


@pytest.fixture
def pool_spec() -> Callable[..., PoolSpec]:
    """pool_spec(name, replicas, above, up_to, borrows, limits)"""

    def make(
        name: str = "pool",
        replicas: int | tuple[int, int] = 1,
        above: int = 0,
        up_to: int | None = None,
        borrows: tuple[str, ...] = (),
        limits: PoolLimits = OPEN,
    ) -> PoolSpec:
        span = (replicas, replicas) if isinstance(replicas, int) else replicas
        return PoolSpec(name, above, up_to, 1, ReplicaRange(*span), borrows, limits)

    return make
