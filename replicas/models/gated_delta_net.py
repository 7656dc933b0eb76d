"""Linear attention by the gated delta rule: a short causal convolution, a recurrence, a gated norm."""

import torch

from hybridserve.kernels.causal_conv1d import (
    causal_conv1d_decode,
    causal_conv1d_prefill_split,
    make_phase_weight,
)
from hybridserve.kernels.linear_attention import (
    gdn_decode_fused,
    gdn_decode_replay,
    gdn_gates,
    linear_attention_decode,
    linear_attention_prefill,
)
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.heads import HeadShard
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.linear import FusedColumnLinear, RowParallelLinear
from hybridserve.parallel.layers.sums import BegunSum
from hybridserve.parallel.peer_sums import Norm
from hybridserve.parallel.weights.parameter import Cut, ShardedParameter, head_ranges, joined_ranges
from hybridserve.replicas.models.batch import StateCache
from hybridserve.replicas.models.norm import GatedRMSNorm, PartialGatedRMSNorm
from hybridserve.replicas.models.sharding import mixer_heads
from hybridserve.replicas.models.specs import LinearAttentionSpec
from hybridserve.replicas.models.step import KernelTable, Phase, PhaseBatch, StepContext, run_phases

GPU_MIN_CHANNELS = 16
"""Value channels of a head that the GPU's prefill takes at least."""


class CausalConv(Layer):
    """Depthwise weights of the convolution over q|k|v, in the orders that its two kernels read."""

    def __init__(self, channels: Cut, kernel: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        data = torch.empty(channels.count, kernel, dtype=dtype, device=device)
        # the checkpoint's is [C, 1, kernel]
        self.weight = ShardedParameter(data, {"": channels}, squeeze=(1,))
        self.register_buffer("phase_weight", None, persistent=False)
        self.register_buffer("taps", None, persistent=False)

    def finish_loading(self) -> None:
        """Derive what the kernels read from the loaded weight."""
        if self.weight.is_cuda:
            # [C, kernel] that lies as [kernel, C]: channels are neighbours
            self.taps = self.weight.t().contiguous().t()
        else:
            self.taps = self.weight
            self.phase_weight = make_phase_weight(self.weight)


class GatedDeltaNet(Layer):
    """out_proj(norm(delta_rule(conv(qkv), gates(a, b))) * silu(z)), cut by value heads or their channels.

    With all of a head's channels on one rank, each token costs the ranks one all-reduce, in `project_out`.
    Rows of a state that lie on several ranks evolve without each other; what they share is the norm, whose
    sums of squares are then reduced in `finish`.
    """

    def __init__(
        self,
        spec: LinearAttentionSpec,
        hidden_size: int,
        eps: float,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        heads = mixer_heads(spec, group.rank, group.size)
        channels = Cut(spec.head_v_dim, (heads.channels(spec.head_v_dim),))
        self.spec = spec
        self.head_k_dim, self.head_v_dim = spec.head_k_dim, channels.count
        self.is_partial = heads.num_parts > 1
        if device.type == "cuda" and channels.count < GPU_MIN_CHANNELS <= spec.head_v_dim:
            raise ValueError(
                f"tp_size {group.size} leaves {channels.count} of linear_value_head_dim {spec.head_v_dim} on "
                f"a shard; on a GPU it must be {GPU_MIN_CHANNELS} or more"
            )
        self.heads = {
            "num_k_heads": heads.num_shared_heads,
            "num_v_heads": heads.num_heads,
            "head_k_dim": self.head_k_dim,
            "head_v_dim": self.head_v_dim,
        }
        qkv = qkv_cut(spec, heads)
        value_rows = Cut(spec.total_value_dim, value_ranges(spec, heads))
        per_head = Cut(spec.total_num_v_heads, head_ranges(heads.heads, 1, 1))
        if spec.interleaved:
            sections = interleaved_cuts(spec, heads)
        else:
            sections = {
                "in_proj_qkv": qkv,
                "in_proj_z": value_rows,
                "in_proj_b": per_head,
                "in_proj_a": per_head,
            }
        self.in_proj = FusedColumnLinear(
            hidden_size, sections, after_sum=group.size > 1, dtype=dtype, device=device
        )
        self.in_proj_sizes = (qkv.count, value_rows.count, per_head.count, per_head.count)
        key_dim = heads.num_shared_heads * spec.head_k_dim
        self.qkv_sizes = (key_dim, key_dim, value_rows.count)
        self.conv1d = CausalConv(qkv, spec.conv_kernel, dtype=dtype, device=device)
        # decay is kept in log space and fp32: exp(-0.001) is 1 in bf16, and a slow head would never forget
        data = torch.empty(2, per_head.count, dtype=torch.float32, device=device)
        self.A_log = ShardedParameter(data[0], {"": per_head}, init="a_log")
        self.dt_bias = ShardedParameter(data[1], {"": per_head}, init="dt_bias")
        if self.is_partial:
            self.norm = PartialGatedRMSNorm(
                channels, spec.total_num_v_heads, heads.first_head, eps, group, device=device
            )
        else:
            self.norm = GatedRMSNorm(spec.head_v_dim, eps, device=device)
        self.out_proj = RowParallelLinear(value_rows, hidden_size, group, dtype=dtype, device=device)

    def finish_loading(self) -> None:
        self.conv1d.finish_loading()

    @property
    def projected_width(self) -> int:
        return self.in_proj.weight.shape[0]

    @property
    def mixed_width(self) -> int:
        return self.out_proj.weight.shape[1]

    @property
    def num_gates(self) -> int:
        """Of each of the two that a token has, which `prepare` makes."""
        return self.heads["num_v_heads"]

    def project_in(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, hidden_size]. Returns what `mix` takes, [T, projected_width]."""
        return self.in_proj(x, out)

    def mix(self, projected: torch.Tensor, step: StepContext, cache: StateCache) -> torch.Tensor:
        """[T, projected_width] -> [T, mixed_width]; updates the sequences' states."""
        decodes = step.decodes
        if decodes is not None and projected.is_cuda and not self.is_partial:
            qkv, z, b, a = projected.split_with_sizes(self.in_proj_sizes, -1)
            return _in_one_launch(self, qkv, z, a, b, decodes, cache, self.norm.weight)
        inputs = self.inputs(projected, self.prepare(projected))
        return self.finish(self.meet(inputs, step, cache), projected)

    # `mix` in its parts, of which only `meet` knows of more than one token

    def prepare(self, projected: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decay and write strength, fp32 [2, T, num_gates]."""
        *_, b, a = projected.split_with_sizes(self.in_proj_sizes, -1)
        return gdn_gates(a, b, self.A_log, self.dt_bias, out)

    def inputs(self, projected: torch.Tensor, prepared: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `meet` takes: views."""
        qkv, _, b, a = projected.split_with_sizes(self.in_proj_sizes, -1)
        g, beta = prepared
        return qkv, a, b, g, beta

    def meet(
        self,
        inputs: tuple[torch.Tensor, ...],
        step: StepContext,
        cache: StateCache,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the tokens read of the states, before norm and gate: [T, mixed_width]; updates the states."""
        return run_phases(step, KERNELS, self, inputs, cache, out)

    def own_tensors(self, cache: StateCache) -> tuple[torch.Tensor, ...]:
        """What of `meet` is this layer's alone."""
        ring = () if cache.replay is None else (cache.replay.k, cache.replay.u, cache.replay.g)
        return self.conv1d.taps, self.A_log, self.dt_bias, cache.conv, cache.recurrent, *ring

    def finish(self, met: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Norm and gate. Where a head's channels are on several ranks, these add up their sums of squares."""
        _, z, _, _ = projected.split_with_sizes(self.in_proj_sizes, -1)
        heads = (self.heads["num_v_heads"], self.head_v_dim)
        return self.norm(met.view(-1, *heads), z.unflatten(1, heads)).flatten(1)

    def project_out(
        self, mixed: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """mixed: [T, mixed_width]; residual: [T, hidden_size]. Returns (residual + out_proj(mixed), its
        norm)."""
        return self.out_proj.forward_and_norm(mixed, residual, norm)

    def begin_out(self, mixed: torch.Tensor, residual: torch.Tensor) -> BegunSum:
        """As `project_out`, but what is begun here is ended later."""
        return self.out_proj.begin(mixed, residual)

    def as_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Channels [T, heads * dim] as q, k [T, num_k_heads, head_k_dim], v [T, num_v_heads, head_v_dim]."""
        q, k = (x.unflatten(1, (-1, self.head_k_dim)) for x in (q, k))
        return q, k, v.unflatten(1, (-1, self.head_v_dim))


def qkv_cut(spec: LinearAttentionSpec, heads: HeadShard) -> Cut:
    """A shard's rows of q|k|v: the key heads its value heads use, in both q and k, and its value heads."""
    key_dim, k_dim = spec.total_key_dim, spec.head_k_dim
    return Cut(
        2 * key_dim + spec.total_value_dim,
        head_ranges(heads.shared_heads, k_dim, k_dim)
        + head_ranges(heads.shared_heads, k_dim, k_dim, base=key_dim)
        + value_ranges(spec, heads, base=2 * key_dim),
    )


def value_ranges(spec: LinearAttentionSpec, heads: HeadShard, base: int = 0) -> tuple[tuple[int, int], ...]:
    """A shard's rows of v, which are also those of z and the columns of out_proj; they begin at `base`."""
    start, end = heads.channels(spec.head_v_dim)
    return head_ranges(heads.heads, spec.head_v_dim, end - start, base + start)


def interleaved_cuts(spec: LinearAttentionSpec, heads: HeadShard) -> dict[str, Cut]:
    """The same rows in the same order, q|k|v|z and b|a, where the checkpoint has them in groups per key head.

    in_proj_qkvz: `q [dk] | k [dk] | v [r * dv] | z [r * dv]`, in_proj_ba: `b [r] | a [r]`, with r value heads
    a key head.
    """
    k_dim, v_dim = spec.head_k_dim, spec.head_v_dim
    ratio = spec.total_num_v_heads // spec.total_num_k_heads
    width = 2 * k_dim + 2 * ratio * v_dim
    own = heads.channels(v_dim)

    def of_value_heads(
        stride: int, base: int, rows: int, own: tuple[int, int]
    ) -> tuple[tuple[int, int], ...]:
        """Rows `own` of each value head's `rows`, heads lying end to end from `base` on in a group."""
        start, end = own
        at = (head // ratio * stride + base + head % ratio * rows + start for head in heads.heads)
        return joined_ranges(at, end - start)

    qkvz = (
        head_ranges(heads.shared_heads, width, k_dim)
        + head_ranges(heads.shared_heads, width, k_dim, base=k_dim)
        + of_value_heads(width, 2 * k_dim, v_dim, own)
        + of_value_heads(width, 2 * k_dim + ratio * v_dim, v_dim, own)
    )
    ba = of_value_heads(2 * ratio, 0, 1, (0, 1)) + of_value_heads(2 * ratio, ratio, 1, (0, 1))
    return {
        "in_proj_qkvz": Cut(spec.total_num_k_heads * width, qkvz),
        "in_proj_ba": Cut(2 * spec.total_num_v_heads, ba),
    }


def _decode(
    mixer: GatedDeltaNet,
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    batch: PhaseBatch,
    cache: StateCache,
    out: torch.Tensor | None,
) -> torch.Tensor:
    qkv = causal_conv1d_decode(
        qkv, mixer.conv1d.phase_weight, None, cache.conv, batch.state_indices, batch.positions
    )
    q, k, v = mixer.as_heads(*qkv.split_with_sizes(mixer.qkv_sizes, -1))
    return linear_attention_decode(q, k, v, g, beta, cache.recurrent, batch.state_indices).flatten(1)


def _decode_from_projections(
    mixer: GatedDeltaNet,
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    batch: PhaseBatch,
    cache: StateCache,
    out: torch.Tensor | None,
) -> torch.Tensor:
    # without the norm there is no gate: z is not read, and anything of its shape will do
    z = qkv.narrow(1, 0, mixer.mixed_width)
    return _in_one_launch(mixer, qkv, z, a, b, batch, cache, None, out)


def _in_one_launch(
    mixer: GatedDeltaNet,
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    batch: PhaseBatch,
    cache: StateCache,
    norm_weight: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A decode step with its convolution and gates; and with the norm, where it has a weight."""
    given = (qkv, z, a, b, mixer.conv1d.taps, None, mixer.A_log, mixer.dt_bias, norm_weight, mixer.norm.eps)
    states = (cache.conv, cache.recurrent)
    rows = (batch.state_indices, batch.positions)
    if batch.replay is not None:
        assert cache.replay is not None
        ring = (batch.replay.counts, batch.replay.flushes)
        return gdn_decode_replay(*given, *states, cache.replay, *rows, *ring, **mixer.heads, out=out)
    return gdn_decode_fused(*given, *states, *rows, **mixer.heads, out=out)


def _prefill(
    mixer: GatedDeltaNet,
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    batch: PhaseBatch,
    cache: StateCache,
    out: torch.Tensor | None,
) -> torch.Tensor:
    history = (batch.state_indices, batch.has_initial_state, batch.query_lens)
    channels = causal_conv1d_prefill_split(
        qkv, mixer.conv1d.taps, None, cache.conv, *history, batch.context_lens, mixer.qkv_sizes
    )
    q, k, v = mixer.as_heads(*channels)
    made = linear_attention_prefill(
        q,
        k,
        v,
        g,
        beta,
        cache.recurrent,
        *history,
        any_initial_state=any(batch.context_lens),
        out=out if out is None else out.view(v.shape),
    )
    return made.flatten(1) if out is None else out


KERNELS: KernelTable = {
    (Phase.DECODE, "cpu"): _decode,
    (Phase.DECODE, "cuda"): _decode_from_projections,
    (Phase.PREFILL, "cpu"): _prefill,
    (Phase.PREFILL, "cuda"): _prefill,
}
