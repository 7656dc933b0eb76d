"""How many parameters and bytes a model takes, by arithmetic from its specs. Torch-free.

Owns the count of every tensor's elements. Where the bytes of a sequence lie is the arena's layout.
"""

from dataclasses import dataclass, replace

from hybridserve.replicas.arena.layout import ArenaLayout, plan_arena
from hybridserve.replicas.models.sharding import check_tp_size, shard_mixer
from hybridserve.replicas.models.specs import (
    DTYPE_BYTES,
    FullAttentionSpec,
    LinearAttentionSpec,
    MixerSpec,
    ModelConfig,
)


@dataclass(frozen=True)
class LayerFootprint:
    """One layer of one shard."""

    mixer: MixerSpec
    """Head counts are the shard's."""
    mixer_parameters: int
    mlp_parameters: int
    norm_parameters: int
    state_bytes: int
    """Of one sequence: recurrent and conv state; 0 for full attention."""
    kv_bytes_per_token: int
    """0 for linear attention."""

    @property
    def parameters(self) -> int:
        return self.mixer_parameters + self.mlp_parameters + self.norm_parameters


@dataclass(frozen=True)
class Footprint:
    """One shard of a model."""

    layers: tuple[LayerFootprint, ...]
    embedding_parameters: int
    head_parameters: int
    """0 when the head is tied to the embedding."""
    final_norm_parameters: int
    dtype: str
    layout: ArenaLayout

    @property
    def parameters(self) -> int:
        outside = self.embedding_parameters + self.head_parameters + self.final_norm_parameters
        return outside + sum(layer.parameters for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """All parameters in `dtype`; the few that are kept in fp32 (norms, decays) are not counted apart."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.kv_bytes_per_token for layer in self.layers)


def measure_footprint(config: ModelConfig, dtype: str, *, page_size: int = 16, tp_size: int = 1) -> Footprint:
    """What one of `tp_size` shards holds, with weights, conv states and KV in `dtype`.

    Raises:
        ValueError: `tp_size` does not divide a count it has to.
    """
    shard = shard_config(config, tp_size)
    layout = plan_arena(shard.mixers, DTYPE_BYTES[dtype], page_size)
    states = iter(layout.unit.layers)
    pages = iter(layout.page.layer_bytes)
    layers = []
    for index, mixer in enumerate(shard.mixers):
        linear = isinstance(mixer, LinearAttentionSpec)
        state = next(states) if linear else None
        layers.append(
            LayerFootprint(
                mixer=mixer,
                mixer_parameters=mixer_parameters(mixer, config.hidden_size),
                mlp_parameters=mlp_parameters(config, index, tp_size),
                norm_parameters=2 * config.hidden_size,
                state_bytes=state.end - state.recurrent if state is not None else 0,
                kv_bytes_per_token=0 if linear else next(pages) // page_size,
            )
        )
    embedding = shard.vocab_size * config.hidden_size
    return Footprint(
        layers=tuple(layers),
        embedding_parameters=embedding,
        head_parameters=0 if config.tie_word_embeddings else embedding,
        final_norm_parameters=config.hidden_size,
        dtype=dtype,
        layout=layout,
    )


def mixer_parameters(spec: MixerSpec, hidden_size: int) -> int:
    """Elements of all tensors of one mixer."""
    if isinstance(spec, LinearAttentionSpec):
        return _linear_attention_parameters(spec, hidden_size)
    return _full_attention_parameters(spec, hidden_size)


def mlp_parameters(config: ModelConfig, layer: int, tp_size: int = 1) -> int:
    """Elements of all tensors of one layer's MLP, or of its experts, shared expert and their gates, of one of
    `tp_size` shards that divide them."""
    moe = config.moe_of(layer)
    if moe is None:
        return 3 * config.hidden_size * (config.intermediate_size // tp_size)
    # by either split a shard has the same share of the experts and of the shared one; the gates are whole
    experts = (moe.num_experts + 1) * 3 * moe.total_intermediate_size * config.hidden_size
    return experts // tp_size + (moe.num_experts + 1) * config.hidden_size


def shard_config(config: ModelConfig, tp_size: int) -> ModelConfig:
    """The mixers and the vocabulary that shard 0 of `tp_size` holds, in the place of the model's.

    Raises:
        ValueError: `tp_size` does not divide a count it has to.
    """
    check_tp_size(config, tp_size)
    return replace(
        config,
        mixers=tuple(shard_mixer(mixer, 0, tp_size) for mixer in config.mixers),
        vocab_size=-(-config.vocab_size // tp_size),
    )


def _linear_attention_parameters(spec: LinearAttentionSpec, hidden_size: int) -> int:
    key, value, heads = spec.total_key_dim, spec.total_value_dim, spec.total_num_v_heads
    conv_dim = 2 * key + value
    # rows of q|k|v, of the output gate z, and of the two gates a and b of each head
    projections = hidden_size * (conv_dim + value + 2 * heads)
    decay = 2 * heads
    return projections + conv_dim * spec.conv_kernel + decay + spec.head_v_dim + value * hidden_size


def _full_attention_parameters(spec: FullAttentionSpec, hidden_size: int) -> int:
    queries = spec.total_num_heads * spec.head_dim
    keys = spec.total_num_kv_heads * spec.head_dim
    rows = queries * (2 if spec.output_gate else 1) + 2 * keys
    weights = hidden_size * (rows + queries)
    biases = rows + hidden_size if spec.bias else 0
    return weights + biases + (2 * spec.head_dim if spec.qk_norm else 0)
