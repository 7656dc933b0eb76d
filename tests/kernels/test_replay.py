"""The replay ring in plain form: S + ring is the recurrence's state, and the rule of when it is folded."""

import numpy as np
import pytest
import torch

from hybridserve.kernels.linear_attention.reference import linear_attention_reference
from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW, replay_entries
from hybridserve.kernels.linear_attention.replay_reference import ReplayState, replay_decode_reference
from hybridserve.kernels.testing import relative_error


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


@pytest.mark.parametrize("stagger", [0, 1, 7, 15, 16, 2**63 + 5])
def test_a_row_flushes_once_in_a_window_and_counts_its_entries(stagger):
    tokens = np.arange(100)
    counts, flushes = replay_entries(tokens, np.full(100, stagger % REPLAY_WINDOW), REPLAY_WINDOW)
    at = np.flatnonzero(flushes)
    assert at[0] < REPLAY_WINDOW and set(np.diff(at)) == {REPLAY_WINDOW}
    entries = 0
    for count, flush in zip(counts, flushes, strict=True):
        assert count == entries < REPLAY_WINDOW
        entries = 0 if flush else entries + 1


def test_flushes_of_rows_that_advance_together_are_spread():
    generator = np.random.default_rng(3)
    stagger = generator.integers(0, 2**40, 256)
    flushed = [
        int(replay_entries(np.full(256, step), stagger, REPLAY_WINDOW)[1].sum())
        for step in range(REPLAY_WINDOW, 3 * REPLAY_WINDOW)
    ]
    assert sum(flushed) == 2 * 256
    assert max(flushed) <= 2 * 256 / REPLAY_WINDOW
