"""Linear attention's decode in one Gated DeltaNet layer of Qwen3.5-9B: general, fused, from replay rings."""

from collections.abc import Callable
from copy import copy

import torch
from case import Calls, Case

from hybridserve.kernels.causal_conv1d import causal_conv1d_decode, make_phase_weight
from hybridserve.kernels.causal_conv1d.reference import causal_conv1d_reference
from hybridserve.kernels.linear_attention import cpu, triton_decode
from hybridserve.kernels.linear_attention.reference import gdn_gates_reference, linear_attention_reference
from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW, ReplayRing
from hybridserve.kernels.linear_attention.triton_gdn_decode import gdn_decode_fused
from hybridserve.kernels.linear_attention.triton_gdn_decode_replay import flush_replay, gdn_decode_replay
from hybridserve.kernels.rms_norm.cpu import rms_norm_gated
from hybridserve.kernels.rms_norm.reference import rms_norm_gated_reference
from hybridserve.kernels.testing import L2_BYTES, Work, assert_as_good_as_plain

K_HEADS, V_HEADS, DIM, KERNEL, EPS = 16, 32, 128, 4, 1e-6
CHANNELS = (2 * K_HEADS + V_HEADS) * DIM
SIZES = {"num_k_heads": K_HEADS, "num_v_heads": V_HEADS, "head_k_dim": DIM, "head_v_dim": DIM}
STATE_BYTES = V_HEADS * DIM * DIM * 4
# qkv, z, out, and the ring's columns of one row
SMALL_BYTES = 2 * (CHANNELS + 2 * V_HEADS * DIM + KERNEL * CHANNELS)
# half a window of entries are read on average, one is written
ENTRY_BYTES = K_HEADS * DIM * 2 + V_HEADS * DIM * 4
RING_BYTES = ENTRY_BYTES * (REPLAY_WINDOW + 1) // 2


class Layer:
    """Weights and the states of `units` sequences."""

    def __init__(self, units: int) -> None:
        half = {"device": "cuda", "dtype": torch.bfloat16}
        self.units = units
        self.state = torch.randn(units, V_HEADS, DIM, DIM, device="cuda")
        self.conv = torch.randn(units, KERNEL, CHANNELS, **half)
        self.ring = ReplayRing(
            torch.randn(units, K_HEADS, REPLAY_WINDOW, DIM, **half),
            torch.randn(units, V_HEADS, REPLAY_WINDOW, DIM, device="cuda"),
            -torch.rand(units, V_HEADS, REPLAY_WINDOW, device="cuda"),
        )
        self.conv_weight = torch.randn(KERNEL, CHANNELS, **half).T
        self.A_log, self.dt_bias = torch.rand(2, V_HEADS, device="cuda")
        self.norm_weight = torch.rand(DIM, device="cuda")

    def token(self, batch: int) -> tuple[torch.Tensor, ...]:
        """qkv, z, a, b as views of one projection."""
        sizes = (CHANNELS, V_HEADS * DIM, V_HEADS, V_HEADS)
        qkv, z, b, a = torch.randn(batch, sum(sizes), device="cuda").to(torch.bfloat16).split(sizes, 1)
        return qkv, z, a, b

    def weights(self) -> tuple[object, ...]:
        return self.conv_weight, None, self.A_log, self.dt_bias, self.norm_weight, EPS

    def fused(self, token: tuple[torch.Tensor, ...], index: torch.Tensor) -> torch.Tensor:
        return gdn_decode_fused(*token, *self.weights(), self.conv, self.state, index, index + 100, **SIZES)

    def plain(self, token: tuple[torch.Tensor, ...], index: torch.Tensor) -> torch.Tensor:
        qkv, z, a, b = token
        weight = make_phase_weight(self.conv_weight)
        x = causal_conv1d_decode(qkv, weight, None, self.conv, index, index + 100)
        q, k, v = split_heads(x)
        g, beta = cpu.gdn_gates(a, b, self.A_log, self.dt_bias)
        out = cpu.linear_attention_decode(q, k, v, g, beta, self.state, index)
        return rms_norm_gated(out, z.reshape(out.shape), self.norm_weight, EPS).flatten(1)


def split_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = x.split((K_HEADS * DIM, K_HEADS * DIM, V_HEADS * DIM), 1)
    heads = (-1, DIM)
    return q.unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, heads)


def rows_of_calls(batch: int, least: int) -> list[torch.Tensor]:
    """Which states each call takes: enough calls that none finds its own in the L2."""
    calls = max(least, 2, -(-3 * L2_BYTES // (batch * STATE_BYTES)))
    return list(torch.arange(calls * batch, device="cuda").split(batch))


def exact(
    layer: Layer,
    token: tuple[torch.Tensor, ...],
    index: torch.Tensor,
    conv: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The truth, fp64; `conv` and `state` (fp64) of all units are updated."""
    qkv, z, a, b = (x.double() for x in token)
    out = []
    for i, unit in enumerate(index.tolist()):
        position = unit + 100
        history = conv[unit, [(position - lag) % KERNEL for lag in range(KERNEL - 1, 0, -1)]].double()
        conv[unit, position % KERNEL] = token[0][i]
        x = causal_conv1d_reference(qkv[i : i + 1], layer.conv_weight.double(), None, history)
        gates = gdn_gates_reference(a[i : i + 1], b[i : i + 1], layer.A_log, layer.dt_bias)
        o, state[unit] = linear_attention_reference(*split_heads(x), *gates, state[unit])
        out.append(
            rms_norm_gated_reference(o, z[i].view(o.shape), layer.norm_weight.double(), EPS).flatten(1)
        )
    return torch.cat(out)


def gate() -> None:
    """Fused against plain, then steps from the ring against fused ones, outputs and states."""
    layer, index = Layer(8), torch.tensor([5, 0, 3], device="cuda")
    other, conv, state = copy(layer), layer.conv.clone(), layer.state.double()
    other.conv, other.state = layer.conv.clone(), layer.state.clone()
    token = layer.token(3)
    out, plain = layer.fused(token, index), other.plain(token, index)
    assert_as_good_as_plain(out, plain, exact(layer, token, index, conv, state))
    assert_as_good_as_plain(layer.state, other.state, state)

    counts, full = torch.zeros_like(index), torch.tensor([2, 7, 15], device="cuda")
    other.conv, other.state = layer.conv.clone(), layer.state.clone()
    state = layer.state.double()
    for _ in range(12):
        token, flushes = layer.token(3), counts == full
        out, fused = run_replay(layer, token, index, counts, flushes), other.fused(token, index)
        assert_as_good_as_plain(out, fused, exact(layer, token, index, conv, state))
        counts = torch.where(flushes, 0, counts + 1)
    flush_replay(layer.state, layer.ring, index, counts)
    assert_as_good_as_plain(layer.state, other.state, state)


def run_replay(
    layer: Layer,
    token: tuple[torch.Tensor, ...],
    index: torch.Tensor,
    counts: torch.Tensor,
    flushes: torch.Tensor,
) -> torch.Tensor:
    return gdn_decode_replay(
        *token,
        *layer.weights(),
        layer.conv,
        layer.state,
        layer.ring,
        index,
        index + 100,
        counts,
        flushes,
        **SIZES,
    )


def fused_case(batch: int, goal_us: float | None) -> Case:
    def build(plain: bool = False) -> Calls:
        rows = rows_of_calls(batch, 2)
        layer = Layer(len(rows) * batch)
        step = layer.plain if plain else layer.fused

        def one(index: torch.Tensor) -> Callable[[], object]:
            token = layer.token(batch)
            return lambda: step(token, index)

        return [one(index) for index in rows]

    return Case(
        operator="gdn decode fused",
        shape=f"{batch} sequences, 16/32 heads of 128, fp32 state",
        work=Work(nbytes=batch * (2 * STATE_BYTES + SMALL_BYTES)),
        calls=build,
        gate=gate,
        goal_us=goal_us,
        plain=lambda: build(plain=True),
        plain_in_graph=False,
    )


def replay_case(batch: int, goal_us: float | None) -> Case:
    """All steps of a window: the rows' counts are spread over it and move on by one a call."""

    def build() -> Calls:
        rows = rows_of_calls(batch, 2)
        layer = Layer(len(rows) * batch)

        def one(i: int) -> Callable[[], object]:
            token, index = layer.token(batch), rows[i % len(rows)]
            counts = (torch.arange(batch, device="cuda") * 7 + i) % REPLAY_WINDOW
            flushes = counts == REPLAY_WINDOW - 1
            return lambda: run_replay(layer, token, index, counts, flushes)

        return [one(i) for i in range(max(REPLAY_WINDOW, len(rows)) // REPLAY_WINDOW * REPLAY_WINDOW)]

    per_row = STATE_BYTES + STATE_BYTES // REPLAY_WINDOW + RING_BYTES + SMALL_BYTES
    return Case(
        operator="gdn decode replay",
        shape=f"{batch} sequences, 16/32 heads of 128, fp32 state, window 16",
        work=Work(nbytes=batch * per_row),
        calls=build,
        gate=gate,
        goal_us=goal_us,
    )


def general_case(batch: int, goal_us: float | None) -> Case:
    def build() -> Calls:
        rows = rows_of_calls(batch, 2)
        layer = Layer(len(rows) * batch)

        def one(index: torch.Tensor) -> Callable[[], object]:
            q, k, v = split_heads(layer.token(batch)[0])
            g, beta = -torch.rand(batch, V_HEADS, device="cuda"), torch.rand(batch, V_HEADS, device="cuda")
            return lambda: triton_decode.linear_attention_decode(q, k, v, g, beta, layer.state, index)

        return [one(index) for index in rows]

    def general_gate() -> None:
        layer, index = Layer(1), torch.tensor([0], device="cuda")
        g, beta = -torch.rand(1, V_HEADS, device="cuda"), torch.rand(1, V_HEADS, device="cuda")
        inputs = (*split_heads(layer.token(1)[0]), g, beta)
        plain_state, exact_inputs = layer.state.clone(), (x.double() for x in inputs)
        truth, truth_state = linear_attention_reference(*exact_inputs, layer.state[0].double())
        out = triton_decode.linear_attention_decode(*inputs, layer.state, index)
        plain = cpu.linear_attention_decode(*inputs, plain_state, index)
        assert_as_good_as_plain(out, plain, truth)
        assert_as_good_as_plain(layer.state[0], plain_state[0], truth_state)

    return Case(
        operator="linear attention decode",
        shape=f"{batch} sequences, 16/32 heads of 128, fp32 state",
        work=Work(nbytes=batch * (2 * STATE_BYTES + 2 * (CHANNELS + V_HEADS * DIM))),
        calls=build,
        gate=general_gate,
        goal_us=goal_us,
    )


def cases() -> list[Case]:
    return [
        general_case(256, 295),
        general_case(1, None),
        fused_case(256, 295),
        fused_case(32, None),
        fused_case(1, 6),
        replay_case(256, 175),
        replay_case(32, None),
        replay_case(1, None),
    ]


def warmups() -> list[Callable[[], object]]:
    layer, index = Layer(1), torch.zeros(1, dtype=torch.int64, device="cuda")
    token, flushes = layer.token(1), torch.zeros(1, dtype=torch.bool, device="cuda")
    return [
        lambda: layer.fused(token, index),
        lambda: run_replay(layer, token, index, index, flushes),
        lambda: flush_replay(layer.state, layer.ring, index, index),
    ]
