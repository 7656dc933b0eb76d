"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next, text only: Gated DeltaNet layers, with full attention in between.

They differ in what their configs say: experts or a dense MLP, and how the checkpoint stores weights. Reads
like the architecture; what a mixer computes is in its own file, how weights are cut in `parallel/`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from hybridserve.kernels.rotary import rotary_cos_sin
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.sums import BegunSum
from hybridserve.parallel.vocabulary import VocabularyShard
from hybridserve.replicas.models.batch import LayerCache, StepBatch
from hybridserve.replicas.models.full_attention import FullAttention
from hybridserve.replicas.models.gated_delta_net import GatedDeltaNet
from hybridserve.replicas.models.mlp import GatedMLP
from hybridserve.replicas.models.moe import SparseMoE
from hybridserve.replicas.models.norm import ZeroCentredRMSNorm
from hybridserve.replicas.models.overlap import forward_in_parts, least_tokens
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, ModelConfig
from hybridserve.replicas.models.step import StepContext, split_phases

MODEL_PREFIX = "model."
HEAD_NAME = "lm_head.weight"
EXPERT_NAME = re.compile(
    r"layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)\.(gate|up|down)_proj\.weight"
)
# what a checkpoint may hold beside the text model, by the start of the name
SKIPPED_PREFIXES = {"model.visual.": "vision", "visual.": "vision", "mtp.": "mtp", "model.mtp.": "mtp"}


class Qwen3_5DecoderLayer(Layer):
    """h + mixer(norm(h)), then + mlp(norm(·))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        spec, moe = config.mixers[layer], config.moe_of(layer)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear = isinstance(spec, LinearAttentionSpec)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(spec, size, eps, group, dtype=dtype, device=device)
        else:
            self.self_attn = FullAttention(spec, size, eps, group, dtype=dtype, device=device)
        self.is_sparse = moe is not None
        if moe is None:
            self.mlp = GatedMLP(size, config.intermediate_size, group, dtype=dtype, device=device)
        else:
            self.mlp = SparseMoE(moe, size, group, dtype=dtype, device=device)
        self.input_layernorm = ZeroCentredRMSNorm(size, eps, device=device)
        self.post_attention_layernorm = ZeroCentredRMSNorm(size, eps, device=device)

    @property
    def mixer(self) -> GatedDeltaNet | FullAttention:
        return self.linear_attn if self.is_linear else self.self_attn

    def leave(
        self,
        mixed: torch.Tensor,
        h: torch.Tensor,
        next_norm: ZeroCentredRMSNorm,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """mixed: of `mix`; h: the layer's input, which may be overwritten. Returns the layer's output, plain
        and normed by what comes next: a sum over ranks has both from one launch.

        positions: [T], negative for padding, which then costs no expert; None: there is none, or it may.
        """
        h, x = self.mixer.project_out(mixed, h, self.post_attention_layernorm)
        return self.mlp(x, h, next_norm, positions) if self.is_sparse else self.mlp(x, h, next_norm)

    def begin_mlp(self, h: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> BegunSum:
        """h: the stream after the mixer; x: its norm. Ends with the layer's output and its norm."""
        return self.mlp.begin(x, h, positions) if self.is_sparse else self.mlp.begin(x, h)


class Between(NamedTuple):
    """The residual stream, and what the next mixer takes; after the last one the normed stream and None.

    In between, no token knows of another: `Qwen3_5Model.begin` and `proceed` work on any rows.
    """

    h: torch.Tensor
    projected: torch.Tensor | None


class Qwen3_5Model(Layer):
    """Embedding, layers, final norm."""

    def __init__(
        self, config: ModelConfig, group: TensorParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            Qwen3_5DecoderLayer(config, layer, group, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        )
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        # a CPU's ranks would compute on the cores that also send
        self.overlaps_from = least_tokens(config) if group.size > 1 and device.type == "cuda" else None
        self.attention_spec = next((m for m in config.mixers if isinstance(m, FullAttentionSpec)), None)

    def context(self, batch: StepBatch) -> StepContext:
        """What all layers of a step share."""
        return StepContext(split_phases(batch), batch.slot_mapping, self._rotary(batch.positions))

    def begin(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> Between:
        """Up to the first layer's mixer."""
        h = self.embed_tokens(token_ids)
        first = self.layers[0]
        return Between(h, first.mixer.project_in(first.input_layernorm(h), out))

    def proceed(
        self,
        layer: int,
        mixed: torch.Tensor,
        h: torch.Tensor,
        out: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> Between:
        """From the mixer of `layer`, whose result is `mixed`, to the next one's; or to the end."""
        following = self.layers[layer + 1] if layer + 1 < len(self.layers) else None
        next_norm = self.norm if following is None else following.input_layernorm
        h, normed = self.layers[layer].leave(mixed, h, next_norm, positions)
        if following is None:
            return Between(normed, None)
        return Between(h, following.mixer.project_in(normed, out))

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        step = self.context(batch)
        now = self.begin(batch.token_ids)
        if step.has_prefill and self.overlaps_from is not None and batch.num_tokens >= self.overlaps_from:
            return forward_in_parts(
                self.layers, self.norm, now.h, now.projected, step, caches, batch.positions
            )
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            mixed = layer.mixer.mix(now.projected, step, cache)
            now = self.proceed(number, mixed, now.h, positions=batch.positions)
        return now.h

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        spec = self.attention_spec
        return rotary_cos_sin(positions, spec.rotary_dim, spec.rope_theta) if spec is not None else None


class Qwen3_5ForCausalLM(Layer):
    """The model with its output head. Runs under `torch.inference_mode`."""

    def __init__(
        self, config: ModelConfig, group: TensorParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3_5Model(config, group, dtype=dtype, device=device)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            group,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run T tokens through all layers; `caches` has one entry a layer.

        Returns the hidden state of each token after the final norm, [T, hidden_size] in the model's dtype.
        States, conv rings, keys and values of the step's sequences are updated in place.
        """
        return self.model(batch, caches)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden_size]. Returns fp32 [R, this shard's part of vocab_size], in `out` if given.

        `vocabulary` draws from the shards' parts, or gathers them.
        """
        return self.lm_head(hidden, out)

    @contextmanager
    def shortened(self, layers: Sequence[int]) -> Iterator[None]:
        """Inside, the model has only these of its layers, in this order; `caches` then have their entries."""
        every = self.model.layers
        self.model.layers = nn.ModuleList(every[layer] for layer in layers)
        try:
            yield
        finally:
            self.model.layers = every

    @property
    def vocabulary(self) -> VocabularyShard:
        return self.lm_head.vocabulary

    def finish_loading(self) -> None:
        """Derive what kernels want in another layout; to be called once the parameters are filled."""
        for layer in self.model.layers:
            if layer.is_linear:
                layer.linear_attn.finish_loading()

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name for one of the model's own."""
        if name.startswith(MODEL_PREFIX):
            return self.config.weights_prefix + name.removeprefix(MODEL_PREFIX)
        return name

    def skip_reason(self, name: str) -> str | None:
        """Why a checkpoint tensor that fills no parameter may be passed over; None: it may not."""
        if name == HEAD_NAME and self.config.tie_word_embeddings:
            return "tied head"
        if self._is_another_ranks_expert(name):
            return "other shards' experts"
        return next((why for prefix, why in SKIPPED_PREFIXES.items() if name.startswith(prefix)), None)

    def _is_another_ranks_expert(self, name: str) -> bool:
        """Whether a tensor is of an expert that, in a layer with experts by ranks, is not this rank's."""
        found = EXPERT_NAME.fullmatch(name.removeprefix(self.config.weights_prefix))
        if found is None or int(found["layer"]) >= len(self.model.layers):
            return False
        layer, expert = self.model.layers[int(found["layer"])], int(found["expert"])
        if not layer.is_sparse or not layer.mlp.by_experts or expert >= layer.mlp.spec.num_experts:
            return False
        ((first, end),) = layer.mlp.experts.ranges
        return not first <= expert < end
