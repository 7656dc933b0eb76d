"""The sections of a deployment's YAML `args`: keys, defaults and bounds of each.

How they go together is in `settings`. Knows nothing of Ray or torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hybridserve.cluster.observe.logs import LogFormat, LogLevel, LogOptions
from hybridserve.cluster.pool.retry import RetryPolicy
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.cluster.scaling.policy import ScalingRule
from hybridserve.cluster.sizes import parse_size
from hybridserve.replicas.models.config import is_shape_file

_BUDGET_PER_SEQUENCE = 4096


def _read_size(value: object, info: ValidationInfo) -> object:
    """Bytes from a string like `"512MiB"`; what is no string is left to pydantic."""
    return parse_size(str(info.field_name), value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Section):
    """Which model, and how it is read."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face checkpoint; a relative one starts at the folder `serve run` was started in.
    With `load_format` "dummy" also a shape, a file like those of configs/models."""
    name: str | None = None
    """The name clients use; by default the folder's or the file's, without its suffix."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Folder with the tokenizer's files; by default the model's."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    state_precision: Literal["float32", "bfloat16"] = "float32"
    """Of linear-attention layers' recurrent states between steps."""
    max_context_length: PositiveInt | None = None
    load_format: Literal["auto", "dummy"] = "auto"

    @property
    def served_name(self) -> str:
        return self.name or (Path(self.path).stem if is_shape_file(self.path) else Path(self.path).name)

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.path


class ParallelSettings(Section):
    """How one replica spreads over GPUs."""

    tensor_parallel_size: PositiveInt = 1
    linear_attention_split: Literal["heads", "head_v_dim"] = "heads"
    """What shards cut first of linear-attention layers."""
    moe_split: Literal["intermediate", "experts"] = "intermediate"
    """A part of every expert on each shard, or some experts whole."""
    pipeline_parallel_size: PositiveInt = 1

    @field_validator("pipeline_parallel_size")
    @classmethod
    def _only_one_stage(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"must be 1 (pipeline parallelism is not supported), got {value}")
        return value


class ServingSettings(Section):
    """The engine's limits, and the server's."""

    max_batch_size: PositiveInt = 64
    """Sequences in one step, at most."""
    max_concurrent_requests: PositiveInt = 256
    """Requests in flight in a pool, over all ingress replicas; more are answered 429."""
    token_budget: PositiveInt | None = None
    """Outstanding tokens of one replica, prompts and expected answers; more are answered 429. By default
    4,096 for each sequence of a step."""
    queue_deadline_s: PositiveSeconds = 30.0
    """A request that would wait longer for its turn is answered 429."""
    normal_priority_share: Share = 0.9
    """Of budget and deadline, for requests of priority "normal"; "high" has all of both."""
    low_priority_share: Share = 0.5
    max_num_batched_tokens: PositiveInt | None = None
    cache_memory: Size | None = None
    """Of one shard's arena, like "512MiB"; by default what the engine finds room for."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    page_size: PositiveInt = 16
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU when the cluster has one or more shards are asked for."""
    num_threads: PositiveInt | None = None
    """CPU threads of one shard; by default all cores but one."""
    token_transport: Literal["bus", "handle"] = "bus"
    startup_timeout_s: PositiveSeconds = 600.0
    """How long loading the model may take."""
    longest_answer_s: PositiveSeconds = 600.0
    """How long a replica that is being stopped may go on with what it has begun."""
    stuck_after_s: PositiveSeconds = 60.0
    """How long one step may take; an engine that makes none for so long, with work to do, is replaced."""
    retry_wait_s: Seconds = 15.0
    """How long a request whose replica failed may wait for another one; 0: the failure is told at once."""
    resume: bool = True
    """An answer that has begun goes on at another replica; otherwise its client is told of the failure."""
    spare_processes: bool | Literal["auto"] = "auto"
    """Keep processes for one more replica ready on each node that could hold one; "auto": on GPUs."""

    max_surge_percent: Annotated[int, Field(ge=0, le=100, strict=True)] = 25
    """Of a pool's replicas, rounded up: how many more an update may start, so that old ones stop only when
    new ones are ready. 0: old ones stop first, for pools that fill all the GPUs there are."""

    def keeps_spares(self, device: Literal["cpu", "cuda"]) -> bool:
        return device == "cuda" if self.spare_processes == "auto" else self.spare_processes

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(self.retry_wait_s, self.resume)

    @property
    def limits(self) -> PoolLimits:
        return PoolLimits(
            max_concurrent_requests=self.max_concurrent_requests,
            token_budget=self.token_budget or _BUDGET_PER_SEQUENCE * self.max_batch_size,
            queue_deadline_s=self.queue_deadline_s,
            normal_priority_share=self.normal_priority_share,
            low_priority_share=self.low_priority_share,
        )


class AutoscalingSettings(Section):
    """When pools whose `replicas` are a range grow and shrink."""

    target_load: Share = 0.5
    """Of a replica's token budget: a pool has as many replicas as keep the outstanding tokens below it."""
    max_queue_age_s: PositiveSeconds = 5.0
    """A request that has waited longer for its first token asks for one more replica."""
    max_arena_use: Share = 0.9
    """Of the replicas' arenas, on average; more asks for more replicas."""
    scale_up_after_s: Seconds = 5.0
    """How long more replicas must have been wanted."""
    scale_down_after_s: Seconds = 120.0
    """How long fewer replicas must have been enough."""
    max_gpus: PositiveInt | None = None
    """GPUs of all pools together; by default those that the cluster has."""

    def rule_of(self, spec: PoolSpec) -> ScalingRule:
        """A pool's targets."""
        return ScalingRule(
            min_replicas=spec.replicas.min,
            max_replicas=spec.replicas.max,
            target_tokens=max(1, int(self.target_load * spec.limits.token_budget)),
            max_queue_age_s=self.max_queue_age_s,
            max_arena_use=self.max_arena_use,
            up_after_s=self.scale_up_after_s,
            down_after_s=self.scale_down_after_s,
        )


class ReplicaSettings(Section):
    """A pool's replicas, when they are a range."""

    min: Annotated[int, Field(ge=0, strict=True)]
    """0 gives the pool's GPUs back while nobody asks; the first request then waits for a start."""
    max: PositiveInt

    @model_validator(mode="after")
    def _check_order(self) -> "ReplicaSettings":
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got min {self.min} and max {self.max}")
        return self


class PoolSettings(Section):
    """One pool: the replicas for one bucket of lengths."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
    max_prompt_tokens: PositiveInt | None = None
    """The longest of the bucket, counting a stated `max_tokens` too; none for the last pool."""
    tensor_parallel_size: PositiveInt | None = None
    """By default `parallel.tensor_parallel_size`."""
    replicas: PositiveInt | ReplicaSettings = 1
    borrows: tuple[str, ...] | None = None
    """Longer pools that may serve this bucket while they are idle; by default all of them."""
    serving: Mapping[str, object] = Field(default_factory=dict)
    """What is different from the section `serving` for this pool."""

    @property
    def replica_range(self) -> ReplicaRange:
        if isinstance(self.replicas, int):
            return ReplicaRange(self.replicas, self.replicas)
        return ReplicaRange(self.replicas.min, self.replicas.max)


class IngressSettings(Section):
    """The HTTP side."""

    num_replicas: PositiveInt = 1
    max_body_bytes: Size = 8 * 2**20
    proxy: Literal["serve", "haproxy"] = "serve"
    """What stands before it: Serve's own proxy, or HAProxy, which takes environment variables to start."""


class LoggingSettings(Section):
    """The log lines of ingress, replicas and engines; never of prompts or answers."""

    format: LogFormat = "text"
    """"json": one object a line."""
    level: LogLevel = "info"

    @property
    def options(self) -> LogOptions:
        return LogOptions(self.format, self.level)

    @property
    def serve_config(self) -> dict[str, object]:
        """For Serve's own lines of a deployment; of each request the ingress has a line that says more."""
        return {
            "encoding": "JSON" if self.format == "json" else "TEXT",
            # what helps to find faults in Serve drowns everything else
            "log_level": "INFO" if self.level == "debug" else self.level.upper(),
            "enable_access_log": False,
        }


class TracingSettings(Section):
    """OpenTelemetry's traces."""

    exporter: Literal["none", "otlp"] = "none"
    endpoint: str | None = None
    """Of a collector, like "http://collector:4318/v1/traces"; by default what OpenTelemetry's own environment
    variables say."""
    sampling_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the requests whose client does not say whether they are traced."""
