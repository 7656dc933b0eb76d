"""What one step of a model costs a shard at least: bytes of memory, operations, and messages between shards.

Counts each byte and each operation once, from a model's shape alone; no tensor, no clock. Times follow from a
machine's speeds, which are somebody else's.
"""

from dataclasses import dataclass

from hybridserve.replicas.models.footprint import Footprint, measure_footprint, mixer_parameters
from hybridserve.replicas.models.specs import (
    DTYPE_BYTES,
    FullAttentionSpec,
    LinearAttentionSpec,
    ModelConfig,
)

LINEAR_STRATEGIES = ("value_heads", "gather_projections", "gather_state")
"""How linear layers are spread; all else is cut as the model cuts it."""
# what a shard tells of a greedy row: its best logit, that token's id, and whether all were finite
_DRAW_BYTES = 12
_TRIANGLE = 64  # tokens of a chunk of the chunkwise form


@dataclass(frozen=True)
class Message:
    """`count` equal collectives of a step; `num_bytes` as nccl-tests count them."""

    label: str
    collective: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class StepCost:
    """One shard's part of one step."""

    weight_bytes: float
    """Read once; of experts the expected number that the tokens choose."""
    state_bytes: float
    """Recurrent and conv states, read and written."""
    kv_bytes: float
    """Read by attention."""
    product_flops: float
    """Of matrix products with weights."""
    mixer_flops: float
    """Of attention and of the recurrence."""
    messages: tuple[Message, ...]


def step_cost(
    config: ModelConfig,
    *,
    sequences: int,
    tokens: int,
    context: int,
    tp_size: int,
    strategy: str = "value_heads",
) -> StepCost:
    """A step in which each of `sequences` computes `tokens` tokens after `context` earlier ones.

    Everything in the config's dtype, states in their own.

    Raises:
        ValueError: `tp_size` does not divide what has to be cut, or the strategy is unknown.
    """
    if strategy not in LINEAR_STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(LINEAR_STRATEGIES)}, got {strategy!r}")
    itemsize = DTYPE_BYTES[config.dtype]
    footprint = measure_footprint(config, config.dtype, tp_size=tp_size)
    rows = sequences * tokens
    touched, multiplied = _layer_parameters(config, footprint, rows, tp_size)
    head = -(-config.vocab_size // tp_size) * config.hidden_size
    gathers_heads = tp_size if strategy != "value_heads" else 1
    mixers = [layer.mixer for layer in footprint.layers]
    mixer_flops = sum(
        _mixer_flops(mixer, sequences, tokens, context) * (gathers_heads if _is_linear(mixer) else 1)
        for mixer in mixers
    )
    return StepCost(
        weight_bytes=(touched + head) * itemsize,
        state_bytes=2.0 * footprint.state_bytes * sequences * gathers_heads,
        kv_bytes=float(footprint.kv_bytes_per_token * sequences * (context + tokens)),
        product_flops=2.0 * (rows * multiplied + sequences * head),
        mixer_flops=mixer_flops,
        messages=_messages(config, sequences, rows, tp_size, strategy, itemsize),
    )


def _is_linear(mixer: object) -> bool:
    return isinstance(mixer, LinearAttentionSpec)


def _layer_parameters(
    config: ModelConfig, footprint: Footprint, rows: int, tp_size: int
) -> tuple[float, float]:
    """A shard's (parameters read by a step of `rows` tokens, parameters each token is multiplied with)."""
    touched = multiplied = 0.0
    for index, layer in enumerate(footprint.layers):
        mixing = mixer_parameters(layer.mixer, config.hidden_size)
        moe = config.moe_of(index)
        if moe is None:
            dense = 3 * config.hidden_size * config.intermediate_size / tp_size
            touched, multiplied = touched + mixing + dense, multiplied + mixing + dense
            continue
        expert = 3 * config.hidden_size * moe.total_intermediate_size / tp_size
        router = (moe.num_experts + 1) * config.hidden_size
        # choices taken as uniform and independent
        chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** rows)
        touched += mixing + router + (chosen + 1) * expert
        multiplied += mixing + router + (moe.top_k + 1) * expert
    return touched, multiplied


def _mixer_flops(mixer: object, sequences: int, tokens: int, context: int) -> float:
    rows = sequences * tokens
    if isinstance(mixer, FullAttentionSpec):
        # q k and p v, over all earlier tokens and half of the new ones
        return 4.0 * rows * mixer.total_num_heads * mixer.head_dim * (context + tokens / 2)
    assert isinstance(mixer, LinearAttentionSpec)
    state = mixer.total_num_v_heads * mixer.head_v_dim * mixer.head_k_dim
    if tokens == 1:
        return 6.0 * rows * state
    # per token: reading and writing the state, and a chunk's triangle for k, v and the solved corrections
    dims = mixer.total_num_v_heads * (3 * mixer.head_k_dim + 2 * mixer.head_v_dim)
    return rows * (6.0 * state + 2.0 * _TRIANGLE / 2 * dims)


def _messages(
    config: ModelConfig, sequences: int, rows: int, tp_size: int, strategy: str, itemsize: int
) -> tuple[Message, ...]:
    if tp_size == 1:
        return ()
    hidden = rows * config.hidden_size * itemsize
    linear = [mixer for mixer in config.mixers if isinstance(mixer, LinearAttentionSpec)]
    # every MLP, every mixer that is cut by heads, and the embedding
    reduced = 2 * config.num_layers + 1 - (len(linear) if strategy != "value_heads" else 0)
    messages = [
        Message("hidden", "all_reduce", reduced, hidden),
        Message("sampling", "all_gather", 1, sequences * tp_size * _DRAW_BYTES),
    ]
    if strategy != "value_heads" and linear:
        spec = linear[0]
        width = 2 * spec.total_key_dim + 2 * spec.total_value_dim + 2 * spec.total_num_v_heads
        messages.append(Message("projections", "all_gather", len(linear), rows * width * itemsize))
        messages.append(Message("hidden", "all_gather", len(linear), hidden))
        if strategy == "gather_state":
            state = 4 * spec.total_num_v_heads * spec.head_v_dim * spec.head_k_dim
            messages.append(Message("state", "all_gather", len(linear), sequences * state))
    return tuple(messages)
