"""A step of many tokens on several ranks, in two parts in turn: one's sums travel while the other computes.

But for what mixers do no token knows of another, so what lies between two mixers can be done for some rows
and then for the others. Worth it where a part's products take as long by their operations as by reading their
weights, which each part reads. Not for decode steps: their graphs could not hold such sums.
"""

import math
from collections.abc import Sequence

import torch

from hybridserve.parallel.layers.sums import two_parts
from hybridserve.replicas.models.batch import LayerCache
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.models.step import StepContext

MIN_TOKENS = 4096
"""Of a step in two parts. Measured at 8,192 (docs/log.md); parts of 2,048 rows still fill an H200."""
EXPERT_TOKENS = 184
"""Tokens of an expert in a part, from which its products take longer than reading its weights in 2-byte
elements: 790 TFLOP/s over 4.3 TB/s, at two operations an element and token."""


def least_tokens(config: ModelConfig) -> int:
    """Of a step that is worth being run in two parts."""
    if config.moe is None:
        return MIN_TOKENS
    return max(MIN_TOKENS, math.ceil(2 * EXPERT_TOKENS * config.moe.num_experts / config.moe.top_k))


def forward_in_parts(
    layers: Sequence[torch.nn.Module],
    final_norm: torch.nn.Module,
    h: torch.Tensor,
    projected: torch.Tensor,
    step: StepContext,
    caches: Sequence[LayerCache],
    positions: torch.Tensor,
) -> torch.Tensor:
    """From the first mixer's input, `projected`, and the residual stream h [T, hidden] to the final norm.

    h may be overwritten. Returns [T, hidden].
    """
    rows = two_parts(h.shape[0])
    streams = [h[part] for part in rows]
    outputs: list[torch.Tensor] = []
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        following = layers[number + 1] if number + 1 < len(layers) else None
        mixed = layer.mixer.mix(projected, step, cache)
        mixer_sums = [
            layer.mixer.begin_out(mixed[part], stream) for part, stream in zip(rows, streams, strict=True)
        ]
        mlp_sums = [
            layer.begin_mlp(*begun.end(layer.post_attention_layernorm), positions[part])
            for part, begun in zip(rows, mixer_sums, strict=True)
        ]
        streams, outputs = [], []
        if following is not None:
            projected = mixed.new_empty(h.shape[0], following.mixer.projected_width)
        for part, begun in zip(rows, mlp_sums, strict=True):
            stream, normed = begun.end(final_norm if following is None else following.input_layernorm)
            streams.append(stream)
            if following is None:
                outputs.append(normed)
            else:
                following.mixer.project_in(normed, projected[part])
    return torch.cat(outputs)
