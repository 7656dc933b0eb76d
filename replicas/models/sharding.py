"""What one shard holds of each mixer, as specs: the arena and the caches of a shard are sized from these.

Knows nothing of tensors; the model's layers cut their weights by the same `shard_heads`.
"""

from dataclasses import replace

from hybridserve.parallel.heads import HeadShard, shard_heads
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, MixerSpec, ModelConfig


def mixer_heads(spec: MixerSpec, rank: int, size: int) -> HeadShard:
    """The heads that shard `rank` of `size` holds: value and key heads, or query and KV heads.

    Raises:
        ValueError: `size` does not divide the number of value or query heads; names both and sizes that work.
    """
    if isinstance(spec, LinearAttentionSpec):
        name, total, shared = "linear_num_value_heads", spec.total_num_v_heads, spec.total_num_k_heads
    else:
        name, total, shared = "num_attention_heads", spec.total_num_heads, spec.total_num_kv_heads
    return shard_heads(name, total, shared, rank, size)


def shard_mixer(spec: MixerSpec, rank: int, size: int) -> MixerSpec:
    """`spec` with the shard's own counts in place of the model's."""
    heads = mixer_heads(spec, rank, size)
    if isinstance(spec, FullAttentionSpec):
        return replace(spec, total_num_heads=heads.num_heads, total_num_kv_heads=heads.num_shared_heads)
    return replace(spec, total_num_v_heads=heads.num_heads, total_num_k_heads=heads.num_shared_heads)


def shard_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """`config` with every mixer cut to the shard; widths and vocabulary stay the model's."""
    return replace(config, mixers=tuple(shard_mixer(spec, rank, size) for spec in config.mixers))
