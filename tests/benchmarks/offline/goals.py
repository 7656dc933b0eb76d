"""What the offline benchmark's rows are held against.

The vLLM column was measured in 2026 with vLLM 0.26.0 (torch 2.11, FlashAttention 3, Triton linear attention,
CUDA graphs and torch.compile, no prefix caching, cold caches) on one H200 with the 9B shapes in bf16 and
random weights; single runs. The goals are the project's own.
"""

from dataclasses import dataclass

from hybridserve.replicas.models.specs import ModelConfig


@dataclass(frozen=True)
class Goal:
    """The figures one row is compared with, in the row's unit."""

    ours: float | None = None
    """The bound to reach: not more than this, or not less where more is better."""
    vllm: float | None = None
    further: float | None = None
    """The next bound, once `ours` is met."""


VLLM_BLOCKS, VLLM_BLOCK_TOKENS, VLLM_STATE_GROUPS = 12_791, 272, 3
"""What it logged, and how many groups of layers take a block for their state."""
VLLM_SEQUENCES_OF_8192 = VLLM_BLOCKS // (-(-8192 // VLLM_BLOCK_TOKENS) + VLLM_STATE_GROUPS)
"""By arithmetic: 376."""

GOALS: dict[str, dict[str, Goal]] = {
    "9b": {
        "start to ready": Goal(vllm=282.7),
        "start and first lengths, cold": Goal(25.0),
        "start and first lengths, warm": Goal(12.0),
        "TTFT 1024": Goal(25.0, 50.1),
        "TTFT 8192": Goal(190.0, 216.3),
        "TTFT 32768": Goal(870.0, 945.0),
        "TTFT 131072": Goal(4850.0, 5036.2),
        "TPOT 1": Goal(4.3, 5.43),
        "TPOT 8": Goal(4.6, 5.83),
        "TPOT 32": Goal(5.4, 6.38),
        "TPOT 128": Goal(8.0, 9.02, 7.2),
        "TPOT 256": Goal(13.2, 14.36, 11.5),
        "TPOT 1 at 32768": Goal(4.7, 5.84),
        "mixed 256": Goal(18.5, 22.08),
        "capacity 8192": Goal(round(1.05 * VLLM_SEQUENCES_OF_8192), VLLM_SEQUENCES_OF_8192),
        "temperature 32": Goal(1.03),
        "temperature 256": Goal(1.03),
    },
    "27b": {
        "TPOT 1 at 2048": Goal(13.5),
        "TPOT 32 at 2048": Goal(17.5),
        "TPOT 256 at 2048": Goal(36.0),
        "temperature 32": Goal(1.03),
        "temperature 256": Goal(1.03),
    },
    "35b-a3b": {
        "TTFT 8192": Goal(120.0),
        "TPOT 1": Goal(3.0),
        "TPOT 32": Goal(14.0),
        "TPOT 256": Goal(30.0),
        "temperature 32": Goal(1.03),
        "temperature 256": Goal(1.03),
    },
}

SPEEDUPS: dict[str, dict[int, dict[str, float]]] = {
    "27b": {
        2: {"TPOT 1": 1.6, "TPOT 1 at 2048": 1.6},
        4: {"TPOT 1": 2.6, "TPOT 1 at 2048": 2.6},
    }
}
"""Key of GOALS -> GPUs of one replica -> row -> how many times faster than on one GPU it should be."""

SHAPES = {(4096, 32): "9b", (5120, 64): "27b", (2048, 40): "35b-a3b"}
"""(hidden_size, layers) -> key of GOALS."""


def shape_of(config: ModelConfig) -> str | None:
    """The key of GOALS for a model of this shape; None for one that has none."""
    return SHAPES.get((config.hidden_size, config.num_layers))


def goals_of(config: ModelConfig) -> dict[str, Goal]:
    """The goals of a model of this shape on one device; empty for one that has none."""
    return GOALS.get(shape_of(config) or "", {})
