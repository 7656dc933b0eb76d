"""The engine's options, resolved and checked once, before anything is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridserve.replicas.models.config import check_load_format, load_model_config
from hybridserve.replicas.models.sharding import (
    LINEAR_SPLITS,
    MOE_SPLITS,
    STATE_DTYPES,
    with_splits,
    with_state_dtype,
)
from hybridserve.replicas.models.specs import ModelConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
CHOICES = {
    "dtype": DTYPES,
    "state_dtype": STATE_DTYPES,
    "device": DEVICES,
    "load_format": LOAD_FORMATS,
    "linear_attention_split": LINEAR_SPLITS,
    "moe_split": MOE_SPLITS,
}
MAX_THREADS = 1024


@dataclass(frozen=True)
class EngineConfig:
    """What `LLM(...)` takes, under the same names.

    Raises:
        ValueError: an option is out of its bounds; the message names it and its value.
    """

    model: str
    """Folder of a Hugging Face checkpoint, or a shape file (see `load_model_config`) for random weights."""
    dtype: str = "auto"
    """"auto": the checkpoint's on a GPU, float32 on a CPU."""
    state_dtype: str = "float32"
    """What recurrent states of linear-attention layers are kept in between steps: "float32", or "bfloat16",
    which halves their memory and traffic, at the price of a rounding each time one is written."""
    device: str = "auto"
    tensor_parallel_size: int = 1
    """Ranks that share the model. Offline each is a process of this machine, and on GPUs rank r has the r-th
    visible one."""
    linear_attention_split: str = "heads"
    """What shards cut first of linear-attention layers: value "heads", or "head_v_dim", the channels of every
    head, at the price of a small all-reduce more a layer. What the one leaves is cut by the other."""
    moe_split: str = "intermediate"
    """What a shard holds of mixture-of-experts layers: an "intermediate" part of all experts, or whole
    "experts"."""
    max_model_len: int | None = None
    """None: the model's own limit, or what the arena holds if that is less."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """None: 8,192 on a GPU, 2,048 on a CPU."""
    gpu_memory_utilization: float = 0.9
    cache_memory_bytes: int | None = None
    """Bytes of one rank's arena. None: on a GPU what `gpu_memory_utilization` leaves, on a CPU a quarter of
    the free memory, at most 4 GiB, for all ranks together."""
    page_size: int = 16
    load_format: str = "auto"
    enforce_eager: bool = False
    """On a GPU: run decode steps without CUDA graphs, to look into them."""
    seed: int = 0
    num_threads: int | None = None
    """CPU threads of one rank. None: torch's own choice for a single one, else 1."""
    hf_overrides: Mapping[str, object] = field(default_factory=dict)
    """Keys to replace in `config.json`."""

    def __post_init__(self) -> None:
        overrides = {} if self.hf_overrides is None else self.hf_overrides
        if not isinstance(overrides, Mapping):
            raise ValueError(f"hf_overrides must be a mapping of config.json's keys, got {overrides!r}")
        object.__setattr__(self, "hf_overrides", dict(overrides))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        check_load_format(self.model, self.load_format)
        for name in ("tensor_parallel_size", "max_num_seqs", "page_size"):
            self._check_positive(name)
        for name in ("max_num_batched_tokens", "max_model_len", "cache_memory_bytes", "num_threads"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ValueError(f"num_threads must be at most {MAX_THREADS}, got {self.num_threads}")
        if not isinstance(self.enforce_eager, bool):
            raise ValueError(f"enforce_eager must be true or false, got {self.enforce_eager!r}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")

    def read_model_config(self) -> ModelConfig:
        """What the model is, and how its shards cut it. Raises ValueError: see `load_model_config`."""
        config = load_model_config(self.model, self.hf_overrides)
        return with_state_dtype(
            with_splits(config, self.linear_attention_split, self.moe_split), self.state_dtype
        )

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
