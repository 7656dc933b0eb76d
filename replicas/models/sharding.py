"""What one shard holds of a model, as specs: the arena and the caches of a shard are sized from these.

Knows nothing of tensors; the model's layers cut their weights by the same `mixer_heads`. Torch-free.
"""

from dataclasses import replace

from hybridserve.parallel.heads import SPLITS, HeadShard, check_divides, shard_heads, shard_value_heads
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, MixerSpec, ModelConfig

LINEAR_SPLITS = SPLITS
"""What shards cut first of a linear-attention layer; see `shard_value_heads`."""
MOE_SPLITS = ("intermediate", "experts")
"""What shards hold of the routed experts: a part of each, or some of them whole."""
STATE_DTYPES = ("float32", "bfloat16")
"""What recurrent states are kept in."""
VALUE_CHANNELS = "linear_num_value_heads * linear_value_head_dim"
QUERY_HEADS = "num_attention_heads"


def with_splits(config: ModelConfig, linear_attention_split: str, moe_split: str) -> ModelConfig:
    """`config` with how its layers are cut, one of `LINEAR_SPLITS` and one of `MOE_SPLITS`."""
    moe = config.moe and replace(config.moe, split=moe_split)
    return replace(_with_linear(config, split=linear_attention_split), moe=moe)


def with_state_dtype(config: ModelConfig, state_dtype: str) -> ModelConfig:
    """`config` with what its recurrent states are kept in, one of `STATE_DTYPES`."""
    return _with_linear(config, state_dtype=state_dtype)


def _with_linear(config: ModelConfig, **changes: str) -> ModelConfig:
    mixers = tuple(
        replace(spec, **changes) if isinstance(spec, LinearAttentionSpec) else spec for spec in config.mixers
    )
    return replace(config, mixers=mixers)


def check_tp_size(config: ModelConfig, size: int) -> None:
    """Raise ValueError if the model cannot be cut for `size` shards.

    The message names the numbers that `size` does not divide, and the nearest sizes that work for the model.
    """
    totals = []
    for spec in dict.fromkeys(config.mixers):
        if isinstance(spec, LinearAttentionSpec):
            totals.append((VALUE_CHANNELS, spec.total_value_dim))
        else:
            totals.append((QUERY_HEADS, spec.total_num_heads))
    dense = [config.moe_of(layer) is None for layer in range(config.num_layers)]
    if any(dense):
        totals.append(("intermediate_size", config.intermediate_size))
    if config.moe is not None and not all(dense):
        totals.append(("moe_intermediate_size", config.moe.total_intermediate_size))
        if config.moe.split == "experts":
            totals.append(("num_experts", config.moe.num_experts))
    check_divides(totals, size)


def mixer_heads(spec: MixerSpec, rank: int, size: int) -> HeadShard:
    """The heads that shard `rank` of `size` holds: value and key heads, or query and KV heads.

    Raises:
        ValueError: `size` does not divide the number of query heads, or of the value heads' channels; names
            both numbers and the nearest sizes that do.
    """
    if isinstance(spec, LinearAttentionSpec):
        heads, shared = spec.total_num_v_heads, spec.total_num_k_heads
        return shard_value_heads(VALUE_CHANNELS, heads, shared, spec.head_v_dim, rank, size, spec.split)
    return shard_heads(QUERY_HEADS, spec.total_num_heads, spec.total_num_kv_heads, rank, size)


def shard_mixer(spec: MixerSpec, rank: int, size: int) -> MixerSpec:
    """`spec` with the shard's own counts in place of the model's."""
    heads = mixer_heads(spec, rank, size)
    if isinstance(spec, FullAttentionSpec):
        return replace(spec, total_num_heads=heads.num_heads, total_num_kv_heads=heads.num_shared_heads)
    return replace(
        spec,
        total_num_v_heads=heads.num_heads,
        total_num_k_heads=heads.num_shared_heads,
        head_v_dim=spec.head_v_dim // heads.num_parts,
    )


def shard_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """`config` with every mixer cut to the shard; widths and vocabulary stay the model's."""
    return replace(config, mixers=tuple(shard_mixer(spec, rank, size) for spec in config.mixers))
