"""From a configuration and a step curve to the model of a cluster."""

from dataclasses import dataclass, replace

from hybridserve.cluster.comm_expectation import H200
from hybridserve.cluster.plan import PoolPlan, plan_pools
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.simulation.cluster import ClusterModel, PoolModel
from hybridserve.cluster.simulation.engine import EngineModel
from hybridserve.cluster.simulation.scaling import Scaling
from hybridserve.cluster.simulation.step_curve import StepCurve
from hybridserve.parallel.comm_benchmark.expectation import ASSUMED_NCCL, expected_share
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.models.step_cost import step_cost


@dataclass(frozen=True)
class Assumptions:
    """What a configuration does not say."""

    device: str = "cuda"
    """"cuda": steps are planned one ahead, and 8,192 tokens are a step's by default; "cpu": 2,048."""
    shape: ModelConfig | None = None
    """None: memory is no limit, and all pools have the curve's tensor-parallel size, 1."""
    gpu_bytes: int | None = None
    dispatch_s: float = 0.001
    overhead_s: float = 0.0
    start_s: float = 20.0
    """From a decision to a replica that serves."""
    num_gpus: float | None = None
    """Of the cluster; None: as many as all pools' most replicas take."""


def cluster_model(settings: AppSettings, curve: StepCurve, given: Assumptions) -> ClusterModel:
    """The cluster that the settings describe.

    Raises:
        ValueError: a pool needs what is not given, or the model does not fit.
    """
    specs = settings.pool_specs()
    plans: dict[str, PoolPlan] = {}
    if given.shape is not None:
        device = "cuda" if given.device == "cuda" else "cpu"
        plans = {one.spec.name: one for one in plan_pools(settings, given.shape, device, given.gpu_bytes)}
    gpus = {spec.name: float(spec.tensor_parallel_size) for spec in specs}
    most = sum(spec.replicas.max * gpus[spec.name] for spec in specs)
    limits = (given.num_gpus, settings.autoscaling.max_gpus)
    max_gpus = min([most, *(limit for limit in limits if limit is not None)])
    pools = []
    for spec in specs:
        engine = _engine_model(settings, spec, curve, given, plans.get(spec.name))
        scaling = None
        if not spec.replicas.fixed:
            rule = settings.autoscaling.rule_of(spec)
            scaling = Scaling(rule, gpus[spec.name], max_gpus, given.start_s)
        pools.append(PoolModel(spec, engine, scaling, spec.replicas.min * gpus[spec.name]))
    return ClusterModel(
        tuple(pools),
        num_ingress=settings.ingress.num_replicas,
        dispatch_s=given.dispatch_s,
        overhead_s=given.overhead_s,
    )


def _engine_model(
    settings: AppSettings, spec: PoolSpec, curve: StepCurve, given: Assumptions, plan: PoolPlan | None
) -> EngineModel:
    serving = settings.serving_of(spec.name)
    if spec.tensor_parallel_size > 1:
        if given.shape is None:
            raise ValueError(
                f"pool {spec.name}: tensor_parallel_size {spec.tensor_parallel_size} needs --model, from "
                "whose shape the steps of several shards are reckoned"
            )
        curve = sharded_curve(curve, given.shape, spec.tensor_parallel_size)
    overlaps = given.device == "cuda"
    budget = serving.max_num_batched_tokens or (8192 if overlaps else 2048)
    model = EngineModel(curve, serving.max_batch_size, budget, overlaps=overlaps)
    fit = None if plan is None else plan.fit
    if fit is None or not fit.layout.page.nbytes:
        return model
    if fit.arena_bytes <= 0:
        raise ValueError(f"pool {spec.name}: the weights do not fit, {-fit.arena_bytes} bytes are missing")
    layout = fit.layout
    token_bytes = layout.page.nbytes / layout.page.page_size
    # the last page of a sequence is half empty on average
    unit_tokens = layout.unit_bytes / token_bytes + layout.page.page_size / 2
    return replace(model, arena_tokens=fit.arena_bytes / token_bytes, unit_tokens=unit_tokens)


def sharded_curve(curve: StepCurve, shape: ModelConfig, tp_size: int) -> StepCurve:
    """The curve for shards on as many GPUs: by arithmetic from the model's shape and assumed latencies.

    Nobody has measured it. Context costs a shard its part, everything else what `bench comm --expect` says.
    """

    def ratio(sequences: int, tokens: int, context: int) -> float:
        seconds = []
        for size in (1, tp_size):
            cost = step_cost(shape, sequences=sequences, tokens=tokens, context=context, tp_size=size)
            messages = [(one.collective, one.count, one.num_bytes) for one in cost.messages]
            seconds.append(expected_share(H200.seconds(cost), messages, size, ASSUMED_NCCL).step_s)
        return seconds[1] / seconds[0]

    decode = tuple(
        (rows, s * ratio(int(rows), 1, int(curve.decode_context))) for rows, s in curve.decode_points
    )
    prefill = tuple((tokens, s * ratio(1, int(tokens), 0)) for tokens, s in curve.prefill_points)
    return replace(
        curve,
        name=f"{curve.name}, reckoned for {tp_size} shards",
        decode_points=decode,
        prefill_points=prefill,
        decode_context_s=curve.decode_context_s / tp_size,
        prefill_context_s=curve.prefill_context_s / tp_size,
    )
