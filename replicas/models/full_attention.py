"""Softmax attention over the paged KV cache, with normed queries and keys and a gated output."""

import torch

from hybridserve.kernels.activation import sigmoid_and_mul
from hybridserve.kernels.attention import attention_decode, attention_prefill
from hybridserve.kernels.rotary import qk_norm_rope_write
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.linear import QKVParallelLinear, RowParallelLinear
from hybridserve.parallel.layers.sums import BegunSum
from hybridserve.parallel.peer_sums import Norm
from hybridserve.parallel.weights.parameter import Cut, head_ranges
from hybridserve.replicas.models.batch import KVCache
from hybridserve.replicas.models.norm import ZeroCentredRMSNorm
from hybridserve.replicas.models.sharding import mixer_heads
from hybridserve.replicas.models.specs import FullAttentionSpec
from hybridserve.replicas.models.step import KernelTable, Phase, PhaseBatch, StepContext, run_phases


class FullAttention(Layer):
    """o_proj(attention(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate)), cut by query heads."""

    def __init__(
        self,
        spec: FullAttentionSpec,
        hidden_size: int,
        eps: float,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert spec.output_gate and spec.qk_norm and spec.rotary_dim > 0, spec
        heads = mixer_heads(spec, group.rank, group.size)
        self.spec = spec
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            spec.total_num_heads,
            spec.total_num_kv_heads,
            spec.head_dim,
            heads,
            output_gate=True,
            bias=spec.bias,
            after_sum=group.size > 1,
            dtype=dtype,
            device=device,
        )
        self.q_norm = ZeroCentredRMSNorm(spec.head_dim, eps, device=device)
        self.k_norm = ZeroCentredRMSNorm(spec.head_dim, eps, device=device)
        columns = Cut(
            spec.total_num_heads * spec.head_dim, head_ranges(heads.heads, spec.head_dim, spec.head_dim)
        )
        self.o_proj = RowParallelLinear(
            columns, hidden_size, group, bias=spec.bias, dtype=dtype, device=device
        )

    @property
    def projected_width(self) -> int:
        return self.qkv_proj.weight.shape[0]

    @property
    def mixed_width(self) -> int:
        return self.o_proj.weight.shape[1]

    @property
    def num_gates(self) -> int:
        return 0

    def project_in(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, hidden_size]. Returns what `mix` takes, [T, projected_width]."""
        return self.qkv_proj(x, out)

    def mix(self, projected: torch.Tensor, step: StepContext, cache: KVCache) -> torch.Tensor:
        """[T, projected_width] -> [T, mixed_width]; writes the new K and V."""
        inputs = self.inputs(projected, self.prepare(projected))
        return self.finish(self.meet(inputs, step, cache), projected)

    # `mix` in its parts, of which only `meet` knows of more than one token

    def prepare(self, projected: torch.Tensor, out: torch.Tensor | None = None) -> None:
        """Nothing: norms and rotation are of one launch with the writing of pages."""

    def inputs(self, projected: torch.Tensor, prepared: None) -> tuple[torch.Tensor, ...]:
        """What `meet` takes: views."""
        _, _, k, v = projected.split_with_sizes(self.qkv_proj.split_sizes, -1)
        return projected, *(part.unflatten(1, (-1, self.head_dim)) for part in (k, v))

    def meet(
        self,
        inputs: tuple[torch.Tensor, ...],
        step: StepContext,
        cache: KVCache,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention, before the gate: [T, mixed_width]; writes the new K and V."""
        projected, k, v = inputs
        # decode rows read their keys from the pages
        keys = torch.empty(k.shape, dtype=k.dtype, device=k.device) if step.has_prefill else None
        q = qk_norm_rope_write(
            projected,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            step.rotary,
            cache.key_slots,
            cache.value_slots,
            step.slot_mapping,
            gated=True,
            k_out=keys,
        )
        return run_phases(step, KERNELS, self, (q, k if keys is None else keys, v), cache, out)

    def own_tensors(self, cache: KVCache) -> tuple[torch.Tensor, ...]:
        """What of `meet` is this layer's alone; its slots begin where keys and values do."""
        return self.q_norm.weight, self.k_norm.weight, cache.keys, cache.values

    def finish(self, met: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """The gate."""
        _, gate, _, _ = projected.split_with_sizes(self.qkv_proj.split_sizes, -1)
        return sigmoid_and_mul(met, gate)

    def project_out(
        self, mixed: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """mixed: [T, mixed_width]; residual: [T, hidden_size]. Returns (residual + o_proj(mixed), its
        norm)."""
        return self.o_proj.forward_and_norm(mixed, residual, norm)

    def begin_out(self, mixed: torch.Tensor, residual: torch.Tensor) -> BegunSum:
        """As `project_out`, but what is begun here is ended later."""
        return self.o_proj.begin(mixed, residual)


def _decode(
    mixer: FullAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PhaseBatch,
    cache: KVCache,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """k and v are in the cache already."""
    made = attention_decode(
        q,
        cache.keys,
        cache.values,
        batch.block_tables,
        batch.seq_lens,
        scale=mixer.scale,
        out=out if out is None else out.view(q.shape),
    )
    return made.flatten(1) if out is None else out


def _prefill(
    mixer: FullAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PhaseBatch,
    cache: KVCache,
    out: torch.Tensor | None,
) -> torch.Tensor:
    made = attention_prefill(
        q,
        k,
        v,
        cache.keys,
        cache.values,
        batch.block_tables,
        batch.query_lens,
        batch.context_lens,
        scale=mixer.scale,
        out=out if out is None else out.view(q.shape),
    )
    return made.flatten(1) if out is None else out


KERNELS: KernelTable = {
    (phase, device): kernel
    for phase, kernel in ((Phase.DECODE, _decode), (Phase.PREFILL, _prefill))
    for device in ("cpu", "cuda")
}
