"""Gated DeltaNet's decode in Triton, fused and from the replay ring: outputs and states against fp64."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch

from hybridserve.kernels.causal_conv1d import causal_conv1d_decode, make_phase_weight
from hybridserve.kernels.causal_conv1d.reference import causal_conv1d_reference
from hybridserve.kernels.linear_attention import cpu
from hybridserve.kernels.linear_attention.reference import gdn_gates_reference, linear_attention_reference
from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW, ReplayRing
from hybridserve.kernels.linear_attention.triton_gdn_decode import _gdn_decode_kernel, gdn_decode_fused
from hybridserve.kernels.linear_attention.triton_gdn_decode_replay import (
    _gdn_decode_replay_kernel,
    flush_replay,
    gdn_decode_replay,
)
from hybridserve.kernels.rms_norm import triton_norm_given
from hybridserve.kernels.rms_norm.cpu import rms_norm_gated
from hybridserve.kernels.rms_norm.reference import rms_norm_gated_reference
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

EPS = 1e-6
# the interpreter truncates to bf16, where a GPU rounds
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def some_flushes(counts: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A schedule as mixed as can be: full rings, and others by a rule of no meaning."""
    return (counts + 1 >= REPLAY_WINDOW) | ((positions + 7 * rows) % REPLAY_WINDOW == 0)


@dataclass(frozen=True)
class Shape:
    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 32
    v_dim: int = 32
    kernel: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def sizes(self) -> dict[str, int]:
        return {
            "num_k_heads": self.k_heads,
            "num_v_heads": self.v_heads,
            "head_k_dim": self.k_dim,
            "head_v_dim": self.v_dim,
        }


@dataclass(frozen=True)
class Weights:
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, device: torch.device, bias: bool = False, turned: bool = True) -> "Weights":
        """`turned`: the convolution's weight lies as [kernel, C]."""
        weight = torch.randn(shape.kernel, shape.channels, device=device).to(shape.dtype).T
        return cls(
            weight if turned else weight.contiguous(),
            torch.randn(shape.channels, device=device).to(shape.dtype) if bias else None,
            torch.rand(shape.v_heads, device=device),
            torch.randn(shape.v_heads, device=device),
            torch.rand(shape.v_dim, device=device) + 0.5,
        )

    def all(self) -> tuple[torch.Tensor | float | None, ...]:
        return (*(getattr(self, f.name) for f in fields(self)), EPS)


@dataclass(frozen=True)
class Token:
    """One token of each row, as views of one projection: qkv, z, a, b."""

    qkv: torch.Tensor
    z: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, batch: int, device: torch.device, size: float = 1.0) -> "Token":
        value_dim = shape.v_heads * shape.v_dim
        sizes = (shape.channels, value_dim, shape.v_heads, shape.v_heads)
        qkv, z, b, a = torch.randn(batch, sum(sizes), device=device).to(shape.dtype).split(sizes, 1)
        return cls(qkv * size, z, a, b)

    def all(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.z, self.a, self.b

    def rows(self, index: torch.Tensor | slice) -> "Token":
        return Token(*(x[index] for x in self.all()))

    def with_padding(self) -> "Token":
        """One more row, of NaN."""
        return Token(*(torch.cat((x, torch.full_like(x[:1], torch.nan))) for x in self.all()))

    def replaced(self, **changes: torch.Tensor) -> "Token":
        return replace(self, **changes)


def plain_step(
    shape: Shape,
    weights: Weights,
    token: Token,
    rings: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Plain PyTorch in the dtype of the token, fp32 states; rings [B, kernel, C] and states are updated."""
    batch = positions.shape[0]
    phase_weight = make_phase_weight(weights.conv_weight)
    rows = torch.arange(batch, device=states.device)
    x = causal_conv1d_decode(token.qkv, phase_weight, weights.conv_bias, rings, rows, positions)
    q, k, v = split_heads(shape, x)
    g, beta = cpu.gdn_gates(token.a, token.b, weights.A_log, weights.dt_bias)
    out = cpu.linear_attention_decode(q, k, v, g, beta, states, rows)
    z = token.z.reshape(batch, shape.v_heads, shape.v_dim)
    return rms_norm_gated(out, z, weights.norm_weight, EPS).flatten(1)


def exact_step(
    shape: Shape,
    weights: Weights,
    token: Token,
    rings: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The truth, fp64; states fp64 [B, Hv, V, K] and rings [B, kernel, C] are updated."""
    out = []
    bias = None if weights.conv_bias is None else weights.conv_bias.double()
    for i, position in enumerate(positions.tolist()):
        columns = [(position - lag) % shape.kernel for lag in range(shape.kernel - 1, 0, -1)]
        history, x = rings[i, columns].double(), token.qkv[i : i + 1].double()
        rings[i, position % shape.kernel] = token.qkv[i].to(rings.dtype)
        y = causal_conv1d_reference(x, weights.conv_weight.double(), bias, history)
        g, beta = gdn_gates_reference(
            token.a[i : i + 1].double(), token.b[i : i + 1].double(), weights.A_log, weights.dt_bias
        )
        o, states[i] = linear_attention_reference(*split_heads(shape, y), g, beta, states[i])
        z = token.z[i].double().view(1, shape.v_heads, shape.v_dim)
        out.append(rms_norm_gated_reference(o, z, weights.norm_weight.double(), EPS).flatten(1))
    return torch.cat(out)


def split_heads(shape: Shape, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    key_dim = shape.k_heads * shape.k_dim
    q, k, v = x.split((key_dim, key_dim, shape.v_heads * shape.v_dim), 1)
    keys, values = (-1, shape.k_heads, shape.k_dim), (-1, shape.v_heads, shape.v_dim)
    return q.reshape(keys), k.reshape(keys), v.reshape(values)


class Units:
    """Units of 0xFF bytes that hold a layer's state, conv ring and replay ring, as an arena lays them."""

    def __init__(
        self, shape: Shape, device: torch.device, count: int, state_dtype: torch.dtype = torch.float32
    ) -> None:
        window, fp32 = REPLAY_WINDOW, torch.float32
        parts = (
            (state_dtype, (shape.v_heads, shape.v_dim, shape.k_dim)),
            (shape.dtype, (shape.kernel, shape.channels)),
            (shape.dtype, (shape.k_heads, window, shape.k_dim)),
            (fp32, (shape.v_heads, window, shape.v_dim)),
            (fp32, (shape.v_heads, window)),
        )
        sizes = [-(-math.prod(size) * dtype.itemsize // 256) * 256 for dtype, size in parts]
        self.step = sum(sizes) // 256
        self.buffer = torch.full((count, sum(sizes)), 0xFF, dtype=torch.uint8, device=device)
        views, at = [], 0
        for (dtype, size), nbytes in zip(parts, sizes, strict=True):
            flat = self.buffer.view(-1).view(dtype)
            row, first = 256 // dtype.itemsize, at // dtype.itemsize
            shape_ = ((flat.numel() - first - math.prod(size)) // row + 1, *size)
            views.append(flat.as_strided(shape_, (row, *torch.empty(size).stride()), first))
            at += nbytes
        self.state, self.conv, k, u, g = views
        self.ring = ReplayRing(k, u, g)

    def start(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill rings and states of some rows; returns copies of both."""
        self.conv[index] = torch.randn_like(self.conv[index])
        self.state[index] = torch.randn_like(self.state[index])
        return self.conv[index], self.state[index]

    def copy(self, source: int, target: int) -> None:
        self.buffer[target // self.step] = self.buffer[source // self.step]
        self.buffer[source // self.step] = 0xFF


def fused(units: Units, shape: Shape, weights: Weights, token: Token, index, positions) -> torch.Tensor:
    with poisoned_memory():
        return gdn_decode_fused(
            *token.all(), *weights.all(), units.conv, units.state, index, positions, **shape.sizes()
        )


def replayed(
    units: Units, shape: Shape, weights: Weights, token: Token, index, positions, counts, flushes
) -> torch.Tensor:
    with poisoned_memory():
        return gdn_decode_replay(
            *token.all(),
            *weights.all(),
            units.conv,
            units.state,
            units.ring,
            index,
            positions,
            counts,
            flushes,
            **shape.sizes(),
        )


def padded(x: torch.Tensor, value: int) -> torch.Tensor:
    return torch.cat((x, torch.full_like(x[:1], value)))


def check_fused(
    shape: Shape, device: torch.device, weights: Weights, token: Token, batch: int = 2, history: float = 1.0
) -> None:
    """One step of `batch` rows and one of padding, among a unit that is nobody's.

    history: the size of the inputs before.
    """
    units = Units(shape, device, batch + 1)
    index = torch.randperm(batch + 1, device=device)[:batch] * units.step
    rings, initial = units.start(index)
    units.conv[index] = rings = rings * history
    positions = torch.randint(1, 1000, (batch,), device=device)
    before = units.buffer.clone()
    out = fused(units, shape, weights, token.with_padding(), padded(index, -1), padded(positions, 5))
    assert not out[batch].any()
    others = torch.ones(batch + 1, dtype=torch.bool, device=device)
    others[index // units.step] = False
    assert torch.equal(units.buffer[others], before[others])
    exact_rings, exact_state = rings.clone(), initial.double()
    exact = exact_step(shape, weights, token, exact_rings, exact_state, positions)
    plain_state = initial.clone()
    plain = plain_step(shape, weights, token, rings, plain_state, positions)
    assert torch.equal(units.conv[index], rings) and torch.equal(rings, exact_rings)
    assert_as_good_as_plain(out[:batch], plain, exact)
    assert_as_good_as_plain(units.state[index], plain_state, exact_state)


SHAPES = [Shape(), Shape(dtype=HALF), Shape(1, 3, 48, 40), Shape(2, 2, 64, 96, kernel=3, dtype=HALF)]
FULL = [Shape(16, 32, 128, 128, dtype=HALF), Shape(6, 6, 96, 192, dtype=HALF), Shape(16, 48, 128, 128)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused(device, shape, bias):
    weights = Weights.make(shape, device, bias, turned=bias)
    check_fused(shape, device, weights, Token.make(shape, 2, device))


@pytest.mark.parametrize("shape", FULL)
def test_fused_full(gpu, shape):
    check_fused(shape, gpu, Weights.make(shape, gpu), Token.make(shape, 40, gpu), 40)


@pytest.mark.parametrize("b", [-1e4, 1e4])
@pytest.mark.parametrize("decay", [-20.0, 0.0])
@pytest.mark.parametrize("size", [1e-12, 1e4])
def test_fused_extremes(device, size, decay, b):
    shape = Shape()
    token = Token.make(shape, 1, device, size)
    a = torch.full_like(token.a, 20.0 if decay else -1e4)
    weights = replace(
        Weights.make(shape, device),
        A_log=torch.zeros(4, device=device),
        dt_bias=torch.zeros(4, device=device),
    )
    check_fused(shape, device, weights, token.replaced(a=a, b=torch.full_like(a, b)), 1, size)


@pytest.mark.parametrize("replay", [False, True])
def test_halves_of_the_channels(device, replay):
    """As on two ranks, each with half of every head's value channels: the norm gets the sum of their sums."""
    shape, half = Shape(), Shape(v_dim=16)
    weights, token = Weights.make(shape, device), Token.make(shape, 2, device)
    units = Units(shape, device, 2)
    index, positions = torch.arange(2, device=device) * units.step, torch.tensor([4, 9], device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    flushes = torch.tensor([False, True], device=device)
    rings, states = units.start(index)
    whole = fused(units, shape, weights, token, index, positions)
    heads = (2, shape.v_heads, shape.v_dim)
    keys = 2 * shape.k_heads * shape.k_dim
    channels = torch.arange(keys, shape.channels, device=device).view(heads[1:])
    parts = []
    for start in (0, 16):
        own = slice(start, start + 16)
        rows = torch.cat((torch.arange(keys, device=device), channels[:, own].flatten()))
        ours = Units(half, device, 2)
        places = torch.arange(2, device=device) * ours.step
        ours.conv[places], ours.state[places] = rings[:, :, rows], states[:, :, own]
        given = (
            token.qkv[:, rows],
            torch.full((2, 64), torch.nan, device=device),
            token.a,
            token.b,
            weights.conv_weight.T[:, rows].contiguous().T,
            None,
            weights.A_log,
            weights.dt_bias,
            None,
            EPS,
            ours.conv,
            ours.state,
        )
        with poisoned_memory():
            if replay:
                o = gdn_decode_replay(*given, ours.ring, places, positions, counts, flushes, **half.sizes())
            else:
                o = gdn_decode_fused(*given, places, positions, **half.sizes())
        o = o.view(2, shape.v_heads, 16)
        parts.append((own, o, triton_norm_given.sum_of_squares(o)))
        torch.testing.assert_close(ours.state[places][1], units.state[index][1, :, own])
    squares = parts[0][2] + parts[1][2]
    for own, o, _ in parts:
        z, weight = token.z.view(heads)[:, :, own], weights.norm_weight[own]
        normed = triton_norm_given.rms_norm_gated_given(o, z, weight, EPS, squares, shape.v_dim)
        torch.testing.assert_close(normed, whole.view(heads)[:, :, own])


def test_fused_row_before_its_sequence_touches_nothing(device):
    shape = Shape(1, 2)
    units = Units(shape, device, 2)
    before, index = units.buffer.clone(), torch.arange(2, device=device) * units.step
    token = Token.make(shape, 2, device)
    out = fused(units, shape, Weights.make(shape, device), token, index, torch.full_like(index, -1))
    assert not out.any() and torch.equal(units.buffer, before)


def test_fused_rows_are_bitwise_their_own_in_any_batch(device):
    shape = Shape()
    weights, token = Weights.make(shape, device), Token.make(shape, 3, device)
    units = Units(shape, device, 3)
    index, positions = torch.arange(3, device=device) * units.step, torch.tensor([4, 9, 11], device=device)
    units.start(index)
    before = units.buffer.clone()
    out = fused(units, shape, weights, token, index, positions)
    after, order = units.buffer.clone(), torch.tensor([2, 0, 1], device=device)
    units.buffer.copy_(before)
    again = fused(units, shape, weights, token.rows(order), index[order], positions[order])
    assert torch.equal(again, out[order]) and torch.equal(units.buffer, after)


def test_a_head_too_large_for_one_program_is_refused(device):
    shape = Shape(1, 1, 256, 256)
    units = Units(shape, device, 1)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="head_k_dim=256 and head_v_dim=256"):
        fused(units, shape, Weights.make(shape, device), Token.make(shape, 1, device), index, index)


def check_replay(shape: Shape, device: torch.device, steps: int, decay: float | None = None) -> None:
    """Three rows and padding: row 1 joins late, row 2's unit is moved, row 0's ring is flushed by hand."""
    weights = Weights.make(shape, device)
    units = Units(shape, device, 5)
    index = torch.tensor([3, 1, 0], device=device) * units.step
    rings, initial = units.start(index)
    exact_rings, exact_state, plain_state = rings.clone(), initial.double(), initial.clone()
    positions = torch.tensor([5, 40, 64], device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    flushed = 0
    outs: tuple[list, list, list] = ([], [], [])
    for step in range(steps):
        rows = slice(0, 3) if step >= 4 else torch.tensor([0, 2], device=device)
        if step == 9:
            units.copy(int(index[2]), 4 * units.step)
            index[2] = 4 * units.step
        if step == 13:
            flush_replay(units.state, units.ring, padded(index[:1], -1), padded(counts[:1], 3))
            counts[0] = 0
        token = Token.make(shape, len(index[rows]), device)
        if decay is not None:
            token = token.replaced(a=torch.full_like(token.a, 20.0 if step % 3 == 0 else decay))
        now = some_flushes(counts[rows], positions[rows], index[rows])
        flushed += int(now.sum())
        args = (index[rows], positions[rows], counts[rows], now)
        out = replayed(units, shape, weights, token.with_padding(), *map(padded, args, (-1, 5, 2, 1)))
        assert not out[-1].any()
        parts = [x[rows].clone() for x in (exact_rings, exact_state, rings, plain_state)]
        outs[0].append(out[:-1])
        outs[1].append(plain_step(shape, weights, token, *parts[2:], positions[rows]))
        outs[2].append(exact_step(shape, weights, token, *parts[:2], positions[rows]))
        for whole, part in zip((exact_rings, exact_state, rings, plain_state), parts, strict=True):
            whole[rows] = part
        counts[rows] = torch.where(now, 0, counts[rows] + 1)
        positions[rows] += 1
    assert flushed >= 3
    assert torch.equal(units.conv[index], rings)
    flush_replay(units.state, units.ring, index, counts)
    out, plain, exact = (torch.cat(o) for o in outs)
    assert_as_good_as_plain(out, plain, exact)
    assert_as_good_as_plain(units.state[index], plain_state, exact_state)


def test_replay(device):
    # more than a window; other dtypes are for a GPU, below
    check_replay(Shape(1, 2, 48, 40), device, 20)


def test_bf16_states_are_read_as_they_are_and_written_rounded(device):
    shape = Shape(1, 2)
    weights, narrow, wide = Weights.make(shape, device), Units(shape, device, 2, torch.bfloat16), None
    narrow.start(index := torch.arange(2, device=device) * narrow.step)
    wide = Units(shape, device, 2)
    rows = torch.arange(2, device=device) * wide.step
    wide.conv[rows], wide.state[rows] = narrow.conv[index], narrow.state[index].float()
    positions, counts = torch.tensor([7, 9], device=device), torch.tensor([0, 0], device=device)

    def check(outs: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.testing.assert_close(*outs)
        written = wide.state[rows].bfloat16()
        torch.testing.assert_close(narrow.state[index], written, rtol=2**-7, atol=1e-6)
        wide.state[rows] = narrow.state[index].float()

    token = Token.make(shape, 2, device)
    check(tuple(fused(u, shape, weights, token, i, positions) for u, i in ((narrow, index), (wide, rows))))
    for flushes in (torch.tensor([False, True], device=device), torch.tensor([True, True], device=device)):
        positions = positions + 1
        args = shape, weights, Token.make(shape, 2, device)
        turn = positions, counts, flushes
        check(tuple(replayed(u, *args, i, *turn) for u, i in ((narrow, index), (wide, rows))))
        counts = torch.where(flushes, 0, counts + 1)


@pytest.mark.parametrize("decay", [-1e4, -8.0])
def test_replay_keeps_weak_decays_behind_strong_ones(device, decay):
    check_replay(Shape(1, 1), device, 20, decay)


@pytest.mark.parametrize("shape", FULL)
def test_replay_full(gpu, shape):
    check_replay(shape, gpu, 60)


def test_replay_reads_no_entry_behind_the_count_and_writes_one(device):
    shape = Shape(1, 2)
    weights, units = Weights.make(shape, device), Units(shape, device, 2)
    index, positions = torch.arange(2, device=device) * units.step, torch.tensor([7, 7], device=device)
    units.start(index)
    counts, flushes = torch.tensor([0, 0], device=device), torch.tensor([False, True], device=device)
    state = units.state[index]
    out = replayed(units, shape, weights, Token.make(shape, 2, device), index, positions, counts, flushes)
    assert not out.isnan().any()
    assert torch.equal(units.state[index[0]], state[0]) and not torch.equal(units.state[index[1]], state[1])
    for part in (units.ring.k, units.ring.u, units.ring.g.unsqueeze(-1)):
        written = ~part[index].isnan().all(-1)
        assert written[0, :, 0].all() and not written[0, :, 1:].any() and not written[1].any()


def test_no_variant_is_compiled_for_another_batch(gpu, count_variants):
    shape = Shape(dtype=HALF)
    weights, units = Weights.make(shape, gpu), Units(shape, gpu, 64)
    variants = set()
    for batch in (2, 1, 16, 33, 64):
        token, index = Token.make(shape, batch, gpu), torch.arange(batch, device=gpu) * units.step
        units.start(index)
        fused(units, shape, weights, token, index, index + 7)
        replayed(units, shape, weights, token, index, index + 7, index * 0, index > 3)
        variants.add(count_variants(_gdn_decode_kernel, _gdn_decode_replay_kernel))
    assert len(variants) == 1


def test_states_behind_two_to_the_31_elements(gpu):
    shape = Shape(dtype=HALF)
    weights, token = Weights.make(shape, gpu), Token.make(shape, 2, gpu)
    near = Units(shape, gpu, 2)
    far = Units(shape, gpu, (14 << 30) // (256 * near.step))
    index = torch.tensor([0, 1], device=gpu) * near.step
    far_index = index + (far.buffer.shape[0] - 2) * near.step
    assert far_index.min() * 64 > 2**31
    near.start(index)
    far.buffer[-2:] = near.buffer
    positions, counts = torch.tensor([3, 30], device=gpu), torch.tensor([0, 0], device=gpu)
    for units, rows in ((near, index), (far, far_index)):
        units.outs = [fused(units, shape, weights, token, rows, positions)]
        units.outs.append(replayed(units, shape, weights, token, rows, positions + 1, counts, counts > 0))
        flush_replay(units.state, units.ring, rows, counts + 1)
    assert all(torch.equal(a, b) for a, b in zip(near.outs, far.outs, strict=True))
    assert torch.equal(far.buffer[-2:], near.buffer)


def test_a_graph_of_both_can_be_captured(gpu):
    shape = Shape(dtype=HALF)
    weights, token, units = Weights.make(shape, gpu), Token.make(shape, 2, gpu), Units(shape, gpu, 2)
    index = torch.arange(2, device=gpu) * units.step
    units.start(index)
    args = (units, shape, weights, token, index, index + 3)
    before = units.buffer.clone()
    expected = fused(*args), replayed(*args, index * 0, index > 0)
    units.buffer.copy_(before)
    graph = torch.cuda.CUDAGraph()
    counts, flushes = index * 0, index > 0
    with torch.cuda.graph(graph):
        out = fused(*args), replayed(*args, counts, flushes)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
