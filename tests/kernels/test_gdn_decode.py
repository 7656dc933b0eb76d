"""Gated DeltaNet's decode steps in plain PyTorch, from S and from S + ring, against fp64."""

from dataclasses import dataclass

import pytest
import torch

from hybridserve.kernels.causal_conv1d.reference import causal_conv1d_reference
from hybridserve.kernels.linear_attention import flush_replay, gdn_decode_fused, gdn_decode_replay
from hybridserve.kernels.linear_attention.reference import gdn_gates_reference, linear_attention_reference
from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW, ReplayRing
from hybridserve.kernels.rms_norm import rms_norm_gated_given, sum_of_squares
from hybridserve.kernels.rms_norm.reference import rms_norm_gated_reference

K_HEADS, V_HEADS, K_DIM, V_DIM, KERNEL, EPS = 2, 4, 16, 8, 4, 1e-6
CHANNELS = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
SIZES = {"num_k_heads": K_HEADS, "num_v_heads": V_HEADS, "head_k_dim": K_DIM, "head_v_dim": V_DIM}
ROWS, STEPS = 2, 2 * REPLAY_WINDOW + 5


def some_flushes(counts: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A schedule as mixed as can be: full rings, and others by a rule of no meaning."""
    return (counts + 1 >= REPLAY_WINDOW) | ((positions + 7 * rows) % REPLAY_WINDOW == 0)


@dataclass(frozen=True)
class Layer:
    """Weights, units of NaN but for those at `index`, and tokens [STEPS, ROWS + 1, ...], the last row NaN."""

    weights: tuple[torch.Tensor, ...]
    conv: torch.Tensor
    state: torch.Tensor
    ring: ReplayRing
    index: torch.Tensor
    tokens: tuple[torch.Tensor, ...]

    @classmethod
    def make(cls) -> "Layer":
        weights = (
            torch.randn(CHANNELS, KERNEL),
            torch.randn(CHANNELS),
            torch.rand(V_HEADS),
            torch.randn(V_HEADS),
            torch.rand(V_DIM) + 0.5,
        )
        conv, state, k, u, g = (
            torch.full((ROWS + 1, *size), torch.nan)
            for size in (
                (KERNEL, CHANNELS),
                (V_HEADS, V_DIM, K_DIM),
                (K_HEADS, REPLAY_WINDOW, K_DIM),
                (V_HEADS, REPLAY_WINDOW, V_DIM),
                (V_HEADS, REPLAY_WINDOW),
            )
        )
        index = torch.tensor([2, 0])
        conv[index], state[index] = torch.randn(ROWS, *conv.shape[1:]), torch.randn(ROWS, *state.shape[1:])
        sizes = (CHANNELS, V_HEADS * V_DIM, V_HEADS, V_HEADS)
        tokens = torch.randn(STEPS, ROWS + 1, sum(sizes))
        tokens[:, ROWS] = torch.nan
        return cls(weights, conv, state, ReplayRing(k, u, g), index, tokens.split(sizes, 2))

    def exact(self, row: int, first_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 outputs [STEPS, Hv V] and the last state of one row."""
        weight, bias, A_log, dt_bias, norm_weight = (w.double() for w in self.weights)
        unit = self.index[row]
        columns = [(first_position - lag) % KERNEL for lag in range(KERNEL - 1, 0, -1)]
        qkv, z, a, b = (x[:, row].double() for x in self.tokens)
        x = causal_conv1d_reference(qkv, weight, bias, self.conv[unit, columns].double())
        q, k, v = x.split((K_HEADS * K_DIM, K_HEADS * K_DIM, V_HEADS * V_DIM), 1)
        heads = (q.view(-1, K_HEADS, K_DIM), k.view(-1, K_HEADS, K_DIM), v.view(-1, V_HEADS, V_DIM))
        gates = gdn_gates_reference(a, b, A_log, dt_bias)
        o, state = linear_attention_reference(*heads, *gates, self.state[unit].double())
        return rms_norm_gated_reference(o, z.view(o.shape), norm_weight, EPS).flatten(1), state


def padded(x: torch.Tensor, value: int) -> torch.Tensor:
    return torch.cat((x, torch.full_like(x[:1], value)))


def check(replay: bool) -> None:
    layer, first = Layer.make(), (9, 30)
    exact = [layer.exact(row, position) for row, position in enumerate(first)]
    positions, counts, outs, flushed = torch.tensor(first), torch.zeros(ROWS, dtype=torch.int64), [], 0
    for step in range(STEPS):
        token = tuple(x[step] for x in layer.tokens)
        args = (*token, *layer.weights, EPS, layer.conv, layer.state)
        places = padded(layer.index, -1), padded(positions, 7)
        if replay:
            flushes = some_flushes(counts, positions, layer.index)
            flushed += int(flushes.sum())
            rings = (layer.ring, *places, padded(counts, 3), padded(flushes, True))
            out = gdn_decode_replay(*args, *rings, **SIZES)
            counts = torch.where(flushes, 0, counts + 1)
        else:
            out = gdn_decode_fused(*args, *places, **SIZES)
        assert not out[ROWS].any()
        outs.append(out[:ROWS])
        positions += 1
    if replay:
        assert flushed >= ROWS * (STEPS // REPLAY_WINDOW) and counts.all()
        flush_replay(layer.state, layer.ring, padded(layer.index, -1), padded(counts, 1))
    for row, (exact_out, exact_state) in enumerate(exact):
        out, state = torch.stack(outs)[:, row], layer.state[layer.index[row]]
        torch.testing.assert_close(out.double(), exact_out, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(state.double(), exact_state, atol=2e-5, rtol=1e-5)
    assert layer.state[1].isnan().all() and layer.conv[1].isnan().all()


def test_fused_steps_are_the_recurrence():
    check(replay=False)


def test_steps_from_the_ring_are_the_recurrence():
    check(replay=True)


def test_no_entry_behind_the_count_is_read_and_one_is_written():
    layer = Layer.make()
    token = tuple(x[0, :ROWS] for x in layer.tokens)
    counts, flushes = torch.zeros(ROWS, dtype=torch.int64), torch.tensor([False, True])
    before = layer.state[layer.index]
    out = gdn_decode_replay(
        *token, *layer.weights, EPS, layer.conv, layer.state, layer.ring,
        layer.index, layer.index + 40, counts, flushes, **SIZES,
    )  # fmt: skip
    assert not out.isnan().any()
    after = layer.state[layer.index]
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
    for part in (layer.ring.k, layer.ring.u, layer.ring.g.unsqueeze(-1)):
        written = ~part[layer.index].isnan().all(-1)
        assert written[0, :, 0].all() and not written[0, :, 1:].any() and not written[1].any()


@pytest.mark.parametrize("replay", [False, True])
def test_without_a_norm_weight_the_norm_is_left_to_the_caller(replay):
    outs, units = [], []
    for normed in (True, False):
        torch.manual_seed(3)
        layer = Layer.make()
        qkv, z, a, b = (x[0, :ROWS] for x in layer.tokens)
        *weights, norm_weight = layer.weights
        # z is not read
        args = (qkv, z if normed else z * torch.nan, a, b, *weights, norm_weight if normed else None, EPS)
        places = (layer.index, layer.index + 40)
        if replay:
            ring = (layer.ring, *places, torch.zeros(ROWS, dtype=torch.int64), torch.tensor([False, True]))
            outs.append(gdn_decode_replay(*args, layer.conv, layer.state, *ring, **SIZES))
        else:
            outs.append(gdn_decode_fused(*args, layer.conv, layer.state, *places, **SIZES))
        units.append([x[layer.index] for x in (layer.conv, layer.state)])
    o, z = (x.view(ROWS, V_HEADS, V_DIM) for x in (outs[1], z))
    given = rms_norm_gated_given(o, z, norm_weight, EPS, sum_of_squares(o), V_DIM)
    torch.testing.assert_close(given.flatten(1), outs[0])
    assert all(map(torch.equal, *units))
