"""The words of a deployment's YAML `args`, their defaults and their bounds.

Owns what a user may write; an unknown or bad key is an error that names it. Knows nothing of Ray or torch.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from hybridserve.cluster.cli_sizes import parse_size
from hybridserve.replicas.engine.config import EngineConfig


def _read_size(value: object, info: ValidationInfo) -> object:
    """Bytes from a string like `"512MiB"`; what is no string is left to pydantic."""
    return parse_size(str(info.field_name), value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Section):
    """Which model, and how it is read."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face checkpoint; a relative one starts at the folder `serve run` was started in."""
    name: str | None = None
    """The name clients use; by default the folder's."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context_length: PositiveInt | None = None
    load_format: Literal["auto", "dummy"] = "auto"

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


class ParallelSettings(_Section):
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


class ServingSettings(_Section):
    """The engine's limits, and the server's."""

    max_batch_size: PositiveInt = 64
    """Sequences in one step, at most."""
    max_concurrent_requests: PositiveInt = 256
    """Requests in flight, over all ingress replicas; more are answered 429."""
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


class IngressSettings(_Section):
    """The HTTP side."""

    num_replicas: PositiveInt = 1
    max_body_bytes: Size = 8 * 2**20


class AppSettings(_Section):
    """All of a deployment's `args`."""

    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    serving: ServingSettings = ServingSettings()
    ingress: IngressSettings = IngressSettings()

    def engine_config(self, device: Literal["cpu", "cuda"]) -> EngineConfig:
        """The engine's options. Raises ValueError naming an option that is out of its bounds."""
        return EngineConfig(
            model=self.model.path,
            dtype=self.model.precision,
            device=device,
            tensor_parallel_size=self.parallel.tensor_parallel_size,
            linear_attention_split=self.parallel.linear_attention_split,
            moe_split=self.parallel.moe_split,
            max_model_len=self.model.max_context_length,
            max_num_seqs=self.serving.max_batch_size,
            max_num_batched_tokens=self.serving.max_num_batched_tokens,
            gpu_memory_utilization=self.serving.gpu_memory_utilization,
            cache_memory_bytes=self.serving.cache_memory,
            page_size=self.serving.page_size,
            load_format=self.model.load_format,
            num_threads=self.serving.num_threads,
        )


def in_settings_words(message: str) -> str:
    """An engine's message with its options' names as they stand in the YAML."""
    words = {
        "cache_memory_bytes": "serving.cache_memory",
        "gpu_memory_utilization": "serving.gpu_memory_utilization",
        "max_model_len": "model.max_context_length",
        "max_num_batched_tokens": "serving.max_num_batched_tokens",
        "max_num_seqs": "serving.max_batch_size",
        "tensor_parallel_size": "parallel.tensor_parallel_size",
    }
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], message)


def load_settings(args: object, base: Path) -> AppSettings:
    """Settings from YAML `args`, the model's path made absolute against `base`.

    Raises:
        ValueError: a key is unknown, missing or has a bad value (each is named), or the model is not there.
    """
    if not isinstance(args, Mapping):
        raise ValueError(f"bad configuration: args must be a mapping of keys to values, got {args!r}")
    try:
        settings = AppSettings.model_validate(dict(args))
    except ValidationError as error:
        raise ValueError("bad configuration: " + "; ".join(map(_describe, error.errors()))) from None
    path = (base / Path(settings.model.path).expanduser()).resolve()
    if path.is_file():
        raise ValueError(
            f"bad configuration: model.path {settings.model.path!r} is a file; a server needs the folder of "
            "a checkpoint, with its tokenizer"
        )
    if not (path / "config.json").is_file():
        raise ValueError(
            f"bad configuration: model.path {settings.model.path!r}: there is no {path}/config.json"
        )
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(path)})})


def _describe(error: Mapping[str, object]) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if error["type"] == "missing":
        return f"{key} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    got = "" if "got" in message else f", got {error['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}{got}"
