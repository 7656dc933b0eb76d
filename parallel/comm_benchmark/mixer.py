"""One Gated DeltaNet layer, or any part of its heads, from projection to what the output projection takes.

Owns random weights of a layer's sizes, taking a part of them, and the calls of the kernels. Knows nothing of
ranks: a strategy says which part a rank computes and what is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridserve.kernels.causal_conv1d import (
    causal_conv1d_decode,
    causal_conv1d_prefill_split,
    make_phase_weight,
)
from hybridserve.kernels.linear_attention import (
    gdn_decode_fused,
    gdn_gates,
    linear_attention_decode,
    linear_attention_prefill,
)
from hybridserve.kernels.rms_norm import rms_norm, rms_norm_gated
from hybridserve.parallel.comm_benchmark.settings import Case, LayerShape

# tokens before the step, of every sequence
CONTEXT = 64

SplitNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(out [T, Hv, V], z of that shape) -> the gated norm of heads whose V is only a part."""


@dataclass(frozen=True)
class Part:
    """Which of a layer's heads: key heads in the order in which the value heads use them, value heads, and
    the range of head_v_dim of each value head."""

    k_heads: tuple[int, ...]
    v_heads: tuple[int, ...]
    first_v: int
    num_v: int


def whole(shape: LayerShape) -> Part:
    return Part(tuple(range(shape.num_k_heads)), tuple(range(shape.num_v_heads)), 0, shape.head_v_dim)


@dataclass(frozen=True)
class LayerWeights:
    """A whole layer's weights, the same on every rank."""

    in_proj: torch.Tensor
    """[q | k | v | z | b | a, hidden]"""
    conv: torch.Tensor
    """[q | k | v, kernel]"""
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    """fp32 [Hv]"""
    norm: torch.Tensor
    """fp32 [V]"""
    out_proj: torch.Tensor
    """[hidden, Hv * V]"""
    next_norm: torch.Tensor
    """fp32 [hidden], of what follows the layer"""


@dataclass(frozen=True)
class NextNorm:
    """The RMSNorm behind a layer, in whose launch a sum over ranks may be made."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=False)


def random_weights(shape: LayerShape, dtype: torch.dtype, device: torch.device, seed: int) -> LayerWeights:
    """Drawn from `seed`; projections keep the size of a unit-variance input."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        drawn = torch.empty(rows, columns, dtype=dtype, device=device)
        return drawn.normal_(0.0, scale, generator=generator)

    def uniform(count: int, low: float, high: float) -> torch.Tensor:
        drawn = torch.empty(count, dtype=torch.float32, device=device)
        return drawn.uniform_(low, high, generator=generator)

    return LayerWeights(
        in_proj=normal(shape.projected_width, shape.hidden_size, shape.hidden_size**-0.5),
        conv=normal(shape.conv_dim, shape.conv_kernel, shape.conv_kernel**-0.5),
        a_log=uniform(shape.num_v_heads, 0.0, 2.0),
        dt_bias=uniform(shape.num_v_heads, -4.0, 0.0),
        norm=uniform(shape.head_v_dim, 0.5, 1.5),
        out_proj=normal(shape.hidden_size, shape.value_dim, shape.value_dim**-0.5),
        next_norm=uniform(shape.hidden_size, 0.5, 1.5),
    )


def projected_rows(shape: LayerShape, part: Part) -> torch.Tensor:
    """Rows of `in_proj` that a part needs, int64, in its own order q | k | v | z | b | a."""
    v_heads = torch.tensor(part.v_heads)
    key = (torch.tensor(part.k_heads)[:, None] * shape.head_k_dim + torch.arange(shape.head_k_dim)).flatten()
    value = value_columns(shape, part)
    v, z = 2 * shape.key_dim, shape.conv_dim
    b = shape.conv_dim + shape.value_dim
    a = b + shape.num_v_heads
    return torch.cat([key, shape.key_dim + key, v + value, z + value, b + v_heads, a + v_heads])


def value_columns(shape: LayerShape, part: Part) -> torch.Tensor:
    """Columns of `out_proj` that a part meets, int64: its value heads' part of head_v_dim."""
    dims = part.first_v + torch.arange(part.num_v)
    return (torch.tensor(part.v_heads)[:, None] * shape.head_v_dim + dims).flatten()


class Mixer:
    """The heads of one part, with caches for one case: what lies between the two projections."""

    def __init__(
        self, shape: LayerShape, part: Part, weights: LayerWeights, case: Case, *, fused: bool | None = None
    ) -> None:
        """`fused`: decode in one launch; by default on a GPU, as the served model does."""
        device, dtype = weights.in_proj.device, weights.in_proj.dtype
        self.shape, self.part, self.case = shape, part, case
        self.fused = device.type == "cuda" if fused is None else fused
        rows = projected_rows(shape, part).to(device)
        key_dim = len(part.k_heads) * shape.head_k_dim
        value_dim = len(part.v_heads) * part.num_v
        heads = torch.tensor(part.v_heads, device=device)
        self.qkv_sizes = (key_dim, key_dim, value_dim)
        self.sizes = (sum(self.qkv_sizes), value_dim, heads.numel(), heads.numel())
        self.eps = shape.eps
        # [C, kernel] that lies as [kernel, C], which the GPU's kernels want
        self.taps = weights.conv[rows[: sum(self.qkv_sizes)]].t().contiguous().t()
        self.phase_weight = make_phase_weight(self.taps)
        self.a_log, self.dt_bias = weights.a_log[heads], weights.dt_bias[heads]
        self.norm = weights.norm[part.first_v : part.first_v + part.num_v].contiguous()
        self.indices = torch.arange(case.sequences, device=device)
        self.positions = torch.full((case.sequences,), CONTEXT, device=device)
        self.has_state = torch.ones(case.sequences, dtype=torch.bool, device=device)
        self.conv_state, self.state = initial_states(shape, part, case, rows, dtype)

    def mix(self, projected: torch.Tensor, split_norm: SplitNorm | None = None) -> torch.Tensor:
        """projected: [T, width of the part]. Returns [T, Hv * V of the part] and updates the states."""
        qkv, z, b, a = projected.split_with_sizes(self.sizes, -1)
        if self.case.phase == "decode" and self.fused and split_norm is None:
            return self._decode_in_one_launch(qkv, z, a, b)
        g, beta = gdn_gates(a, b, self.a_log, self.dt_bias)
        out = self._decode(qkv, g, beta) if self.case.phase == "decode" else self._prefill(qkv, g, beta)
        gate = z.unflatten(1, out.shape[1:])
        if split_norm is not None:
            return split_norm(out, gate).flatten(1)
        return rms_norm_gated(out, gate, self.norm, self.eps).flatten(1)

    def _decode_in_one_launch(
        self, qkv: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        heads: dict[str, Any] = {
            "num_k_heads": len(self.part.k_heads),
            "num_v_heads": len(self.part.v_heads),
            "head_k_dim": self.shape.head_k_dim,
            "head_v_dim": self.part.num_v,
        }
        given = (qkv, z, a, b, self.taps, None, self.a_log, self.dt_bias, self.norm, self.eps)
        return gdn_decode_fused(*given, self.conv_state, self.state, self.indices, self.positions, **heads)

    def _decode(self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        rows = (self.indices, self.positions)
        channels = causal_conv1d_decode(qkv, self.phase_weight, None, self.conv_state, *rows)
        q, k, v = self._as_heads(channels.split_with_sizes(self.qkv_sizes, -1))
        return linear_attention_decode(q, k, v, g, beta, self.state, self.indices)

    def _prefill(self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        history = (self.indices, self.has_state, (self.case.tokens,))
        channels = causal_conv1d_prefill_split(
            qkv, self.taps, None, self.conv_state, *history, (CONTEXT,), self.qkv_sizes
        )
        q, k, v = self._as_heads(channels)
        return linear_attention_prefill(q, k, v, g, beta, self.state, *history)

    def _as_heads(self, channels: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        q, k, v = channels
        q, k = (x.unflatten(1, (-1, self.shape.head_k_dim)) for x in (q, k))
        return q, k, v.unflatten(1, (-1, self.part.num_v))


def initial_states(
    shape: LayerShape, part: Part, case: Case, rows: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A part's conv ring [N, kernel, C] and recurrent state fp32 [N, Hv, V, K], the same numbers in any part.

    One sequence is drawn, and the others are multiples of it: a state of 256 sequences is half a gigabyte.
    """
    device = rows.device
    generator = torch.Generator(device).manual_seed(11)
    full = (shape.num_v_heads, shape.head_v_dim, shape.head_k_dim)
    state = torch.empty(full, dtype=torch.float32, device=device).normal_(0.0, 0.1, generator=generator)
    ring = torch.empty(shape.conv_kernel, shape.conv_dim, dtype=torch.float32, device=device)
    ring.normal_(generator=generator)
    heads = torch.tensor(part.v_heads, device=device)
    state = state[heads, part.first_v : part.first_v + part.num_v]
    channels = 2 * len(part.k_heads) * shape.head_k_dim + len(part.v_heads) * part.num_v
    ring = ring[:, rows[:channels]]
    scale = 1.0 + torch.arange(case.sequences, device=device) / case.sequences
    return (scale[:, None, None] * ring).to(dtype), scale[:, None, None, None] * state
