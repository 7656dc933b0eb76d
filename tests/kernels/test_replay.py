"""The replay ring in plain form: S + ring is the recurrence's state, and the rule of when it is folded."""

import pytest
import torch

from hybridserve.kernels.linear_attention.reference import linear_attention_reference
from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW, replay_flushes
from hybridserve.kernels.linear_attention.replay_reference import ReplayState, replay_decode_reference
from hybridserve.kernels.testing import relative_error

UNIT_STEP = 51_904_512 // 256


@pytest.mark.parametrize("g_scale", [0.0, 0.1, 20.0])
@pytest.mark.parametrize("flush_every", [1, 5, 16])
def test_replay_is_the_recurrence(flush_every, g_scale):
    torch.manual_seed(1)
    tokens, k_heads, v_heads, k_dim, v_dim = 40, 2, 4, 16, 8
    q, k = (torch.randn(tokens, k_heads, k_dim).double() for _ in range(2))
    v = torch.randn(tokens, v_heads, v_dim).double()
    g, beta = -g_scale * torch.rand(tokens, v_heads).double(), torch.rand(tokens, v_heads).double()
    initial = torch.randn(v_heads, v_dim, k_dim).double()
    exact, exact_state = linear_attention_reference(q, k, v, g, beta, initial)
    replay = ReplayState.start(initial, k_heads)
    out = []
    for t in range(tokens):
        flush = t % flush_every == flush_every - 1
        out.append(replay_decode_reference(q[t], k[t], v[t], g[t], beta[t], replay, flush))
        assert replay.g.shape[0] == (t + 1) % flush_every
    replay.flush()
    assert relative_error(torch.stack(out), exact) < 1e-14
    assert relative_error(replay.state, exact_state) < 1e-14


def steps_between_flushes(count: int, position: int, index: int, steps: int) -> list[int]:
    """Steps from one flush to the next, the first counted from now."""
    gaps, since = [], 0
    for p in range(position, position + steps):
        since += 1
        if replay_flushes(count, p, index):
            gaps.append(since)
            since = count = 0
        else:
            count += 1
        assert count < REPLAY_WINDOW
    return gaps


@pytest.mark.parametrize("count", [0, 3, 15])
@pytest.mark.parametrize("index", [0, 7 * UNIT_STEP, 1999 * UNIT_STEP])
def test_a_row_flushes_once_in_a_window_and_first_within_one(index, count):
    first, *rest = steps_between_flushes(count, 1000, index, 100)
    assert first <= REPLAY_WINDOW - count
    assert set(rest[1:]) == {REPLAY_WINDOW} and rest[0] <= REPLAY_WINDOW


def test_flushes_of_units_that_advance_together_are_spread():
    index = torch.arange(256) * UNIT_STEP
    counts, flushed = torch.zeros(256, dtype=torch.int64), []
    for position in range(500, 500 + 3 * REPLAY_WINDOW):
        now = replay_flushes(counts, torch.full_like(index, position), index)
        counts = torch.where(now, 0, counts + 1)
        flushed.append(int(now.sum()))
    assert sum(flushed[REPLAY_WINDOW:]) == 2 * 256
    assert max(flushed) <= 2 * 256 / REPLAY_WINDOW


def test_tensors_and_ints_follow_one_rule():
    generator = torch.Generator().manual_seed(3)
    counts, positions, index = (
        torch.randint(high, (500,), generator=generator) for high in (REPLAY_WINDOW, 1 << 20, 1 << 30)
    )
    flags = replay_flushes(counts, positions, index)
    rows = zip(counts.tolist(), positions.tolist(), index.tolist(), strict=True)
    assert flags.tolist() == [bool(replay_flushes(*row)) for row in rows]
