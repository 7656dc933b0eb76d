"""Ways to spread one linear-attention layer over ranks, each computing the same output on every rank.

Each takes the whole layer's weights and keeps its rank's part; `step` runs the layer once, with the residual
and the norm behind it as in a model, and sends through the wire it is given. What is sent, of T tokens and n
ranks (S: the state of the step's sequences, W: the projected width, H: the hidden size):

| strategy | all-reduce | all-gather |
| --- | --- | --- |
| value_heads, value_heads_in_parts | T x H | |
| head_v_dim | T x H, and T x Hv sums of squares in fp32 | |
| gather_projections | | T x W, T x H |
| gather_state | | T x W, T x H, S |

The third is what the tensor-parallel plan of transformers does for these layers (`colwise_gather_output` on
every projection), with one gather of q|k|v|z|b|a together where the plan makes one for each. In the fourth
each rank keeps the state of its heads only, as memory demands, but computes all heads; what it scatters back
is its own copy's part, which costs no byte, where a design with one computing rank would send the state a
second time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hybridserve.kernels.linear import linear
from hybridserve.kernels.rms_norm import rms_norm_residual
from hybridserve.parallel.comm_benchmark.mixer import (
    LayerWeights,
    Mixer,
    NextNorm,
    Part,
    projected_rows,
    value_columns,
    whole,
)
from hybridserve.parallel.comm_benchmark.settings import Case, LayerShape
from hybridserve.parallel.comm_benchmark.wire import Wire
from hybridserve.parallel.heads import shard_heads
from hybridserve.parallel.layers.sums import Summand, two_parts

# the least head_v_dim the GPU's kernels take
_MIN_HEAD_V_DIM = 16


Streams = tuple[torch.Tensor, torch.Tensor]
"""The residual stream [T, hidden] and its norm, which a layer takes; the same on every rank."""


class Strategy(ABC):
    """One rank's part of the layer, for one case."""

    name: str
    phases = ("decode", "prefill")
    """Of the cases that it is for."""
    least_ranks = 1
    chained_copies = 1
    """Layers, one after another, of which a prefill consists."""
    norm: NextNorm

    @staticmethod
    def unavailable(shape: LayerShape, size: int, on_gpu: bool) -> str | None:
        """Why this shape cannot be spread so over `size` ranks; None if it can."""
        return None

    @classmethod
    def run(cls, layers: Sequence["Strategy"], streams: Streams, wire: Wire) -> Streams:
        """Layers of this kind one after another."""
        for layer in layers:
            streams = layer.step(streams, wire)
        return streams

    @abstractmethod
    def step(self, streams: Streams, wire: Wire) -> Streams:
        """The layer on the second of `streams`. Returns the first, which may be overwritten, with the layer's
        output added, and its norm."""

    @abstractmethod
    def kept_state(self) -> tuple[Part, torch.Tensor]:
        """Which heads' state this rank keeps between steps, and the state, fp32 [N, Hv, V, K]."""


class _Sharded(Strategy):
    """Rows of the input projection and columns of the output projection that belong to a part."""

    def __init__(self, shape: LayerShape, part: Part, weights: LayerWeights, case: Case) -> None:
        device = weights.in_proj.device
        self.shape = shape
        self.in_proj = weights.in_proj[projected_rows(shape, part).to(device)]
        self.out_proj = weights.out_proj[:, value_columns(shape, part).to(device)].contiguous()
        self.mixer = Mixer(shape, part, weights, case)
        self.norm = NextNorm(weights.next_norm, shape.eps)

    def project_out(self, mixed: torch.Tensor) -> Summand:
        return lambda residual: linear(
            mixed, self.out_proj, residual=residual, consume_residual=mixed.is_cuda
        )

    def kept_state(self) -> tuple[Part, torch.Tensor]:
        return self.mixer.part, self.mixer.state


def _value_heads_part(shape: LayerShape, rank: int, size: int) -> Part:
    heads = shard_heads("linear_num_value_heads", shape.num_v_heads, shape.num_k_heads, rank, size)
    return Part(heads.shared_heads, heads.heads, 0, shape.head_v_dim)


class ValueHeads(_Sharded):
    """Value heads cut over the ranks, with the key heads they use."""

    name = "value_heads"

    def __init__(self, shape: LayerShape, weights: LayerWeights, case: Case, rank: int, size: int) -> None:
        super().__init__(shape, _value_heads_part(shape, rank, size), weights, case)

    @staticmethod
    def unavailable(shape: LayerShape, size: int, on_gpu: bool) -> str | None:
        return _does_not_divide("num_v_heads", shape.num_v_heads, size)

    def step(self, streams: Streams, wire: Wire) -> Streams:
        h, x = streams
        mixed = self.mixer.mix(linear(x, self.in_proj))
        return wire.sum_and_norm(self.project_out(mixed), h, self.norm, "hidden")


class ValueHeadsInParts(ValueHeads):
    """As `ValueHeads`, with what lies between mixers done for half of the tokens while the sums of the other
    half are under way: of a chain of layers, as no layer has anything to do meanwhile alone."""

    name = "value_heads_in_parts"
    phases = ("prefill",)
    # on one rank there is nothing to do meanwhile
    least_ranks = 2
    # the last layer's sums are waited for: one in so many
    chained_copies = 16

    def step(self, streams: Streams, wire: Wire) -> Streams:
        return self.run([self], streams, wire)

    @classmethod
    def run(cls, layers: Sequence["ValueHeadsInParts"], streams: Streams, wire: Wire) -> Streams:
        x = streams[1]
        rows = two_parts(x.shape[0])
        ready: list[Callable[[], Streams]] = [partial(_rows_of, streams, own) for own in rows]
        for layer in layers:
            projected = x.new_empty(x.shape[0], layer.in_proj.shape[0])
            residuals = []
            for own, take in zip(rows, ready, strict=True):
                residual, normed = take()
                residuals.append(residual)
                linear(normed, layer.in_proj, out=projected[own])
            mixed = layer.mixer.mix(projected)
            ready = [
                partial(wire.begin_sum(layer.project_out(mixed[own]), residual, "hidden").end, layer.norm)
                for own, residual in zip(rows, residuals, strict=True)
            ]
        first, second = (take() for take in ready)
        return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])


class HeadVDim(_Sharded):
    """All heads on every rank, each with a part of head_v_dim; q, k and the gates are whole."""

    name = "head_v_dim"

    def __init__(self, shape: LayerShape, weights: LayerWeights, case: Case, rank: int, size: int) -> None:
        num_v = shape.head_v_dim // size
        everything = whole(shape)
        super().__init__(
            shape, Part(everything.k_heads, everything.v_heads, rank * num_v, num_v), weights, case
        )
        self.split = size > 1

    @staticmethod
    def unavailable(shape: LayerShape, size: int, on_gpu: bool) -> str | None:
        if on_gpu and shape.head_v_dim // size < _MIN_HEAD_V_DIM:
            return (
                f"head_v_dim {shape.head_v_dim} / {size} is less than the {_MIN_HEAD_V_DIM} its kernels take"
            )
        return _does_not_divide("head_v_dim", shape.head_v_dim, size)

    def step(self, streams: Streams, wire: Wire) -> Streams:
        h, x = streams

        def normed(out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            squares = wire.all_reduce(out.float().square().sum(-1), "norm")
            scale = torch.rsqrt(squares / self.shape.head_v_dim + self.shape.eps)
            y = out.float() * scale[..., None] * self.mixer.norm
            return (y * torch.nn.functional.silu(z.float())).to(out.dtype)

        mixed = self.mixer.mix(linear(x, self.in_proj), normed if self.split else None)
        return wire.sum_and_norm(self.project_out(mixed), h, self.norm, "hidden")


class GatherProjections(Strategy):
    """Each rank projects a part, all ranks compute all heads and keep the whole state."""

    name = "gather_projections"

    def __init__(self, shape: LayerShape, weights: LayerWeights, case: Case, rank: int, size: int) -> None:
        device, dtype = weights.in_proj.device, weights.in_proj.dtype
        rows, columns = shape.projected_width // size, shape.hidden_size // size
        # a rank's rows are neighbours, so that q | k | v | z | b | a is the order of what is gathered
        self.in_proj = weights.in_proj[rank * rows : (rank + 1) * rows].contiguous()
        self.out_proj = weights.out_proj[rank * columns : (rank + 1) * columns].contiguous()
        self.mixer = Mixer(shape, whole(shape), weights, case)
        self.norm = NextNorm(weights.next_norm, shape.eps)
        self.size = size
        self.projected = torch.empty(size, case.tokens, rows, dtype=dtype, device=device)
        self.hidden = torch.empty(size, case.tokens, columns, dtype=dtype, device=device)

    @staticmethod
    def unavailable(shape: LayerShape, size: int, on_gpu: bool) -> str | None:
        return _does_not_divide("projected_width", shape.projected_width, size) or _does_not_divide(
            "hidden_size", shape.hidden_size, size
        )

    def step(self, streams: Streams, wire: Wire) -> Streams:
        h, x = streams
        wire.all_gather_into(self.projected, linear(x, self.in_proj), "projections")
        mixed = self.mix(_side_by_side(self.projected), wire)
        wire.all_gather_into(self.hidden, linear(mixed, self.out_proj), "hidden")
        out = _side_by_side(self.hidden)
        normed, total = rms_norm_residual(out, h, self.norm.weight, self.norm.eps, zero_centered=False)
        return total, normed

    def mix(self, projected: torch.Tensor, wire: Wire) -> torch.Tensor:
        return self.mixer.mix(projected)

    def kept_state(self) -> tuple[Part, torch.Tensor]:
        return self.mixer.part, self.mixer.state


class GatherState(GatherProjections):
    """As `GatherProjections`, and each rank keeps the state of its own value heads only."""

    name = "gather_state"

    def __init__(self, shape: LayerShape, weights: LayerWeights, case: Case, rank: int, size: int) -> None:
        super().__init__(shape, weights, case, rank, size)
        self.part = _value_heads_part(shape, rank, size)
        first = self.part.v_heads[0]
        self.own = slice(first, first + len(self.part.v_heads))
        self.state = self.mixer.state[:, self.own].clone()
        # the ranks' parts lie one after another, and the mixer's state has the sequences outermost
        self.gathered = torch.empty(size, *self.state.shape, dtype=torch.float32, device=self.state.device)
        # nothing but the gather may bring the other heads' state
        self.mixer.state.fill_(float("nan"))

    @staticmethod
    def unavailable(shape: LayerShape, size: int, on_gpu: bool) -> str | None:
        return GatherProjections.unavailable(shape, size, on_gpu) or _does_not_divide(
            "num_v_heads", shape.num_v_heads, size
        )

    def mix(self, projected: torch.Tensor, wire: Wire) -> torch.Tensor:
        wire.all_gather_into(self.gathered, self.state, "state")
        parts = self.mixer.state.unflatten(1, (self.size, -1)).transpose(0, 1)
        parts.copy_(self.gathered)
        mixed = self.mixer.mix(projected)
        self.state.copy_(self.mixer.state[:, self.own])
        return mixed

    def kept_state(self) -> tuple[Part, torch.Tensor]:
        return self.part, self.state


STRATEGIES: tuple[type[ValueHeads | HeadVDim | GatherProjections], ...] = (
    ValueHeads,
    ValueHeadsInParts,
    HeadVDim,
    GatherProjections,
    GatherState,
)


def _rows_of(streams: Streams, rows: slice) -> Streams:
    return streams[0][rows], streams[1][rows]


def _side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """[n, T, w] -> [T, n * w], a copy unless n is 1."""
    return parts.transpose(0, 1).flatten(1)


def _does_not_divide(what: str, total: int, size: int) -> str | None:
    if total % size == 0:
        return None
    divisors = [ranks for ranks in range(1, total + 1) if total % ranks == 0]
    return f"{size} ranks do not divide {what} {total}; these do: {', '.join(map(str, divisors[:8]))}"
