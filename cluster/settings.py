"""A deployment's YAML `args` as a whole: its pools, and what each of them gets from the sections.

Owns the rules between sections; an unknown or bad key is an error that names it. Knows nothing of Ray or of
torch.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ValidationError, model_validator

from hybridserve.cluster.access.options import AccessSettings
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.settings_sections import (
    AutoscalingSettings,
    IngressSettings,
    LoggingSettings,
    ModelSettings,
    ParallelSettings,
    PoolSettings,
    Section,
    ServingSettings,
    TracingSettings,
)
from hybridserve.replicas.engine.config import EngineConfig

ONLY_POOL = "pool"
"""The name of the pool of a configuration that names none."""


class AppSettings(Section):
    """All of a deployment's `args`."""

    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    serving: ServingSettings = ServingSettings()
    ingress: IngressSettings = IngressSettings()
    access: AccessSettings = AccessSettings()
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings = TracingSettings()
    pools: tuple[PoolSettings, ...] = ()
    """By length, the last without a bound; none: one pool for everything."""

    @model_validator(mode="after")
    def _check_pools(self) -> "AppSettings":
        check_pools(self.pools)
        for pool in self.pools:
            _merge_serving(self.serving, pool)
        return self

    def serving_of(self, pool: str) -> ServingSettings:
        """The section `serving` as it is for that pool."""
        for one in self.pools:
            if one.name == pool:
                return _merge_serving(self.serving, one)
        return self.serving

    def ingress_requests(self) -> int:
        """In flight, that one ingress replica may admit to all pools."""
        limits = (spec.limits.max_concurrent_requests for spec in self.pool_specs())
        return sum(-(-limit // self.ingress.num_replicas) for limit in limits)

    def pool_specs(self) -> tuple[PoolSpec, ...]:
        """The pools by length, everything resolved."""
        tp_size = self.parallel.tensor_parallel_size
        pools = self.pools or (PoolSettings(name=ONLY_POOL),)
        specs, above = [], 0
        for index, pool in enumerate(pools):
            longer = tuple(other.name for other in pools[index + 1 :])
            specs.append(
                PoolSpec(
                    name=pool.name,
                    min_prompt_tokens=above,
                    max_prompt_tokens=pool.max_prompt_tokens,
                    tensor_parallel_size=pool.tensor_parallel_size or tp_size,
                    replicas=pool.replica_range,
                    borrows=longer
                    if pool.borrows is None
                    else tuple(name for name in longer if name in pool.borrows),
                    limits=self.serving_of(pool.name).limits,
                )
            )
            above = pool.max_prompt_tokens or 0
        return tuple(specs)

    def engine_config(self, device: Literal["cpu", "cuda"], pool: PoolSpec | None = None) -> EngineConfig:
        """The options of a pool's engine, by default of the first pool's.

        Raises:
            ValueError: an option is out of its bounds; the message names it.
        """
        pool = pool or self.pool_specs()[0]
        serving = self.serving_of(pool.name)
        return EngineConfig(
            model=self.model.path,
            dtype=self.model.precision,
            state_dtype=self.model.state_precision,
            device=device,
            tensor_parallel_size=pool.tensor_parallel_size,
            linear_attention_split=self.parallel.linear_attention_split,
            moe_split=self.parallel.moe_split,
            max_model_len=self.model.max_context_length,
            max_num_seqs=serving.max_batch_size,
            max_num_batched_tokens=serving.max_num_batched_tokens,
            gpu_memory_utilization=serving.gpu_memory_utilization,
            cache_memory_bytes=serving.cache_memory,
            page_size=serving.page_size,
            load_format=self.model.load_format,
            num_threads=serving.num_threads,
        )


def check_pools(pools: Sequence[PoolSettings]) -> None:
    """Raise ValueError unless the pools' names and buckets make sense together."""
    names = [pool.name for pool in pools]
    above = 0
    for index, pool in enumerate(pools):
        where = f"pools[{index}] ({pool.name})"
        if names.index(pool.name) != index:
            raise ValueError(f"{where}: name is taken by pools[{names.index(pool.name)}], got {pool.name!r}")
        bound = pool.max_prompt_tokens
        last = index == len(pools) - 1
        if last and bound is not None:
            raise ValueError(
                f"{where}: max_prompt_tokens must be left out in the last pool, which takes all that is "
                f"longer than {above}; got {bound}"
            )
        if not last and bound is None:
            raise ValueError(f"{where}: max_prompt_tokens is missing; only the last pool has no bound")
        if bound is not None and bound <= above:
            raise ValueError(
                f"{where}: max_prompt_tokens must be more than the {above} of the pool before it, got {bound}"
            )
        for name in pool.borrows or ():
            if name not in names[index + 1 :]:
                known = ", ".join(names[index + 1 :]) or "there are none"
                raise ValueError(f"{where}: borrows must name longer pools ({known}), got {name!r}")
        above = bound or above


def _merge_serving(serving: ServingSettings, pool: PoolSettings) -> ServingSettings:
    """Raises ValueError naming the pool and the key."""
    if "device" in pool.serving:
        raise ValueError(
            f"pools ({pool.name}).serving.device: all pools run on the device of the section serving, "
            f"got {pool.serving['device']!r}"
        )
    try:
        return ServingSettings.model_validate({**serving.model_dump(exclude_unset=True), **pool.serving})
    except ValidationError as error:
        what = "; ".join(describe_error(one, f"pools ({pool.name}).serving.") for one in error.errors())
        raise ValueError(what) from None


def describe_error(error: Mapping[str, object], section: str = "") -> str:
    """One of pydantic's errors with its key, below `section`, and the value."""
    key = section + ".".join(map(str, error["loc"]))
    message = str(error["msg"]).removeprefix("Value error, ")
    if not key:
        # a rule over several sections names them itself
        return message
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if error["type"] == "missing":
        return f"{key} is missing"
    got = "" if "got" in message else f", got {error['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}{got}"
