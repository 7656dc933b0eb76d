"""What a model is made of, as frozen data: the one description that memory, loading and the model share.

Knows nothing of tensors (dtypes are names), so that processes without torch can read a model's limits.
`total_*` counts are the model's; a shard's own counts follow from `tp_size` in `parallel/`.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class FullAttentionSpec:
    """Softmax attention over a paged KV cache."""

    total_num_heads: int
    total_num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dims of a head that rotate; 0: no position encoding."""
    rope_theta: float
    output_gate: bool = True
    """q_proj rows are, per head, `q | gate`; the output is multiplied by sigmoid(gate)."""
    qk_norm: bool = True
    bias: bool = False


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated DeltaNet: a causal convolution over q|k|v and a delta-rule recurrence per value head."""

    total_num_k_heads: int
    total_num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    interleaved: bool = False
    """How the checkpoint stores the input projections: as in_proj_qkvz and in_proj_ba, with rows
    `q | k | v | z` and `b | a` per key head; else as in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
    split: str = "heads"
    """What shards cut first, "heads" or "head_v_dim"; see `shard_value_heads`."""
    state_dtype: str = "float32"
    """What the recurrent state is kept in, "float32" or "bfloat16"; arithmetic is in fp32 either way."""

    @property
    def total_key_dim(self) -> int:
        return self.total_num_k_heads * self.head_k_dim

    @property
    def total_value_dim(self) -> int:
        return self.total_num_v_heads * self.head_v_dim


MixerSpec = FullAttentionSpec | LinearAttentionSpec


@dataclass(frozen=True)
class MoESpec:
    """Routed experts, and one shared expert of their size that every token passes through a sigmoid gate."""

    num_experts: int
    top_k: int
    total_intermediate_size: int
    """Of one expert, and of the shared expert."""
    norm_topk_prob: bool = True
    """Whether the chosen experts' softmax weights are divided by their sum."""
    stacked: bool = True
    """How the checkpoint stores experts: as gate_up_proj and down_proj of all, else three matrices each."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a dense MLP instead."""
    split: str = "intermediate"
    """What shards hold: "intermediate", a part of every expert, or "experts", whole experts."""


@dataclass(frozen=True)
class ModelConfig:
    """One text model, resolved from its `config.json` (and, for layer types, from its weights' names)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of dense MLPs; 0 where no layer has one."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    """"float32", "bfloat16" or "float16": what the checkpoint says of itself."""
    mixers: tuple[MixerSpec, ...]
    """One entry a layer."""
    eos_token_ids: tuple[int, ...] = ()
    weights_prefix: str = "model."
    """What the checkpoint puts before `layers.0…`."""
    moe: MoESpec | None = None
    """None: all MLPs are dense."""

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """The first layer of each kind: all others launch what one of these launches."""
        kinds: dict[object, int] = {}
        for layer, mixer in enumerate(self.mixers):
            kinds.setdefault((mixer, self.moe_of(layer)), layer)
        return tuple(kinds.values())

    def moe_of(self, layer: int) -> MoESpec | None:
        """The experts of one layer; None where its MLP is dense."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.mixers) if isinstance(m, LinearAttentionSpec))

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.mixers) if isinstance(m, FullAttentionSpec))
