"""What a run of the benchmark is asked to do, as frozen data that travels to the ranks. Torch-free."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridserve.parallel.comm_benchmark.formulas import LARGEST_BYTES, sweep_sizes

BACKENDS = ("gloo", "nccl")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DECODE_BATCHES = (1, 32, 256)
QUICK_BATCHES = (1, 8, 32)
PREFILL_TOKENS = 8192
# on a CPU 8,192 tokens of a 9B layer are half a minute of products
CPU_PREFILL_TOKENS = 512


@dataclass(frozen=True)
class LayerShape:
    """One Gated DeltaNet layer of a model: the counts are the model's, not a shard's."""

    name: str
    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, q | k | v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def projected_width(self) -> int:
        """q | k | v, the output gate z, and the gates b and a."""
        return self.conv_dim + self.value_dim + 2 * self.num_v_heads

    @property
    def state_bytes(self) -> int:
        """Of one sequence's recurrent state in this layer, fp32."""
        return 4 * self.num_v_heads * self.head_v_dim * self.head_k_dim

    def scaled_down(self) -> "LayerShape":
        """The same ratios, small enough for a test: heads halved, head dims a quarter, hidden a sixteenth."""

        def part(value: int, divisor: int) -> int:
            return value // divisor if value % divisor == 0 else value

        halve = 2 if self.num_k_heads % 2 == self.num_v_heads % 2 == 0 else 1
        return replace(
            self,
            name=f"{self.name}, scaled down",
            hidden_size=part(self.hidden_size, 16),
            num_k_heads=self.num_k_heads // halve,
            num_v_heads=self.num_v_heads // halve,
            head_k_dim=part(self.head_k_dim, 4),
            head_v_dim=part(self.head_v_dim, 4),
        )


@dataclass(frozen=True)
class Case:
    """One step of the layer."""

    phase: str
    """"decode": one token a sequence; "prefill": all tokens are one sequence's chunk."""
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.phase} {self.tokens:,}"

    @property
    def sequences(self) -> int:
        return self.tokens if self.phase == "decode" else 1


@dataclass(frozen=True)
class BenchmarkSettings:
    """All that a rank needs to know."""

    layer: LayerShape
    dtype: str
    backend: str
    tp_size: int
    sizes: tuple[int, ...]
    cases: tuple[Case, ...]
    max_bytes: int = LARGEST_BYTES
    """Messages of the model larger than this are left out."""
    min_replays: int = 20
    max_replays: int = 1000
    row_seconds: float = 4.0
    """What a row's timed replays may take together, unless they are fewer than `min_replays`."""
    quick: bool = False
    seed: int = 0
    timeout_s: float = 300.0
    """Of one collective: a rank that is gone is noticed after this long at the latest."""

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ValueError(f"tp must be at least 1, got {self.tp_size}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        # not NaN either
        if not self.row_seconds > 0:
            raise ValueError(f"row_seconds must be above 0, got {self.row_seconds:g}")

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def overlapped_bytes(self) -> int:
        """Of the longest message that is summed while ranks compute."""
        tokens = max((case.tokens for case in self.cases if case.phase == "prefill"), default=0)
        # more than a half, as parts are of whole tiles
        return min(tokens, tokens // 2 + 512) * self.layer.hidden_size * self.itemsize

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_settings(
    layer: LayerShape,
    *,
    backend: str,
    tp_size: int,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    max_bytes: int | None = None,
    quick: bool = False,
    row_seconds: float | None = None,
) -> BenchmarkSettings:
    """Fill in what was not asked for: fp32 and a short prefill on a CPU, bf16 and 8,192 tokens on GPUs.

    Raises:
        ValueError: a value is out of range; names the option and the value.
    """
    on_gpu = backend == "nccl"
    if max_bytes is None:
        max_bytes = 64 * 2**10 if quick else LARGEST_BYTES
    if sizes is None:
        sizes = sweep_sizes(max_bytes, step=8 if quick else 2)
    for size in sizes:
        if size < 4 * tp_size:
            raise ValueError(
                f"sizes: a message must be at least {4 * tp_size} bytes at tp {tp_size}, got {size}"
            )
    prefill = PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS
    batches = DECODE_BATCHES
    # time for 1,000 replays of a GPU's prefill; on a CPU the larger rows end with fewer
    budget: dict[str, Any] = {"row_seconds": 15.0} if on_gpu else {}
    if quick:
        layer, prefill = layer.scaled_down(), 128
        batches = QUICK_BATCHES
        budget = {"min_replays": 3, "max_replays": 20, "row_seconds": 0.03}
    if row_seconds is not None:
        budget["row_seconds"] = row_seconds
    return BenchmarkSettings(
        layer=layer,
        dtype=dtype or ("bfloat16" if on_gpu else "float32"),
        backend=backend,
        tp_size=tp_size,
        sizes=sizes,
        cases=(*(Case("decode", batch) for batch in batches), Case("prefill", prefill)),
        max_bytes=max_bytes,
        quick=quick,
        **budget,
    )


def model_messages(settings: BenchmarkSettings) -> tuple[tuple[str, str, int], ...]:
    """(collective, label, bytes) of the messages a step of the model sends, up to `max_bytes`.

    The hidden vectors of the step's tokens are what an all-reduce after a mixer or an MLP carries, and what a
    reduce-scatter would carry in its place; projections are what a layer that gathers them carries.
    """
    messages = []
    for tokens in (*DECODE_BATCHES, PREFILL_TOKENS):
        hidden = tokens * settings.layer.hidden_size * settings.itemsize
        projected = tokens * settings.layer.projected_width * settings.itemsize
        messages += [
            ("all_reduce", f"hidden x {tokens:,}", hidden),
            ("all_gather", f"projections x {tokens:,}", projected),
            ("reduce_scatter", f"hidden x {tokens:,}", hidden),
        ]
    return tuple(m for m in messages if 4 * settings.tp_size <= m[2] <= settings.max_bytes)
